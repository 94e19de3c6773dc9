"""Which versions are to be evaluated: pure arithmetic.

A milestone is version 0, every multiple of `every_steps`, and the final version. A server that
skips versions evaluates the first version at or after a milestone that it meets.
"""

from __future__ import annotations


def milestone_of(version: int, *, every_steps: int, final: int) -> int:
    """The last milestone at or before `version` (>= 0).

    >>> [milestone_of(version, every_steps=10, final=25) for version in (0, 9, 11, 25)]
    [0, 0, 10, 25]
    """
    if version >= final:
        return final
    return version - version % every_steps if every_steps else 0


def next_milestone(milestone: int, *, every_steps: int, final: int) -> int:
    """The milestone after this one (the final one is followed by itself).

    >>> next_milestone(10, every_steps=10, final=15)
    15
    """
    return min(milestone + every_steps, final) if every_steps else final

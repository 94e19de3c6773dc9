"""Which checkpoints are deleted: a pure decision."""

from __future__ import annotations

from collections.abc import Collection


def superfluous(versions: Collection[int], *, saved: int, keep: int) -> list[int]:
    """All but `saved` and the newest `keep` - 1 below it, in order; `saved` itself never.

    Versions above `saved` were renamed but never named by `latest`: their trainer was killed in
    between, and the one that followed resumed below them.

    >>> superfluous([2, 4, 6, 8], saved=6, keep=2)
    [2, 8]
    """
    below = sorted(version for version in versions if version < saved)
    above = sorted(version for version in versions if version > saved)
    return below[: max(0, len(below) - (keep - 1))] + above

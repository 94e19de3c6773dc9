"""Which checkpoints are deleted, and which is the best: pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def superfluous(versions: Collection[int], *, saved: int, keep: int, spared: Collection[int] = ()) -> list[int]:
    """All but `saved`, the newest `keep` - 1 below it and the `spared`, in order; `saved` itself never.

    Versions above `saved` were renamed but never named by `latest`: their trainer was killed in
    between, and the one that followed resumed below them. They go even if spared.

    >>> superfluous([2, 4, 6, 8], saved=6, keep=2)
    [2, 8]
    >>> superfluous([2, 4, 6], saved=6, keep=1, spared=[2])
    [4]
    """
    below = sorted(version for version in versions if version < saved)
    above = sorted(version for version in versions if version > saved)
    oldest = below[: max(0, len(below) - (keep - 1))]
    return [version for version in oldest if version not in spared] + above


def ranked(versions: Collection[int], accuracies: Mapping[int, float], *, span: int) -> list[int]:
    """The versions that have an evaluation, best first; of equals the newer.

    A server that was busy evaluates a later version than it was to: an evaluation counts for the
    newest checkpoint at or before it that is less than `span` versions older, the first one first.

    >>> ranked([10, 20, 30], {10: 0.5, 21: 0.7, 35: 0.6}, span=10)
    [20, 30, 10]
    """
    scores: dict[int, float] = {}
    for evaluated in sorted(accuracies):
        owner = max((version for version in versions if version <= evaluated), default=None)
        if owner is not None and evaluated - owner < span:
            scores.setdefault(owner, accuracies[evaluated])
    return sorted(scores, key=lambda version: (scores[version], version), reverse=True)


def spared(
    versions: Collection[int], accuracies: Mapping[int, float], *, span: int, keep: int, keep_best: int
) -> list[int]:
    """The `keep_best` best; and beyond the newest `keep`, as many whose evaluation may still come, newest first.

    >>> spared([10, 20, 30, 40, 50], {10: 0.9, 20: 0.1}, span=10, keep=1, keep_best=1)
    [10, 40]
    """
    if keep_best == 0:
        return []
    newest_evaluated = max(accuracies, default=-1)
    older = sorted(versions, reverse=True)[keep:]
    waiting = [version for version in older if version > newest_evaluated]
    return ranked(versions, accuracies, span=span)[:keep_best] + waiting[:keep_best]

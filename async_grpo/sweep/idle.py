"""How long rollout servers generated nothing while the trainer was at work. Pure: spans of time in, shares out.

trainer      |--wait--|----train----|--wait--|          the run is going on
rollout-0      |-group 0-|        |--group 1-|          it generates
idle         |-|         |--------|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from async_grpo.telemetry.rows import Row, number

Span = tuple[float, float]
"""From, to; in seconds."""

_STARTING = "start"
_GENERATING = ("generation", "evaluation")


def rollout_idle_share(trainer: Iterable[Row], servers: Sequence[Iterable[Row]]) -> float | None:
    """Share of the trainer's time in which a server generated nothing, mean over the servers; None if unknown.

    The rows are those of `timeline/<role>.jsonl`. What the trainer waits before its first batch, while engines load,
    does not count; nor does the time between an invocation and the one that resumes it.
    """
    at_work = merged(_spans(row for row in trainer if row.get("name") != _STARTING))
    total = length(at_work)
    if not total or not servers:
        return None
    busy = [merged(_spans(row for row in rows if row.get("track") in _GENERATING)) for rows in servers]
    return sum(1.0 - length(overlap(at_work, spans)) / total for spans in busy) / len(busy)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that neither touch nor overlap, in order.

    >>> merged([(3, 4), (0, 1), (1, 2)])
    [(0, 2), (3, 4)]
    """
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], end))
        elif end > start:
            whole.append((start, end))
    return whole


def overlap(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What two merged sequences have in common."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(spans: Iterable[Span]) -> float:
    """Seconds."""
    return sum(end - start for start, end in spans)


def _spans(rows: Iterable[Row]) -> list[Span]:
    found = [(number(row, "start_s"), number(row, "end_s")) for row in rows]
    return [(start, end) for start, end in found if start is not None and end is not None]

"""Idle time of the trainer and the rollout servers. `telemetry.bottleneck` has the conclusions from it.

    metrics.jsonl           wait_s, step_s, time_s   -->  trainer_idle_share
                                    |
    timeline/rollout-*.jsonl      spans              -->  rollout_idle_share

A rollout server is idle while it generates nothing. Only the time of the trainer's steps counts:

    trainer      |--wait--|----train----|--wait--|          steps
    rollout-0      |-group 0-|        |--group 1-|          spans in which the server generates
    idle         |-|         |--------|

Steps that waited for a server to be restarted show nothing about either side, so `undisturbed_steps` excludes them.

Reports, sweeps and the page of runs use these functions, so that their shares agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from async_grpo.telemetry.rows import Row, number, numbers, rate
from async_grpo.telemetry.timeline import PROCESS_TRACK, STARTED

Floats = npt.NDArray[np.float64]
Span = tuple[float, float]
"""Start and end, in seconds."""

EVALUATION = "evaluation"
GENERATING = ("generation", EVALUATION)
"""Tracks in whose spans a server generates."""


def outages(server: Iterable[Row]) -> list[Span]:
    """Return the intervals in which a rollout server was away: from the last row of one process to the first
    generation of the next. `server`: rows of its timeline.

        group 1 |-----|   killed   started |..loads, waits for leases..| group 2 |-----|
                      |--------------------- outage --------------------|
    """
    rows = list(server)
    starts = np.array([row["start_s"] for row in rows if _is_start(row)], dtype=np.float64)
    generating, _ = _spans(row for row in rows if row.get("track") in GENERATING)
    _, ends = _spans(rows)
    intervals = []
    for started in np.sort(starts)[1:]:
        before = ends[ends <= started]
        after = generating[generating >= started]
        if len(before) and len(after):
            intervals.append((float(before.max()), float(after.min())))
    return merged(intervals)


def undisturbed_steps(rows: Sequence[Row], servers: Iterable[Iterable[Row]]) -> Sequence[Row]:
    """Return the steps during which no server was away. If every step was disturbed, return all steps.

    While a server is away, its groups occupy the window: the trainer waits for them, and other servers may not admit
    new ones. Both sides wait as if `max_staleness` were too small, but a larger one would not help.
    """
    away = merged(span for server in servers for span in outages(server))
    undisturbed = [row for row in rows if not overlap(away, _window(row))]
    return undisturbed or rows


def trainer_idle_share(rows: Sequence[Row]) -> float | None:
    """Return the share of the steps' time in which the trainer waited for a batch; None without steps."""
    return rate(sum(numbers(rows, "wait_s")), sum(numbers(rows, "step_s")))


def rollout_idle_share(rows: Sequence[Row], servers: Sequence[Iterable[Row]]) -> float | None:
    """Return the share of the steps' time in which a server generated nothing, mean over the servers; None if unknown.

    `servers`: rows of each timeline/rollout-*.jsonl. The wait for the first batch, while engines load, does not count,
    nor does the time between two invocations.
    """
    idle_by_step = rollout_idle_s(rows, servers)
    if not idle_by_step:
        return None
    starts, ends = _windows(rows)
    return rate(sum(idle_by_step), float((ends - starts).sum()))


def rollout_idle_s(rows: Sequence[Row], servers: Sequence[Iterable[Row]]) -> list[float]:
    """Return, for each step, the seconds in which a server generated nothing; mean over the servers, [] if unknown."""
    starts, ends = _windows(rows)
    spans = [_spans(row for row in server if row.get("track") in GENERATING) for server in servers]
    return idle_s(starts, ends, spans).tolist() if spans else []


def idle_s(starts: Floats, ends: Floats, servers: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Return, for each interval, the seconds in which a server generated nothing; mean over the servers, float64 [n].

    `starts`, `ends`: of the n intervals. `servers`: for each server, starts and ends of its generating spans.
    """
    idle_by_server = []
    for spans in servers:
        busy_until = _make_coverage(*spans)
        busy = busy_until(ends) - busy_until(starts)
        idle_by_server.append(np.maximum(0.0, ends - starts - busy))  # rounding may leave -1e-10
    idle: Floats = np.mean(idle_by_server, axis=0)
    return idle


def busy_share(starts: Floats, ends: Floats, from_s: float, to_s: float) -> float:
    """Return the share of the time from `from_s` to `to_s` that at least one span covers.

    >>> busy_share(np.array([0.0, 3.0, 4.0]), np.array([2.0, 5.0, 20.0]), 1.0, 11.0)
    0.9
    """
    covered_until = _make_coverage(starts, ends)
    covered_s = covered_until(np.array([from_s, to_s]))
    return float(covered_s[1] - covered_s[0]) / (to_s - from_s)


def evaluating_share(rows: Sequence[Row], servers: Iterable[Iterable[Row]]) -> float | None:
    """Return the share of the steps' time in which any server evaluated held-out prompts; None without steps."""
    evaluations = (row for server in servers for row in server if row.get("track") == EVALUATION)
    evaluated_until = _make_coverage(*_spans(evaluations))
    starts, ends = _windows(rows)
    return rate(float((evaluated_until(ends) - evaluated_until(starts)).sum()), float((ends - starts).sum()))


def _windows(rows: Iterable[Row]) -> tuple[Floats, Floats]:
    """Return start and end of each step. Rows without times are omitted."""
    ends, lengths = _columns(rows, "time_s", "step_s")
    return ends - lengths, ends


def _window(row: Row) -> list[Span]:
    """Return start and end of the step as one span; [] without times."""
    end = number(row, "time_s")
    step_s = number(row, "step_s")
    if end is None or step_s is None:
        return []
    return [(end - step_s, end)]


def _is_start(row: Row) -> bool:
    """True if the row is the start of a server process."""
    return row.get("track") == PROCESS_TRACK and row.get("name") == STARTED and number(row, "start_s") is not None


def _spans(rows: Iterable[Row]) -> tuple[Floats, Floats]:
    """Return starts and ends of the rows' spans. Rows without both are omitted."""
    return _columns(rows, "start_s", "end_s")


def _columns(rows: Iterable[Row], first: str, second: str) -> tuple[Floats, Floats]:
    pairs = [(number(row, first), number(row, second)) for row in rows]
    table = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _make_coverage(starts: Floats, ends: Floats) -> Callable[[Floats], Floats]:
    """Return a function from times to the number of seconds before each time that the spans cover."""
    order = np.argsort(starts, kind="stable")
    order = order[ends[order] > starts[order]]
    starts = starts[order]
    reached = np.maximum.accumulate(ends[order])

    # Merge overlapping spans. A merged span starts where all earlier spans have ended, and ends just before the next
    # one starts: at index gap - 1, and the last one at -1.
    if len(order):
        gaps = np.flatnonzero(starts[1:] > reached[:-1]) + 1
        starts = starts[np.append(0, gaps)]
        ends = reached[np.append(gaps - 1, -1)]
    else:
        ends = ends[:0]
    covered_before = np.concatenate([[0.0], np.cumsum(ends - starts)])
    # For times before the first span, `index - 1` below is -1, the last entry. It must subtract nothing.
    ends = np.append(ends, -np.inf)

    def covered_until(times: Floats) -> Floats:
        index = np.searchsorted(starts, times, side="right")
        seconds: Floats = covered_before[index] - np.maximum(0.0, ends[index - 1] - times)
        return seconds

    return covered_until


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge spans into sorted spans that neither touch nor overlap.

    >>> merged([(3, 4), (0, 1), (1, 2)])
    [(0, 2), (3, 4)]
    """
    merged_spans: list[Span] = []
    for start, end in sorted(spans):
        if merged_spans and start <= merged_spans[-1][1]:
            merged_spans[-1] = (merged_spans[-1][0], max(merged_spans[-1][1], end))
        elif end > start:
            merged_spans.append((start, end))
    return merged_spans


def overlap(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """Return the intersection of two sequences of merged spans, as merged spans."""
    common = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(spans: Iterable[Span]) -> float:
    """Return the total length of the spans in seconds."""
    return sum(end - start for start, end in spans)

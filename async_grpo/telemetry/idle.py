"""How long each side of a run waited; `telemetry.bottleneck` has what follows from it.

    metrics.jsonl           wait_s, step_s, time_s   -->  trainer_idle_share
                                    |
    timeline/rollout-*.jsonl      spans              -->  rollout_idle_share

A rollout server is idle while it generates nothing. Only the time of the trainer's steps counts:

    trainer      |--wait--|----train----|--wait--|          the run in progress
    rollout-0      |-group 0-|        |--group 1-|          it generates
    idle         |-|         |--------|

Steps that waited for a server to be started again say nothing about either side: `undisturbed_steps` leaves them out.

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
    """The times in which a rollout server was away: from the last that a process of it wrote until the next process
    generated. `server`: the rows of its timeline.

        group 1 |-----|   killed   started |..loads, waits for leases..| group 2 |-----|
                      |--------------------- outage --------------------|
    """
    rows = list(server)
    starts = np.array([row["start_s"] for row in rows if _is_start(row)], dtype=np.float64)
    generating, _ = _spans(row for row in rows if row.get("track") in GENERATING)
    _, ends = _spans(rows)
    found = []
    for started in np.sort(starts)[1:]:
        before, after = ends[ends <= started], generating[generating >= started]
        if len(before) and len(after):
            found.append((float(before.max()), float(after.min())))
    return merged(found)


def undisturbed_steps(rows: Sequence[Row], servers: Iterable[Iterable[Row]]) -> Sequence[Row]:
    """The steps during which no server was away; all of them if none is left.

    While a server is away, its groups hold the window: the trainer waits for them, and other servers may not admit
    new ones. Both sides wait as they do where S is too small, but a larger S would not help.
    """
    away = merged(span for server in servers for span in outages(server))
    calm = [row for row in rows if not overlap(away, _window(row))]
    return calm or rows


def trainer_idle_share(rows: Sequence[Row]) -> float | None:
    """Share of the steps' time in which the trainer waited for a batch; None without steps."""
    return rate(sum(numbers(rows, "wait_s")), sum(numbers(rows, "step_s")))


def rollout_idle_share(rows: Sequence[Row], servers: Sequence[Iterable[Row]]) -> float | None:
    """Share of the steps' time in which a server generated nothing, mean over the servers; None if unknown.

    `servers` are the rows of each timeline/rollout-*.jsonl. The wait for the first batch, while engines load, does not
    count, nor does the time between an invocation and the one that resumes it.
    """
    starts, ends = _windows(rows)
    return rate(sum(found), float((ends - starts).sum())) if (found := rollout_idle_s(rows, servers)) else None


def rollout_idle_s(rows: Sequence[Row], servers: Sequence[Iterable[Row]]) -> list[float]:
    """Seconds of each step in which a server generated nothing, mean over the servers; [] if unknown."""
    starts, ends = _windows(rows)
    spans = [_spans(row for row in server if row.get("track") in GENERATING) for server in servers]
    return idle_s(starts, ends, spans).tolist() if spans else []


def idle_s(starts: Floats, ends: Floats, servers: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Seconds of each window in which a server generated nothing, mean over the servers, float64 [windows]. `servers`:
    starts and ends of the spans in which each one generated."""
    busy = [_covered(*spans) for spans in servers]
    idle: Floats = np.mean([np.maximum(0.0, ends - starts - (by(ends) - by(starts))) for by in busy], axis=0)
    return idle


def busy_share(starts: Floats, ends: Floats, from_s: float, to_s: float) -> float:
    """Share of the time from `from_s` to `to_s` in which at least one of the spans was open.

    >>> busy_share(np.array([0.0, 3.0, 4.0]), np.array([2.0, 5.0, 20.0]), 1.0, 11.0)
    0.9
    """
    before = _covered(starts, ends)(np.array([from_s, to_s]))
    return float(before[1] - before[0]) / (to_s - from_s)


def evaluating_share(rows: Sequence[Row], servers: Iterable[Iterable[Row]]) -> float | None:
    """Share of the steps' time in which any server evaluated held-out prompts; None without steps."""
    by = _covered(*_spans(row for server in servers for row in server if row.get("track") == EVALUATION))
    starts, ends = _windows(rows)
    return rate(float((by(ends) - by(starts)).sum()), float((ends - starts).sum()))


def _windows(rows: Iterable[Row]) -> tuple[Floats, Floats]:
    """When each step began and ended; rows without times are left out."""
    ends, lengths = _columns(rows, "time_s", "step_s")
    return ends - lengths, ends


def _window(row: Row) -> list[Span]:
    """When the step began and ended; [] without times."""
    end, took_s = number(row, "time_s"), number(row, "step_s")
    return [] if end is None or took_s is None else [(end - took_s, end)]


def _is_start(row: Row) -> bool:
    """True if a process of the server began."""
    return row.get("track") == PROCESS_TRACK and row.get("name") == STARTED and number(row, "start_s") is not None


def _spans(rows: Iterable[Row]) -> tuple[Floats, Floats]:
    """Starts and ends of the rows' spans; rows without both are left out."""
    return _columns(rows, "start_s", "end_s")


def _columns(rows: Iterable[Row], first: str, second: str) -> tuple[Floats, Floats]:
    found = [(number(row, first), number(row, second)) for row in rows]
    table = np.array([pair for pair in found if None not in pair], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _covered(starts: Floats, ends: Floats) -> Callable[[Floats], Floats]:
    """A function from times to the seconds before each that the spans cover."""
    order = np.argsort(starts, kind="stable")
    order = order[ends[order] > starts[order]]
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(starts[1:] > reached[:-1]) + 1  # where no earlier span is open
    starts, ends = (starts[np.append(0, apart)], reached[np.append(apart, 0) - 1]) if len(order) else (starts, ends[:0])
    before = np.concatenate([[0.0], np.cumsum(ends - starts)])
    ends = np.append(ends, -np.inf)  # of the place before the first span

    def covered(at: Floats) -> Floats:
        place = np.searchsorted(starts, at, side="right")
        seconds: Floats = before[place] - np.maximum(0.0, ends[place - 1] - at)
        return seconds

    return covered


def merged(spans: Iterable[Span]) -> list[Span]:
    """The time that the spans cover, as spans in order that neither touch nor overlap.

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
    """The time that two merged sequences have in common, as merged spans."""
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
    """Total length of the spans in seconds."""
    return sum(end - start for start, end in spans)

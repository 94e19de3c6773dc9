"""Reads the speed of a finished or live run from its files.

metrics.jsonl               steps: waits, computing, tokens read
timeline/trainer.jsonl      spans in which the trainer computed, waited, and published a version
timeline/rollout-*.jsonl    groups: start, end, lengths; weight updates; evaluations; waits for tickets, tasks and
                            processors
samples/*.jsonl             lengths, for runs whose timeline has none
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.app.runs.run import Run
from async_grpo.config import RunConfig
from async_grpo.errors import DataError
from async_grpo.telemetry.idle import Span, merged, outages, overlap
from async_grpo.telemetry.jsonl import iter_rows
from async_grpo.telemetry.metrics import COMPUTE
from async_grpo.telemetry.rows import Row, number
from async_grpo.telemetry.timeline import CPU_TRACK

MIN_STEPS = 3
"""Minimum number of steps: the first one starts up, and a single other one shows no variation."""
SLOW_FACTOR = 1.5
"""A server is slow if its tokens take this many times as long as those of the others."""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group as a server generated it. Times are Unix seconds; it ends when it is judged."""

    seq: int
    version: int
    """Version of its ticket."""
    started_s: float
    ended_s: float
    lengths: tuple[int, ...]
    """Completion tokens of its samples; () if the run did not record them."""
    queued_s: float = 0.0
    """Seconds until its first sample had a slot."""
    judged_s: float = 0.0
    """Seconds from its last token to its end."""

    @property
    def generated_at_s(self) -> float:
        """Time of its last token."""
        return self.ended_s - self.judged_s


@dataclass(slots=True)
class RecordedServer:
    """One rollout server of a recorded run."""

    groups: list[RecordedGroup] = field(default_factory=list)
    loads: list[tuple[float, float, int]] = field(default_factory=list)
    """Start, end and version of every weight update."""
    updates: list[Row] = field(default_factory=list)
    """Timeline rows of these updates."""
    evaluations: list[Span] = field(default_factory=list)
    ticket_waits: list[Span] = field(default_factory=list)
    starved: list[Span] = field(default_factory=list)
    """Spans without a waiting task, while the task source was read."""
    contended: list[tuple[float, float, float]] = field(default_factory=list)
    """Start, end, and seconds in between for which this server waited for a processor."""
    outages: list[Span] = field(default_factory=list)
    """Spans in which the server was down and restarting."""
    name: str = ""

    @property
    def load_spans(self) -> list[Span]:
        """Spans in which weights were loaded, merged."""
        return merged((start, end) for start, end, _ in self.loads)

    def contended_s(self, span: Span) -> float:
        """Seconds within the span for which this server waited for a processor, assuming an even distribution."""
        return sum(
            waited_s * max(0.0, min(end, span[1]) - max(start, span[0])) / (end - start)
            for start, end, waited_s in self.contended
            if end > start
        )


@dataclass(slots=True)
class RecordedRun:
    """The speed of a run."""

    path: Path
    config: RunConfig
    steps: list[Row]
    servers: list[RecordedServer]
    computing: list[Span]
    """Spans in which the trainer computed."""
    waits: list[Span]
    """Spans in which it waited for a batch."""
    published: dict[int, Span]
    """Version -> span of its first publication."""

    @property
    def window(self) -> Span:
        """From the start of the second step to the end of the last, in Unix seconds."""
        return span_of_steps(self.steps[1:])

    @property
    def outages(self) -> list[Span]:
        """Spans in which any server was down and restarting."""
        return merged(span for server in self.servers for span in server.outages)

    def without_outages(self, steps: Sequence[Row]) -> Sequence[Row]:
        """The steps during which no server was down; all of them if there is none."""
        spans = self.outages
        return [row for row in steps if not overlap(spans, [span_of_steps([row])])] or steps

    @property
    def groups(self) -> list[RecordedGroup]:
        """Groups of all servers, by sequence number."""
        return sorted((group for server in self.servers for group in server.groups), key=lambda group: group.seq)

    @property
    def lengths(self) -> list[list[int]]:
        """Completion tokens per group whose lengths are recorded, by sequence number."""
        return [list(group.lengths) for group in self.groups if group.lengths]


def read_recorded(path: Path) -> RecordedRun:
    """Read the folder of a run. Raises ConfigError if it is not one, DataError if it has too few steps or groups."""
    run = Run.open(path)
    steps = [row for row in run.steps() if not row.get("replayed")]
    trainer_spans = _read_spans(path / "timeline" / "trainer.jsonl")
    sampled_lengths = _read_sampled_lengths(path / "samples")

    servers: list[RecordedServer] = []
    for file in sorted((path / "timeline").glob("*.jsonl")):
        if file.stem not in ("trainer", "publisher", "supervisor"):
            server = _read_server(file, sampled_lengths)
            if server.groups:
                servers.append(server)

    recorded = RecordedRun(
        path=path,
        config=run.config,
        steps=steps,
        servers=servers,
        computing=merged((span.start_s, span.end_s) for span in trainer_spans if span.name in COMPUTE),
        waits=[(span.start_s, span.end_s) for span in trainer_spans if span.name == "wait"],
        published=_first_publications(trainer_spans),
    )
    if len(steps) < MIN_STEPS or not recorded.servers:
        raise DataError(
            f"{path} has {len(steps)} steps and {len(recorded.groups)} groups in its timeline: too few to calibrate "
            f"on. Use a run of at least {MIN_STEPS} steps whose folder has metrics.jsonl and timeline/"
        )
    return recorded


class _TimelineSpan(NamedTuple):
    name: str
    start_s: float
    end_s: float
    track: str
    args: dict[str, Any]


def _read_spans(path: Path) -> list[_TimelineSpan]:
    if not path.exists():
        return []
    spans: list[_TimelineSpan] = []
    for row in iter_rows(path):
        start_s = number(row, "start_s")
        end_s = number(row, "end_s")
        name = row.get("name")
        if start_s is not None and end_s is not None and isinstance(name, str):
            spans.append(_TimelineSpan(name, start_s, end_s, str(row.get("track")), row.get("args") or {}))
    return spans


def _first_publications(spans: Iterable[_TimelineSpan]) -> dict[int, Span]:
    """Version -> span of its first publication. A restarted trainer may publish a version again."""
    published: dict[int, Span] = {}
    for span in spans:
        version = span.args.get("version")
        if span.name == "publish" and isinstance(version, int):
            published.setdefault(version, (span.start_s, span.end_s))
    return published


def _read_server(file: Path, sampled_lengths: dict[int, tuple[int, ...]]) -> RecordedServer:
    server = RecordedServer(name=file.stem, outages=outages(iter_rows(file)))
    for name, start_s, end_s, track, args in _read_spans(file):
        # Names are such as "group 12", "version 3", "ticket" and "tasks".
        kind, _, suffix = name.partition(" ")
        if track == "generation" and suffix.isdigit():
            seq = int(suffix)
            server.groups.append(
                RecordedGroup(
                    seq=seq,
                    version=args.get("version", 0),
                    started_s=start_s,
                    ended_s=end_s,
                    lengths=tuple(args.get("lengths") or sampled_lengths.get(seq, ())),
                    queued_s=number(args, "queued_s") or 0.0,
                    judged_s=number(args, "judged_s") or 0.0,
                )
            )
        elif track == "weights" and suffix.isdigit():
            server.loads.append((start_s, end_s, int(suffix)))
            server.updates.append({"track": track, "args": args})
        elif track == "evaluation":
            server.evaluations.append((start_s, end_s))
        elif track == "wait" and kind == "ticket":
            server.ticket_waits.append((start_s, end_s))
        elif track == "wait" and kind == "tasks":
            server.starved.append((start_s, end_s))
        elif track == CPU_TRACK:
            server.contended.append((start_s, end_s, number(args, "waited_s") or 0.0))
    return server


def _read_sampled_lengths(folder: Path) -> dict[int, tuple[int, ...]]:
    """Sequence number -> completion tokens, for the groups that were written as samples."""
    lengths: dict[int, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for row in iter_rows(file):
            completions = row.get("completions")
            if isinstance(row.get("seq"), int) and isinstance(completions, list):
                # A completion ends where its last version span ends.
                lengths[row["seq"]] = tuple(
                    completion["spans"][-1][2] for completion in completions if completion.get("spans")
                )
    return lengths


def span_of_steps(steps: Sequence[Row]) -> Span:
    """From the start of the first of these steps to the end of the last, in Unix seconds."""
    first_end_s = number(steps[0], "time_s") or 0.0
    start_s = first_end_s - (number(steps[0], "step_s") or 0.0)
    return start_s, number(steps[-1], "time_s") or 0.0


def server_slowdowns(servers: Sequence[RecordedServer]) -> list[float]:
    """Factor by which each server's tokens take longer than those of the fastest; 1 for a server that is not slow."""
    token_s = [_median_token_s(server) for server in servers]
    if len(token_s) < 2:
        return [1.0] * len(token_s)

    fastest_s = min((seconds for seconds in token_s if seconds), default=0.0)
    # The median of two would lie halfway to the slow one.
    usual_s = statistics.median(token_s) if len(token_s) > 2 else fastest_s
    limit_s = SLOW_FACTOR * usual_s
    return [seconds / fastest_s if seconds >= limit_s > 0 else 1.0 for seconds in token_s]


def _median_token_s(server: RecordedServer) -> float:
    """Median seconds per token of a group's longest sample; 0 if no lengths are recorded."""
    paces = [(group.generated_at_s - group.started_s) / max(group.lengths) for group in server.groups if group.lengths]
    return statistics.median(paces) if paces else 0.0


def covered_fraction(span: Span, others: Sequence[Span]) -> float:
    """Fraction of the span that `others` cover. They must be sorted and disjoint."""
    start, end = span
    first = max(0, bisect_left(others, (start, start)) - 1)
    covered = 0.0
    for other_start, other_end in others[first:]:
        if other_start >= end:
            break
        covered += max(0.0, min(end, other_end) - max(start, other_start))
    return covered / (end - start) if end > start else 0.0

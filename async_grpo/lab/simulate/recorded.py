"""What the files of a finished or live run say about its speed.

metrics.jsonl               steps: waits, computing, tokens read
timeline/trainer.jsonl      when the trainer computed, when it published which version
timeline/rollout-*.jsonl    groups: begin, end, lengths; when weights were loaded; evaluations; waits for tickets, tasks
                            and processors
samples/*.jsonl             lengths, for runs whose timeline has none
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.app.runs.run import Run
from async_grpo.config import RunConfig
from async_grpo.errors import DataError
from async_grpo.telemetry.idle import Span, merged, outages, overlap
from async_grpo.telemetry.jsonl import iter_rows
from async_grpo.telemetry.metrics import COMPUTE
from async_grpo.telemetry.rows import Row, number
from async_grpo.telemetry.timeline import CPU_TRACK

LEAST_STEPS = 3
"""Steps that a run must have: the first one starts up, and one alone says nothing about another."""
SLOW = 1.5
"""A server whose tokens take so many times those of the others is slow."""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group as a server generated it. Times are Unix seconds; it ends when it is judged."""

    seq: int
    version: int
    """Version of its ticket."""
    started_s: float
    ended_s: float
    lengths: tuple[int, ...]
    """Completion tokens of its samples; () if the run did not write them."""
    queued_s: float = 0.0
    """Seconds until its first sample had a slot."""
    judged_s: float = 0.0
    """Seconds from its last token to its end."""


@dataclass(slots=True)
class RecordedServer:
    """One rollout server of a recorded run."""

    groups: list[RecordedGroup] = field(default_factory=list)
    loads: list[tuple[float, float, int]] = field(default_factory=list)
    """Begin, end and version of every update of the weights."""
    updates: list[Row] = field(default_factory=list)
    """Rows of the timeline of these updates."""
    evaluations: list[Span] = field(default_factory=list)
    ticket_waits: list[Span] = field(default_factory=list)
    starved: list[Span] = field(default_factory=list)
    """When no task was waiting while the source of tasks was read."""
    contended: list[tuple[float, float, float]] = field(default_factory=list)
    """Begin, end, and the seconds of it for which this server waited for a processor."""
    outages: list[Span] = field(default_factory=list)
    """When it was away and was started again."""
    name: str = ""

    def contended_s(self, span: Span) -> float:
        """Seconds within the span for which this server waited for a processor."""
        return sum(
            waited_s * max(0.0, min(end, span[1]) - max(begin, span[0])) / (end - begin)
            for begin, end, waited_s in self.contended
            if end > begin
        )


@dataclass(slots=True)
class RecordedRun:
    """A run, as far as its speed goes."""

    path: Path
    config: RunConfig
    steps: list[Row]
    servers: list[RecordedServer]
    computing: list[Span]
    """When the trainer computed."""
    waits: list[Span]
    """When it waited for a batch."""
    published: dict[int, Span]
    """Version -> when the trainer published it, first."""

    @property
    def window(self) -> Span:
        """From the begin of the second step to the end of the last, in Unix seconds."""
        return span_of(self.steps[1:])

    @property
    def outages(self) -> list[Span]:
        """When any server was away and was started again."""
        return merged(span for server in self.servers for span in server.outages)

    def undisturbed(self, steps: Sequence[Row]) -> Sequence[Row]:
        """Those of the steps during which no server was away; all of them if none is left."""
        away = self.outages
        return [row for row in steps if not overlap(away, [span_of([row])])] or steps

    @property
    def groups(self) -> list[RecordedGroup]:
        """The groups of all servers, by sequence."""
        return sorted((group for server in self.servers for group in server.groups), key=lambda group: group.seq)

    @property
    def lengths(self) -> list[list[int]]:
        """Completion tokens of the samples, for each group whose lengths are known; by sequence."""
        return [list(group.lengths) for group in self.groups if group.lengths]


def read_recorded(path: Path) -> RecordedRun:
    """Read the folder of a run. Raises ConfigError if it is none, DataError if it has too little to say."""
    run = Run.open(path)
    steps = [row for row in run.steps() if not row.get("replayed")]
    trainer = _spans(path / "timeline" / "trainer.jsonl")
    lengths = _sampled_lengths(path / "samples")
    servers = [
        _server(file, lengths)
        for file in sorted((path / "timeline").glob("*.jsonl"))
        if file.stem not in ("trainer", "publisher", "supervisor")
    ]
    recorded = RecordedRun(
        path,
        run.config,
        steps,
        [server for server in servers if server.groups],
        merged((begin, end) for name, begin, end, _, _ in trainer if name in COMPUTE),
        [(begin, end) for name, begin, end, _, _ in trainer if name == "wait"],
        _published(trainer),
    )
    if len(steps) < LEAST_STEPS or not recorded.servers:
        raise DataError(
            f"{path} has {len(steps)} steps and {len(recorded.groups)} groups in its timeline: too little to calibrate "
            f"from. Give a run of at least {LEAST_STEPS} steps whose folder has metrics.jsonl and timeline/"
        )
    return recorded


_Span = tuple[str, float, float, str, dict[str, Any]]
"""Name, begin, end, track and arguments."""


def _spans(path: Path) -> list[_Span]:
    found = []
    for row in iter_rows(path) if path.exists() else ():
        begin, end, name = number(row, "start_s"), number(row, "end_s"), row.get("name")
        if begin is not None and end is not None and isinstance(name, str):
            found.append((name, begin, end, str(row.get("track")), row.get("args") or {}))
    return found


def _published(spans: Iterable[_Span]) -> dict[int, Span]:
    found: dict[int, Span] = {}
    for name, begin, end, _, args in spans:
        if name == "publish" and isinstance(args.get("version"), int):
            found.setdefault(args["version"], (begin, end))
    return found


def _server(file: Path, sampled: dict[int, tuple[int, ...]]) -> RecordedServer:
    server = RecordedServer(name=file.stem, outages=outages(iter_rows(file)))
    for name, begin, end, track, args in _spans(file):
        kind, _, about = name.partition(" ")
        if track == "generation" and about.isdigit():
            lengths = tuple(args.get("lengths") or sampled.get(int(about), ()))
            waited = {key: number(args, key) or 0.0 for key in ("queued_s", "judged_s")}
            server.groups.append(RecordedGroup(int(about), args.get("version", 0), begin, end, lengths, **waited))
        elif track == "weights" and about.isdigit():
            server.loads.append((begin, end, int(about)))
            server.updates.append({"track": track, "args": args})
        elif track == "evaluation":
            server.evaluations.append((begin, end))
        elif track == "wait" and kind == "ticket":
            server.ticket_waits.append((begin, end))
        elif track == "wait" and kind == "tasks":
            server.starved.append((begin, end))
        elif track == CPU_TRACK:
            server.contended.append((begin, end, number(args, "waited_s") or 0.0))
    return server


def _sampled_lengths(folder: Path) -> dict[int, tuple[int, ...]]:
    """Sequence -> completion tokens, of the groups that were written as samples."""
    found: dict[int, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for row in iter_rows(file):
            completions = row.get("completions")
            if isinstance(row.get("seq"), int) and isinstance(completions, list):
                found[row["seq"]] = tuple(one["spans"][-1][2] for one in completions if one.get("spans"))
    return found


def span_of(steps: Sequence[Row]) -> Span:
    """From the begin of the first of these steps to the end of the last, in Unix seconds."""
    begin = (number(steps[0], "time_s") or 0.0) - (number(steps[0], "step_s") or 0.0)
    return begin, number(steps[-1], "time_s") or 0.0


def slowness(servers: Sequence[RecordedServer]) -> list[float]:
    """How many times longer than elsewhere the tokens of each server take; 1 for a server that is not slow."""
    paces = [
        statistics.median([(group.ended_s - group.judged_s - group.started_s) / max(group.lengths) for group in known])
        if (known := [group for group in server.groups if group.lengths])
        else 0.0
        for server in servers
    ]
    usual = statistics.median(paces) if paces else 0.0
    fastest = min((pace for pace in paces if pace), default=0.0)
    limit = SLOW * (usual if len(paces) > 2 else fastest)
    return [pace / fastest if len(paces) > 1 and pace >= limit > 0 else 1.0 for pace in paces]


def overlap_share(span: Span, others: Sequence[Span]) -> float:
    """Share of the span that the others, which are in order and apart, cover."""
    begin, end = span
    first = max(0, bisect_left(others, (begin, begin)) - 1)
    covered = 0.0
    for since, until in others[first:]:
        if since >= end:
            break
        covered += max(0.0, min(end, until) - max(begin, since))
    return covered / (end - begin) if end > begin else 0.0

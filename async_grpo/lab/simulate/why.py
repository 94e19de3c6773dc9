"""Where the time of a run went, and what its trainer waited for: `async-grpo why`.

The trainer's own time is in metrics.jsonl. Each of its waits ended with a group, the last that its batch needed, and
the life of that group says what held it up:

    wait      |------------------------------------------------|
    group           admitted    first token            judged  inserted
              |--A--|-----B-----|----------C-----------|---D---|
    A  not admitted: the window was full, tasks were missing, or all slots were taken
    B  waited for weights of its ticket's version, or for a slot
    C  generated: beside an evaluation, while weights were loaded, with free slots that nothing could fill (tail,
       window), on a slow server, or in a full engine
    D  judged

What a wait has in common with the outage of a server is the outage's: nothing that the configuration says would have
shortened it.

Seconds for which the server's processes waited for a processor are taken out of C and D, and those of the trainer out
of its computing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.lab.simulate.recorded import RecordedGroup, RecordedRun, RecordedServer, slowness, span_of
from async_grpo.telemetry.bottleneck import Cause, find_main_cause
from async_grpo.telemetry.idle import Span, length, merged, overlap
from async_grpo.telemetry.metrics import COMPUTE
from async_grpo.telemetry.rows import Facts, number, numbers
from async_grpo.telemetry.weight_updates import update_seconds

TAILED = 1.6
"""A group whose longest sample is so many times its mean is held up by its tail."""
LEAST_LINK = 0.005
"""Share of the time below which a link of the critical path is left out."""


class WaitStage(StrEnum):
    """What the last group of a batch went through, in this order."""

    ADMISSION = "admission"
    QUEUE = "queue"
    GENERATION = "generation"
    JUDGING = "judging"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class WaitPart:
    """A part of one wait of the trainer."""

    stage: WaitStage
    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True)
class ServerUse:
    """What a server did while the trainer made its steps, as shares of that time. They may overlap."""

    name: str
    generating: float
    evaluating: float
    loading: float
    idle: float
    """Neither generating nor evaluating."""
    contended: float
    """Waiting for a processor."""
    updates: Facts
    """Weight updates of the whole run: their number and the medians of their parts (`update_seconds`)."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the seconds of a run's steps went."""

    steps: int
    seconds: float
    trainer: dict[Cause, float]
    """Seconds of the trainer's own work."""
    parts: list[WaitPart]
    """Its waits, by what they were for; every stage and cause once."""
    other: float
    """Seconds that neither explains."""
    servers: list[ServerUse]
    outages: dict[str, float]
    """Seconds for which each server was away and was started again, of those that were."""

    @property
    def waits(self) -> dict[Cause, float]:
        """Seconds of the trainer's waits, by cause."""
        found: dict[Cause, float] = defaultdict(float)
        for part in self.parts:
            found[part.cause] += part.seconds
        return dict(found)

    @property
    def wait_share(self) -> float:
        """Share of the time in which the trainer waited."""
        return sum(part.seconds for part in self.parts) / self.seconds if self.seconds else 0.0

    @property
    def cause(self) -> Cause:
        """The bottleneck."""
        return find_main_cause(self.trainer, self.waits, self.seconds)[0]

    @property
    def share(self) -> float:
        """The bottleneck's share of the time."""
        return find_main_cause(self.trainer, self.waits, self.seconds)[1]

    def shares(self) -> list[tuple[str, float, float]]:
        """Every part of the time with its seconds and its share, the largest first; waits are named as such."""
        named = [
            ("computing without a processor" if cause is Cause.CPU else cause.value, spent)
            for cause, spent in self.trainer.items()
        ]
        named += [(f"waiting: {cause.value}", spent) for cause, spent in self.waits.items()]
        named += [("other", self.other)]
        return [
            (name, spent, spent / self.seconds) for name, spent in sorted(named, key=lambda part: -part[1]) if spent > 0
        ]

    def path(self) -> list[tuple[str, float]]:
        """The critical path of a mean step: what the trainer, or the group that it waited for, did one after another,
        with its seconds. A stage of a wait has its main cause in brackets."""
        links = []
        for stage in WaitStage:
            causes = {part.cause: part.seconds for part in self.parts if part.stage is stage}
            if causes:
                links.append((f"{stage.value} ({max(causes, key=lambda cause: causes[cause])})", sum(causes.values())))
        busy_s = self.trainer[Cause.COMPUTING] + self.trainer[Cause.CPU]
        links.append((Cause.COMPUTING.value, busy_s))
        links += [(cause.value, self.trainer[cause]) for cause in (Cause.PUBLISHING, Cause.CHECKPOINTS)]
        return [(name, spent / self.steps) for name, spent in links if spent >= LEAST_LINK * self.seconds]


def explain(run: RecordedRun, *, last: int | None = None) -> Explanation:
    """Where the time of the steps after the first went, or of the `last` ones."""
    rows = run.steps[1:] if last is None else run.steps[1:][-last:]
    whole = sum(numbers(rows, "step_s"))
    window = span_of(rows)
    computing_s = sum(sum(numbers(rows, f"{phase}_s")) for phase in COMPUTE)
    contended_s = min(computing_s, sum(numbers(rows, "cpu_wait_s")))
    trainer = {
        Cause.COMPUTING: computing_s - contended_s,
        Cause.CPU: contended_s,
        Cause.CHECKPOINTS: sum(numbers(rows, "checkpoint_s")),
        Cause.PUBLISHING: sum(numbers(rows, "publish_s")),
    }
    parts = _scaled(_Waits(run).parts(window), sum(numbers(rows, "wait_s")))
    other = max(0.0, whole - sum(trainer.values()) - sum(part.seconds for part in parts))
    away = {server.name: length(overlap([window], server.outages)) for server in run.servers}
    return Explanation(
        steps=len(rows),
        seconds=whole,
        trainer=trainer,
        parts=parts,
        other=other,
        servers=[_use(server, window) for server in run.servers],
        outages={name: seconds for name, seconds in away.items() if seconds > 0},
    )


def _scaled(parts: Iterable[WaitPart], waited_s: float) -> list[WaitPart]:
    """The parts of all waits added up, every stage and cause once, and scaled to the seconds that were waited."""
    total: dict[tuple[WaitStage, Cause], float] = defaultdict(float)
    for part in parts:
        total[part.stage, part.cause] += part.seconds
    counted = sum(total.values())
    scale = waited_s / counted if counted else 0.0
    return [WaitPart(stage, cause, seconds * scale) for (stage, cause), seconds in total.items()]


def _use(server: RecordedServer, window: Span) -> ServerUse:
    def share(spans: Iterable[Span]) -> float:
        return length(overlap([window], merged(spans))) / _seconds(window) if _seconds(window) else 0.0

    groups = [(group.started_s, group.ended_s) for group in server.groups]
    return ServerUse(
        name=server.name,
        generating=share(groups),
        evaluating=share(server.evaluations),
        loading=share((begin, end) for begin, end, _ in server.loads),
        idle=1 - share([*groups, *server.evaluations]),
        contended=server.contended_s(window) / _seconds(window) if _seconds(window) else 0.0,
        updates=update_seconds(server.updates),
    )


class _Waits:
    """The waits of the trainer, each split by what the group that ended it was doing."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._slow = [factor > 1 for factor in slowness(run.servers)]
        self._hungry = [merged(server.ticket_waits) for server in run.servers]
        self._starved = merged(span for server in run.servers for span in server.starved)

    def parts(self, window: Span) -> Iterator[WaitPart]:
        """The parts of the waits that ended within the window."""
        away = self._run.outages
        for wait in self._run.waits:
            if window[0] < wait[1] <= window[1]:
                away_s = length(overlap([wait], away))
                left = 1 - away_s / _seconds(wait) if away_s else 1.0
                yield WaitPart(WaitStage.ADMISSION, Cause.RESTART, away_s)
                for stage, cause, seconds in self._parts_of(wait):
                    yield WaitPart(stage, cause, left * seconds)

    def _parts_of(self, wait: Span) -> Iterator[tuple[WaitStage, Cause, float]]:
        begin, end = wait
        found = _last_group(self._run, begin, end)
        if found is None:
            yield WaitStage.BUFFER, Cause.BUFFER, end - begin
            return
        place, group = found
        server = self._run.servers[place]
        generated_s = group.ended_s - group.judged_s
        first_s = min(group.started_s + group.queued_s, generated_s)
        for cause, seconds in self._before_admission((begin, min(group.started_s, end)), place):
            yield WaitStage.ADMISSION, cause, seconds
        for cause, seconds in _queued(_clipped((group.started_s, first_s), wait), group, server):
            yield WaitStage.QUEUE, cause, seconds
        for cause, seconds in self._generating(_clipped((first_s, generated_s), wait), group, place):
            yield WaitStage.GENERATION, cause, seconds
        judging = _clipped((generated_s, group.ended_s), wait)
        contended = server.contended_s(judging)
        yield WaitStage.JUDGING, Cause.CPU, contended
        yield WaitStage.JUDGING, Cause.VERIFIERS, _seconds(judging) - contended
        yield WaitStage.BUFFER, Cause.BUFFER, max(0.0, end - max(begin, group.ended_s))

    def _before_admission(self, span: Span, place: int) -> Iterator[tuple[Cause, float]]:
        asking = self._hungry_in(span, place)
        yield from self._without_tasks(asking, span[1], Cause.WINDOW, length(asking))
        yield Cause.SLOTS, _seconds(span) - length(asking)

    def _generating(self, span: Span, group: RecordedGroup, place: int) -> Iterator[tuple[Cause, float]]:
        if span[1] <= span[0]:
            return
        server = self._run.servers[place]
        loading = length(overlap([span], merged((begin, end) for begin, end, _ in server.loads)))
        evaluating = length(overlap([span], merged(server.evaluations)))
        contended = min(server.contended_s(span), max(0.0, _seconds(span) - loading - evaluating))
        left = max(0.0, _seconds(span) - loading - evaluating - contended)
        yield Cause.WEIGHTS, loading
        yield Cause.EVALUATION, evaluating
        yield Cause.CPU, contended
        if self._slow[place]:
            yield Cause.SLOW_SERVER, left
            return
        hungry = self._hungry_in(span, place)
        free = min(left, length(hungry))
        tailed = bool(group.lengths) and max(group.lengths) >= TAILED * statistics.fmean(group.lengths)
        yield from self._without_tasks(hungry, span[1], Cause.TAIL if tailed else Cause.WINDOW, free)
        yield Cause.SLOTS if _is_narrow(self._run) else Cause.ENGINE, left - free

    def _hungry_in(self, span: Span, place: int) -> list[Span]:
        return overlap([span], self._hungry[place]) if span[1] > span[0] else []

    def _without_tasks(
        self, hungry: list[Span], at_s: float, otherwise: Cause, most_s: float
    ) -> Iterator[tuple[Cause, float]]:
        """A server's wait for tickets, of which `most_s` count: for want of tasks, or for the other cause."""
        if self._starved:
            starved = min(most_s, length(overlap(hungry, self._starved)))
        else:
            starved = most_s if _is_starved(self._run, at_s) else 0.0
        yield Cause.TASKS, starved
        yield otherwise, most_s - starved


def _last_group(run: RecordedRun, begin: float, end: float) -> tuple[int, RecordedGroup] | None:
    """The group that ended last within the wait, and the place of its server."""
    ended = [
        (place, group)
        for place, server in enumerate(run.servers)
        for group in server.groups
        if begin < group.ended_s <= end
    ]
    return max(ended, key=lambda each: each[1].ended_s, default=None)


def _queued(span: Span, group: RecordedGroup, server: RecordedServer) -> Iterator[tuple[Cause, float]]:
    """For weights until the engine has those of its ticket, then for a slot. An evaluation keeps the engine's version,
    so that the weights may have been there all along: then the evaluation was waited for."""
    loaded = next((end for _, end, version in server.loads if version >= group.version), span[0])
    cut = min(max(span[0], loaded), span[1])
    evaluating = length(overlap([(span[0], cut)], merged(server.evaluations))) if cut > span[0] else 0.0
    yield Cause.EVALUATION, evaluating
    yield Cause.WEIGHTS, max(0.0, cut - span[0] - evaluating)
    yield Cause.SLOTS, max(0.0, span[1] - cut)


def _is_narrow(run: RecordedRun) -> bool:
    """Whether a step's samples are many times what the engines run at once, so that more slots would fill."""
    slots = run.config.rollout.max_concurrency * len(run.servers)
    return slots * 2 <= run.config.groups_per_step * run.config.group_size


def _is_starved(run: RecordedRun, at_s: float) -> bool:
    """Whether no task was waiting after the step that ended then or next."""
    row = next((row for row in run.steps if (number(row, "time_s") or 0.0) >= at_s), None)
    groups = row.get("buffer_groups") if row is not None else None
    return isinstance(groups, dict) and groups.get("waiting") == 0 and row is not run.steps[-1]


def _clipped(span: Span, within: Span) -> Span:
    return max(span[0], within[0]), min(span[1], within[1])


def _seconds(span: Span) -> float:
    return max(0.0, span[1] - span[0])

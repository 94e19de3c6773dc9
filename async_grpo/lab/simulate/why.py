"""Attributes the time of a run, and what its trainer waited for: `async-grpo why`.

The trainer's own time is in metrics.jsonl. Each of its waits ended with a group, the last one that its batch needed.
The life of that group shows the causes of the wait:

    wait      |------------------------------------------------|
    group           admitted    first token            judged  inserted
              |--A--|-----B-----|----------C-----------|---D---|
    A  not admitted: the window was full, tasks were missing, or all slots were taken
    B  queued: for weights of its ticket's version, or for a slot
    C  generated: during an evaluation, during a weight update, with free slots that nothing could fill (tail, window),
       on a slow server, or in a full engine
    D  judged

The part of a wait that overlaps the outage of a server is attributed to the outage: no setting would have shortened it.

Seconds in which the server's processes waited for a processor are separated from C and D, and those of the trainer from
its computing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.lab.simulate.recorded import (
    RecordedGroup,
    RecordedRun,
    RecordedServer,
    server_slowdowns,
    span_of_steps,
)
from async_grpo.telemetry.bottleneck import Cause, find_main_cause
from async_grpo.telemetry.idle import Span, length, merged, overlap
from async_grpo.telemetry.metrics import COMPUTE
from async_grpo.telemetry.rows import Facts, number, numbers
from async_grpo.telemetry.weight_updates import update_seconds

LONG_TAIL = 1.6
"""Ratio of longest to mean sample from which a group counts as delayed by its tail."""
MIN_PATH_SHARE = 0.005
"""Minimum share of the time for a part of the critical path to be listed."""


class WaitStage(StrEnum):
    """Stages of the last group of a batch, in their order."""

    ADMISSION = "admission"
    QUEUE = "queue"
    GENERATION = "generation"
    JUDGING = "judging"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class WaitPart:
    """A part of one wait of the trainer, or the sum of such parts."""

    stage: WaitStage
    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True)
class ServerUse:
    """Activity of a server during the explained steps, as shares of their time. The shares may overlap."""

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
    """The time of a run's steps by cause."""

    steps: int
    seconds: float
    trainer: dict[Cause, float]
    """Seconds of the trainer's own work."""
    parts: list[WaitPart]
    """Its waits, one entry per stage and cause."""
    other: float
    """Seconds that neither explains."""
    servers: list[ServerUse]
    outages: dict[str, float]
    """Seconds in which a server was down and restarting, for servers that were."""

    @property
    def waits(self) -> dict[Cause, float]:
        """Seconds of the trainer's waits by cause."""
        seconds: dict[Cause, float] = defaultdict(float)
        for part in self.parts:
            seconds[part.cause] += part.seconds
        return dict(seconds)

    @property
    def wait_share(self) -> float:
        """Share of the time in which the trainer waited."""
        if not self.seconds:
            return 0.0
        return sum(part.seconds for part in self.parts) / self.seconds

    @property
    def cause(self) -> Cause:
        """The bottleneck."""
        cause, _ = find_main_cause(self.trainer, self.waits, self.seconds)
        return cause

    @property
    def share(self) -> float:
        """The bottleneck's share of the time."""
        _, share = find_main_cause(self.trainer, self.waits, self.seconds)
        return share

    def list_shares(self) -> list[tuple[str, float, float]]:
        """List every part of the time with its seconds and its share, the largest first. Waits are named as such."""
        parts: list[tuple[str, float]] = []
        for cause, seconds in self.trainer.items():
            parts.append(("waiting for a processor" if cause is Cause.CPU else cause.value, seconds))
        for cause, seconds in self.waits.items():
            parts.append((f"waiting: {cause.value}", seconds))
        parts.append(("other", self.other))

        parts.sort(key=lambda part: -part[1])
        return [(name, seconds, seconds / self.seconds) for name, seconds in parts if seconds > 0]

    def critical_path(self) -> list[tuple[str, float]]:
        """The critical path of a mean step: names and seconds of what the trainer, or the group that it waited for, did
        one after another. A stage of a wait has its main cause in brackets."""
        links: list[tuple[str, float]] = []
        for stage in WaitStage:
            causes = {part.cause: part.seconds for part in self.parts if part.stage is stage}
            if causes:
                main_cause = max(causes, key=causes.__getitem__)
                links.append((f"{stage.value} ({main_cause})", sum(causes.values())))

        links.append((Cause.COMPUTING.value, self.trainer[Cause.COMPUTING] + self.trainer[Cause.CPU]))
        links.append((Cause.PUBLISHING.value, self.trainer[Cause.PUBLISHING]))
        links.append((Cause.CHECKPOINTS.value, self.trainer[Cause.CHECKPOINTS]))
        min_seconds = MIN_PATH_SHARE * self.seconds
        return [(name, seconds / self.steps) for name, seconds in links if seconds >= min_seconds]


def explain_run(run: RecordedRun, *, last: int | None = None) -> Explanation:
    """Explain the time of all steps after the first, or of the `last` ones."""
    rows = run.steps[1:] if last is None else run.steps[1:][-last:]
    window = span_of_steps(rows)
    steps_s = sum(numbers(rows, "step_s"))

    computing_s = sum(sum(numbers(rows, f"{phase}_s")) for phase in COMPUTE)
    contended_s = min(computing_s, sum(numbers(rows, "cpu_wait_s")))
    trainer = {
        Cause.COMPUTING: computing_s - contended_s,
        Cause.CPU: contended_s,
        Cause.CHECKPOINTS: sum(numbers(rows, "checkpoint_s")),
        Cause.PUBLISHING: sum(numbers(rows, "publish_s")),
    }
    parts = _sum_and_scale(_WaitSplitter(run).split_waits(window), sum(numbers(rows, "wait_s")))
    other_s = max(0.0, steps_s - sum(trainer.values()) - sum(part.seconds for part in parts))

    outages_s: dict[str, float] = {}
    for server in run.servers:
        outage_s = length(overlap([window], server.outages))
        if outage_s > 0:
            outages_s[server.name] = outage_s
    return Explanation(
        steps=len(rows),
        seconds=steps_s,
        trainer=trainer,
        parts=parts,
        other=other_s,
        servers=[_summarize_server(server, window) for server in run.servers],
        outages=outages_s,
    )


def _sum_and_scale(parts: Iterable[WaitPart], waited_s: float) -> list[WaitPart]:
    """Sum the parts of all waits per stage and cause, and scale them to the seconds in metrics.jsonl.

    The timeline may lack a few of the waits, and it includes replayed steps.
    """
    totals: dict[tuple[WaitStage, Cause], float] = defaultdict(float)
    for part in parts:
        totals[part.stage, part.cause] += part.seconds
    attributed_s = sum(totals.values())
    scale = waited_s / attributed_s if attributed_s else 0.0
    return [WaitPart(stage, cause, seconds * scale) for (stage, cause), seconds in totals.items()]


def _summarize_server(server: RecordedServer, window: Span) -> ServerUse:
    window_s = _seconds(window)

    def share(spans: Iterable[Span]) -> float:
        return length(overlap([window], merged(spans))) / window_s if window_s else 0.0

    groups = [(group.started_s, group.ended_s) for group in server.groups]
    return ServerUse(
        name=server.name,
        generating=share(groups),
        evaluating=share(server.evaluations),
        loading=share((start, end) for start, end, _ in server.loads),
        idle=1 - share([*groups, *server.evaluations]),
        contended=server.contended_s(window) / window_s if window_s else 0.0,
        updates=update_seconds(server.updates),
    )


class _WaitSplitter:
    """Splits the trainer's waits by the stages of the groups that ended them."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._is_slow = [factor > 1 for factor in server_slowdowns(run.servers)]
        self._ticket_waits = [merged(server.ticket_waits) for server in run.servers]
        """Spans in which a server had free slots and got no ticket, per server."""
        self._starved = merged(span for server in run.servers for span in server.starved)
        """Spans in which the task source had no task."""

    def split_waits(self, window: Span) -> Iterator[WaitPart]:
        """Yield the parts of the waits that ended within the window."""
        outages = self._run.outages
        for wait in self._run.waits:
            if window[0] < wait[1] <= window[1]:
                outage_s = length(overlap([wait], outages))
                yield WaitPart(WaitStage.ADMISSION, Cause.RESTART, outage_s)
                # The stages cover the whole wait. Shrink them to the time outside the outage.
                remaining = 1 - outage_s / _seconds(wait) if outage_s else 1.0
                for stage, cause, seconds in self._split_wait(wait):
                    yield WaitPart(stage, cause, remaining * seconds)

    def _split_wait(self, wait: Span) -> Iterator[tuple[WaitStage, Cause, float]]:
        start, end = wait
        last = _last_group(self._run, start, end)
        if last is None:
            # No group ended within the wait: the batch was ready, and the buffer delivered it late.
            yield WaitStage.BUFFER, Cause.BUFFER, end - start
            return

        index, group = last
        server = self._run.servers[index]
        generated_s = group.generated_at_s
        first_token_s = min(group.started_s + group.queued_s, generated_s)

        for cause, seconds in self._split_admission((start, min(group.started_s, end)), index):
            yield WaitStage.ADMISSION, cause, seconds
        for cause, seconds in _split_queue(_clip((group.started_s, first_token_s), wait), group, server):
            yield WaitStage.QUEUE, cause, seconds
        for cause, seconds in self._split_generation(_clip((first_token_s, generated_s), wait), group, index):
            yield WaitStage.GENERATION, cause, seconds

        judging = _clip((generated_s, group.ended_s), wait)
        contended_s = server.contended_s(judging)
        yield WaitStage.JUDGING, Cause.CPU, contended_s
        yield WaitStage.JUDGING, Cause.VERIFIERS, _seconds(judging) - contended_s
        yield WaitStage.BUFFER, Cause.BUFFER, max(0.0, end - max(start, group.ended_s))

    def _split_admission(self, span: Span, index: int) -> Iterator[tuple[Cause, float]]:
        """Before the group was admitted, its server waited for tickets or had no free slot."""
        ticket_waits = self._ticket_waits_within(span, index)
        waited_s = length(ticket_waits)
        yield from self._split_ticket_wait(ticket_waits, span[1], Cause.WINDOW, waited_s)
        yield Cause.SLOTS, _seconds(span) - waited_s

    def _split_generation(self, span: Span, group: RecordedGroup, index: int) -> Iterator[tuple[Cause, float]]:
        if span[1] <= span[0]:
            return
        server = self._run.servers[index]
        loading_s = length(overlap([span], server.load_spans))
        evaluating_s = length(overlap([span], merged(server.evaluations)))
        contended_s = min(server.contended_s(span), max(0.0, _seconds(span) - loading_s - evaluating_s))
        remaining_s = max(0.0, _seconds(span) - loading_s - evaluating_s - contended_s)
        yield Cause.WEIGHTS, loading_s
        yield Cause.EVALUATION, evaluating_s
        yield Cause.CPU, contended_s
        if self._is_slow[index]:
            yield Cause.SLOW_SERVER, remaining_s
            return

        # With free slots, the engine only waited for this group: for its tail, or for room in the window for others.
        ticket_waits = self._ticket_waits_within(span, index)
        free_s = min(remaining_s, length(ticket_waits))
        has_long_tail = bool(group.lengths) and max(group.lengths) >= LONG_TAIL * statistics.fmean(group.lengths)
        yield from self._split_ticket_wait(ticket_waits, span[1], Cause.TAIL if has_long_tail else Cause.WINDOW, free_s)
        yield Cause.SLOTS if _has_few_slots(self._run) else Cause.ENGINE, remaining_s - free_s

    def _ticket_waits_within(self, span: Span, index: int) -> list[Span]:
        return overlap([span], self._ticket_waits[index]) if span[1] > span[0] else []

    def _split_ticket_wait(
        self, ticket_waits: list[Span], until_s: float, otherwise: Cause, max_s: float
    ) -> Iterator[tuple[Cause, float]]:
        """Attribute up to `max_s` seconds of a ticket wait to task starvation, the rest to `otherwise`."""
        if self._starved:
            starved_s = min(max_s, length(overlap(ticket_waits, self._starved)))
        else:
            # Timelines of older releases lack these spans, but the rows of steps have the number of waiting tasks.
            starved_s = max_s if _had_no_tasks(self._run, until_s) else 0.0
        yield Cause.TASKS, starved_s
        yield otherwise, max_s - starved_s


def _last_group(run: RecordedRun, start: float, end: float) -> tuple[int, RecordedGroup] | None:
    """The group that ended last within the wait, and the index of its server."""
    last: tuple[int, RecordedGroup] | None = None
    for index, server in enumerate(run.servers):
        for group in server.groups:
            if start < group.ended_s <= end and (last is None or group.ended_s > last[1].ended_s):
                last = index, group
    return last


def _split_queue(span: Span, group: RecordedGroup, server: RecordedServer) -> Iterator[tuple[Cause, float]]:
    """Split a queued time into the wait for the ticket's weights and the wait for a slot after that.

    An evaluation pins the engine's version although newer weights may have arrived long ago, so the first wait is
    attributed to the evaluation as far as they overlap.
    """
    start, end = span
    loaded_s = next((load_end for _, load_end, version in server.loads if version >= group.version), start)
    weights_s = min(max(start, loaded_s), end)
    evaluating_s = 0.0
    if weights_s > start:
        evaluating_s = length(overlap([(start, weights_s)], merged(server.evaluations)))
    yield Cause.EVALUATION, evaluating_s
    yield Cause.WEIGHTS, max(0.0, weights_s - start - evaluating_s)
    yield Cause.SLOTS, max(0.0, end - weights_s)


def _has_few_slots(run: RecordedRun) -> bool:
    """True if a step has at least twice as many samples as the engines have slots, so that more slots would fill."""
    slots = run.config.rollout.max_concurrency * len(run.servers)
    return slots * 2 <= run.config.groups_per_step * run.config.group_size


def _had_no_tasks(run: RecordedRun, time_s: float) -> bool:
    """True if no task was waiting at the end of the step that ended at that time or next.

    The last step does not count: at the end of a run its tasks are used up.
    """
    row = next((row for row in run.steps if (number(row, "time_s") or 0.0) >= time_s), None)
    if row is None or row is run.steps[-1]:
        return False
    groups = row.get("buffer_groups")
    return isinstance(groups, dict) and groups.get("waiting") == 0


def _clip(span: Span, within: Span) -> Span:
    return max(span[0], within[0]), min(span[1], within[1])


def _seconds(span: Span) -> float:
    return max(0.0, span[1] - span[0])

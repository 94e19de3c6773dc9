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
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.app.simulate.recorded import RecordedGroup, RecordedRun, RecordedServer
from async_grpo.telemetry.idle import Span, length, merged, overlap
from async_grpo.telemetry.metrics import COMPUTE
from async_grpo.telemetry.rows import number, numbers

BUSY = 0.15
"""Share of waiting below which the trainer is the bottleneck."""
TAILED = 1.6
"""A group whose longest sample is so many times its mean is held up by its tail."""
SLOW = 1.5
"""A server whose tokens take so many times those of the others is slow."""


class Cause(StrEnum):
    """What time went to. The first five are the trainer's own."""

    COMPUTING = "computing"
    CHECKPOINTS = "checkpoints"
    PUBLISHING = "publishing"
    BUFFER = "buffer"
    WEIGHTS = "weights"
    VERIFIERS = "verifiers"
    WINDOW = "window"
    TASKS = "tasks"
    SLOTS = "slots"
    TAIL = "tail"
    SLOW_SERVER = "slow server"
    EVALUATION = "evaluation"
    ENGINE = "engine"


ADVICE = {
    Cause.COMPUTING: "the trainer computes nearly all the time: a faster trainer (more ranks, larger micro-batches, "
    "less recomputation) makes the run faster, more servers do not",
    Cause.CHECKPOINTS: "checkpoints stop the trainer: raise trainer.checkpoint.every_steps, set "
    "trainer.checkpoint.background, or use a faster disk",
    Cause.PUBLISHING: "publishing weights stops the trainer: look at weights.encoding and at the memory's bandwidth",
    Cause.BUFFER: "finished groups are long on their way to the trainer: look at the Redis server and its disk",
    Cause.WEIGHTS: "servers wait for new weights or load them: use a faster link, or rollout.interruption keep",
    Cause.VERIFIERS: "the verifiers are the bottleneck: raise rewards.workers, or make the reward functions faster",
    Cause.WINDOW: "the staleness window is full while servers have free slots: raise max_staleness",
    Cause.TASKS: "servers wait for tasks: the data source is slow",
    Cause.SLOTS: "all slots are taken and the engine could run more samples at once: raise rollout.max_concurrency",
    Cause.TAIL: "a few long completions hold batches up while slots are free: raise max_staleness, set "
    "rollout.oversample, or choose windowed_fifo",
    Cause.SLOW_SERVER: "one server is slower than the others, and batches wait for its groups: see what runs there",
    Cause.EVALUATION: "evaluations hold servers up: raise eval.every_steps, or lower eval.prompts",
    Cause.ENGINE: "generation is the bottleneck, and the engines are full: add rollout servers",
}
"""What to do about each cause."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the seconds of a run's steps went."""

    steps: int
    seconds: float
    trainer: dict[Cause, float]
    """Seconds of the trainer's own work."""
    waits: dict[Cause, float]
    """Seconds of its waits, by what they were for."""
    other: float
    """Seconds that neither explains."""

    @property
    def wait_share(self) -> float:
        """Share of the time in which the trainer waited."""
        return sum(self.waits.values()) / self.seconds if self.seconds else 0.0

    @property
    def cause(self) -> Cause:
        """The bottleneck: the largest part of the waits, or of the trainer's own time if it hardly waits."""
        parts = self.waits if self.wait_share >= BUSY else self.trainer
        return max(parts, key=lambda cause: parts[cause])

    def shares(self) -> list[tuple[str, float, float]]:
        """Every part of the time with its seconds and its share, the largest first; waits are named as such."""
        named = [(cause.value, spent) for cause, spent in self.trainer.items()]
        named += [(f"waiting: {cause.value}", spent) for cause, spent in self.waits.items()]
        named += [("other", self.other)]
        return [
            (name, spent, spent / self.seconds) for name, spent in sorted(named, key=lambda part: -part[1]) if spent > 0
        ]


def explain(run: RecordedRun) -> Explanation:
    """Where the time of the steps after the first went."""
    rows = run.steps[1:]
    whole = sum(numbers(rows, "step_s"))
    trainer = {
        Cause.COMPUTING: sum(sum(numbers(rows, f"{phase}_s")) for phase in COMPUTE),
        Cause.CHECKPOINTS: sum(numbers(rows, "checkpoint_s")),
        Cause.PUBLISHING: sum(numbers(rows, "publish_s")),
    }
    waits: dict[Cause, float] = defaultdict(float)
    slow = _slow_servers(run.servers)
    hungry = [merged(server.ticket_waits) for server in run.servers]
    for wait in run.waits:
        for cause, seconds in _parts_of(wait, run, slow, hungry):
            waits[cause] += seconds
    waited = sum(numbers(rows, "wait_s"))
    counted = sum(waits.values())
    scale = waited / counted if counted else 0.0
    found = {cause: seconds * scale for cause, seconds in waits.items()}
    other = max(0.0, whole - sum(trainer.values()) - sum(found.values()))
    return Explanation(len(rows), whole, trainer, found, other)


def _parts_of(
    wait: Span, run: RecordedRun, slow: frozenset[int], hungry: Sequence[list[Span]]
) -> Iterator[tuple[Cause, float]]:
    """What the group that ended the wait was doing meanwhile."""
    begin, end = wait
    found = _last_group(run, begin, end)
    if found is None:
        yield Cause.BUFFER, end - begin
        return
    place, group = found
    server = run.servers[place]
    generating_s = group.ended_s - group.judged_s
    first_s = min(group.started_s + group.queued_s, generating_s)
    yield from _before_admission((begin, min(group.started_s, end)), run, server)
    yield from _queued(_clipped((group.started_s, first_s), wait), group, server)
    life = _clipped((first_s, generating_s), wait)
    yield from _generating(life, group, run, server, hungry[place], is_slow=place in slow)
    yield Cause.VERIFIERS, _seconds(_clipped((generating_s, group.ended_s), wait))
    yield Cause.BUFFER, max(0.0, end - max(begin, group.ended_s))


def _last_group(run: RecordedRun, begin: float, end: float) -> tuple[int, RecordedGroup] | None:
    """The group that ended last within the wait, and the place of its server."""
    ended = [
        (place, group)
        for place, server in enumerate(run.servers)
        for group in server.groups
        if begin < group.ended_s <= end
    ]
    return max(ended, key=lambda each: each[1].ended_s, default=None)


def _before_admission(span: Span, run: RecordedRun, server: RecordedServer) -> Iterator[tuple[Cause, float]]:
    asking = length(overlap([span], merged(server.ticket_waits))) if span[1] > span[0] else 0.0
    yield Cause.TASKS if _is_starved(run, span[1]) else Cause.WINDOW, asking
    yield Cause.SLOTS, _seconds(span) - asking


def _queued(span: Span, group: RecordedGroup, server: RecordedServer) -> Iterator[tuple[Cause, float]]:
    """For weights until the engine has those of its ticket, then for a slot."""
    loaded = next((end for _, end, version in server.loads if version >= group.version), span[0])
    cut = min(max(span[0], loaded), span[1])
    yield Cause.WEIGHTS, max(0.0, cut - span[0])
    yield Cause.SLOTS, max(0.0, span[1] - cut)


def _generating(
    span: Span, group: RecordedGroup, run: RecordedRun, server: RecordedServer, hungry: list[Span], *, is_slow: bool
) -> Iterator[tuple[Cause, float]]:
    if span[1] <= span[0]:
        return
    loading = overlap([span], merged((begin, end) for begin, end, _ in server.loads))
    evaluating = length(overlap([span], merged(server.evaluations)))
    left = _seconds(span) - length(loading) - evaluating
    yield Cause.WEIGHTS, length(loading)
    yield Cause.EVALUATION, evaluating
    if is_slow:
        yield Cause.SLOW_SERVER, left
        return
    free = min(left, length(overlap([span], hungry)))
    tailed = bool(group.lengths) and max(group.lengths) >= TAILED * statistics.fmean(group.lengths)
    if _is_starved(run, span[1]):
        yield Cause.TASKS, free
    else:
        yield Cause.TAIL if tailed else Cause.WINDOW, free
    yield Cause.SLOTS if _is_narrow(run) else Cause.ENGINE, left - free


def _is_narrow(run: RecordedRun) -> bool:
    """Whether a step's samples are many times what the engines run at once, so that more slots would fill."""
    slots = run.config.rollout.max_concurrency * len(run.servers)
    return slots * 2 <= run.config.groups_per_step * run.config.group_size


def _is_starved(run: RecordedRun, at_s: float) -> bool:
    """Whether no task was waiting after the step that ended then or next."""
    row = next((row for row in run.steps if (number(row, "time_s") or 0.0) >= at_s), None)
    groups = row.get("buffer_groups") if row is not None else None
    return isinstance(groups, dict) and groups.get("waiting") == 0 and row is not run.steps[-1]


def _slow_servers(servers: Sequence[RecordedServer]) -> frozenset[int]:
    """Places of the servers whose tokens take SLOW times those of the others."""
    paces = [
        statistics.median([(group.ended_s - group.started_s) / max(group.lengths) for group in known])
        if (known := [group for group in server.groups if group.lengths])
        else 0.0
        for server in servers
    ]
    usual = statistics.median(paces) if paces else 0.0
    fastest = min((pace for pace in paces if pace), default=0.0)
    limit = SLOW * (usual if len(paces) > 2 else fastest)
    return frozenset(place for place, pace in enumerate(paces) if len(paces) > 1 and pace >= limit > 0)


def _clipped(span: Span, within: Span) -> Span:
    return max(span[0], within[0]), min(span[1], within[1])


def _seconds(span: Span) -> float:
    return max(0.0, span[1] - span[0])

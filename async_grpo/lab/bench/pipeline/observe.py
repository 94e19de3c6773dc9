"""The figures of one run's timed part, from the files that it left. `observe` and `check` are pure.

    metrics.jsonl             steps, waits, ages                 trainer side
    timeline/rollout-*.jsonl  groups and weight updates          rollout side

         head            timed: M steps                tail
    |----------------|-------------------------------|--------|
                     t0: row of the last head step    t1: row of the last timed one

Groups that a large S has generated ahead before t0 would make it look faster than it is while they last. So the rate is
that of the slower side: tokens only count as far as they were also generated between t0 and t1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import EngineError
from async_grpo.lab.bench.pipeline.workload import FixedWork, StepPlan
from async_grpo.telemetry.idle import Span, length, merged, overlap
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import Row, latest_rows, number, numbers, rows_of_kind


@dataclass(frozen=True, slots=True)
class Generated:
    """A group on its server: `span` from its ticket until it was judged, `version` the one of its ticket."""

    seq: int
    version: int
    tokens: int
    span: Span


@dataclass(frozen=True, slots=True)
class Update:
    """New weights in an engine; nothing is generated during `span`."""

    version: int
    span: Span


@dataclass(frozen=True, slots=True)
class Server:
    """A rollout server's timeline."""

    groups: tuple[Generated, ...]
    updates: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run left: one row for each step, in order, and the timelines of its servers."""

    steps: Sequence[Row]
    servers: Sequence[Server]


@dataclass(frozen=True, slots=True)
class Observed:
    """The figures of the timed part of a run. Shares are between 0 and 1, ages in optimizer steps."""

    step_s: float
    """Mean seconds from the end of a step to the end of the next."""
    wait_s: float
    """The part of it until the trainer had its batch."""
    tokens_per_s: float
    """Trained completion tokens, counted only as far as they were also generated meanwhile; likewise samples_per_s."""
    samples_per_s: float
    generated: float
    """Tokens generated to tokens trained: below 1 where a lead was used up."""
    trainer_idle: float
    rollout_idle: float
    """Share in which an engine had nothing to generate, or was loading weights; mean over the servers."""
    update_s: float
    """Seconds of a step in which engines load weights, mean over the servers."""
    age_mean: float
    age_max: int


def read_record(run_dir: Path) -> RunRecord:
    """The record of the run in this folder."""
    steps = latest_rows(rows_of_kind(read_rows(run_dir / "metrics.jsonl"), "step"), "step")
    timelines = sorted((run_dir / "timeline").glob("rollout-*.jsonl"))
    return RunRecord(steps, [_server(read_rows(path)) for path in timelines])


def check(record: RunRecord, work: FixedWork, plan: StepPlan, run: str) -> None:
    """Raise EngineError unless the run generated and trained exactly the work, in one go: less would look faster."""
    made = {group.seq: group.tokens for server in record.servers for group in server.groups}
    wanted = {seq: sum(work.group_lengths(seq)) for seq in range(plan.steps * work.groups_per_step)}
    _compare(run, "generated", "group", made, wanted)
    for verb, tokens_of in (("trained", work.tokens_of_step), ("read", work.read_in_step)):
        done = {int(row["version"]): int(number(row, f"{verb}_tokens") or 0) for row in record.steps}
        _compare(run, verb, "step", done, {version: tokens_of(version) for version in range(plan.steps)})
    check_one_go(record, run)


def check_one_go(record: RunRecord, run: str) -> None:
    """Raise EngineError if the trainer was started again on the way."""
    if len({row["epoch"] for row in record.steps}) > 1:
        raise EngineError(
            f"the trainer of the run {run} was started again on the way: its times are not those of the others. Its "
            "log says why; run the bench again"
        )


def observe(record: RunRecord, work: FixedWork, plan: StepPlan) -> Observed:
    """The figures of a run that has passed `check`."""
    timed = timed_rows(record, plan)
    start_s, end_s = record.steps[plan.head - 1]["time_s"], timed[-1]["time_s"]
    seconds, waited_s = end_s - start_s, sum(numbers(timed, "wait_s"))
    window = [(start_s, end_s)]
    trained = sum(work.tokens_of_step(int(row["version"])) for row in timed)
    generated = sum(tokens_within(group, window) for server in record.servers for group in server.groups) / trained
    credited = min(1.0, generated)
    return Observed(
        step_s=seconds / plan.timed,
        wait_s=waited_s / plan.timed,
        tokens_per_s=credited * trained / seconds,
        samples_per_s=credited * plan.timed * work.samples_per_step / seconds,
        generated=generated,
        trainer_idle=waited_s / seconds,
        rollout_idle=_mean(1.0 - length(overlap(busy(server), window)) / seconds for server in record.servers),
        update_s=_mean(length(overlap(_updates(server), window)) for server in record.servers) / plan.timed,
        age_mean=sum((number(row, "age_mean") or 0.0) * row["trained_tokens"] for row in timed) / trained,
        age_max=max(int(row["age_max"]) for row in timed),
    )


def timed_rows(record: RunRecord, plan: StepPlan) -> Sequence[Row]:
    """The steps between t0 and t1."""
    return record.steps[plan.head : plan.head + plan.timed]


def step_times(record: RunRecord, plan: StepPlan) -> list[tuple[float, float]]:
    """(wait, rest) of each timed step, in seconds."""
    ends = [row["time_s"] for row in record.steps[plan.head - 1 : plan.head + plan.timed]]
    waits = numbers(timed_rows(record, plan), "wait_s")
    return [(wait_s, end_s - start_s - wait_s) for start_s, end_s, wait_s in zip(ends, ends[1:], waits, strict=False)]


def busy(server: Server) -> list[Span]:
    """When the server's engine could generate: it has a group and the weights that the group's ticket asks for, and is
    not loading others."""
    generating = merged(
        (max(group.span[0], _applied_s(server, group.version)), group.span[1]) for group in server.groups
    )
    edges = [-float("inf"), *(edge for update in _updates(server) for edge in update), float("inf")]
    return overlap(generating, list(zip(edges[::2], edges[1::2], strict=True)))


def tokens_within(group: Generated, window: Sequence[Span]) -> float:
    """The tokens of a group that were generated within the window, if they were evenly spread over its time."""
    return group.tokens * length(overlap([group.span], window)) / max(length([group.span]), 1e-9)


def _applied_s(server: Server, version: int) -> float:
    """When the engine got that version or a newer one; 0 if its timeline has no such update."""
    return min((update.span[1] for update in server.updates if update.version >= version), default=0.0)


def _updates(server: Server) -> list[Span]:
    return merged(update.span for update in server.updates)


def _server(rows: Iterable[Row]) -> Server:
    groups, updates = [], []
    for row in rows:
        span = (number(row, "start_s") or 0.0, number(row, "end_s") or 0.0)
        facts, word = row.get("args") or {}, str(row.get("name", "")).rpartition(" ")[2]
        if row.get("track") == "generation":
            groups.append(Generated(int(word), int(facts["version"]), int(facts["tokens"]), span))
        elif row.get("track") == "weights":
            updates.append(Update(int(word), span))
    return Server(tuple(groups), tuple(updates))


def _compare(run: str, verb: str, unit: str, made: Mapping[int, int], wanted: Mapping[int, int]) -> None:
    differing = sorted(key for key in made.keys() | wanted.keys() if made.get(key) != wanted.get(key))
    if differing:
        first = differing[0]
        raise EngineError(
            f"the run {run} {verb} {sum(made.values())} tokens in place of {sum(wanted.values())}: "
            f"{len(differing)} of {len(wanted)} {unit}s differ, first {unit} {first} with {made.get(first, 'none')} in "
            f"place of {wanted.get(first, 'none')}. Figures of different work do not compare; was a role restarted?"
        )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0

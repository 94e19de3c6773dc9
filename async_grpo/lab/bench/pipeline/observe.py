"""The metrics of one run's timed part, from its files. `measure_run` and `check_work` are pure.

    metrics.jsonl             steps, waits, ages                 trainer side
    timeline/rollout-*.jsonl  groups and weight updates          rollout side

         head            timed: M steps                tail
    |----------------|-------------------------------|--------|
                     t0: row of the last head step    t1: row of the last timed one

With a large S, groups generated before t0 would make the run look faster than it is while they last. So the rate is
that of the slower side: trained tokens only count as far as they were also generated between t0 and t1.
"""

from __future__ import annotations

import math
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
    """A group on its server: `span` from its ticket until it was judged, `version` of its ticket."""

    seq: int
    version: int
    tokens: int
    span: Span


@dataclass(frozen=True, slots=True)
class LoadedUpdate:
    """A weight update of an engine, which generates nothing during `span`."""

    version: int
    span: Span


@dataclass(frozen=True, slots=True)
class ServerTimeline:
    """Groups and weight updates of a rollout server."""

    groups: tuple[Generated, ...]
    updates: tuple[LoadedUpdate, ...]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The files of a run: one row per step, in order, and the timelines of its servers."""

    steps: Sequence[Row]
    servers: Sequence[ServerTimeline]


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of the timed part of a run. Shares are between 0 and 1, ages in optimizer steps."""

    step_s: float
    """Mean seconds from the end of a step to the end of the next."""
    wait_s: float
    """Part of it until the trainer had its batch."""
    tokens_per_s: float
    """Trained completion tokens per second, counted only as far as they were also generated in that time.

    samples_per_s likewise.
    """
    samples_per_s: float
    generated: float
    """Ratio of tokens generated to tokens trained: below 1 if a lead was used up."""
    trainer_idle: float
    rollout_idle: float
    """Share of the time in which an engine had nothing to generate or loaded weights; mean over the servers."""
    update_s: float
    """Seconds per step in which engines load weights; mean over the servers."""
    age_mean: float
    age_max: int


def read_record(run_dir: Path) -> RunRecord:
    """Read the record of the run in this folder."""
    steps = latest_rows(rows_of_kind(read_rows(run_dir / "metrics.jsonl"), "step"), "step")
    timelines = sorted((run_dir / "timeline").glob("rollout-*.jsonl"))
    return RunRecord(steps, [_read_timeline(read_rows(path)) for path in timelines])


def check_work(record: RunRecord, work: FixedWork, plan: StepPlan, run: str) -> None:
    """Raise EngineError unless the run did exactly the work without a restart. Less work would look faster."""
    generated = {group.seq: group.tokens for server in record.servers for group in server.groups}
    group_tokens = {seq: sum(work.group_lengths(seq)) for seq in range(plan.steps * work.groups_per_step)}
    _require_equal(run, "generated", "group", generated, group_tokens)

    versions = range(plan.steps)
    trained = _tokens_by_version(record, "trained_tokens")
    _require_equal(run, "trained", "step", trained, {version: work.tokens_of_step(version) for version in versions})
    read = _tokens_by_version(record, "read_tokens")
    _require_equal(run, "read", "step", read, {version: work.read_in_step(version) for version in versions})
    check_not_restarted(record, run)


def _tokens_by_version(record: RunRecord, key: str) -> dict[int, int]:
    return {int(row["version"]): int(number(row, key) or 0) for row in record.steps}


def check_not_restarted(record: RunRecord, run: str) -> None:
    """Raise EngineError if the trainer was restarted during the run."""
    if len({row["epoch"] for row in record.steps}) > 1:
        raise EngineError(
            f"the trainer of the run {run} was restarted, so its times are not comparable. Its log has the reason; run "
            "the bench again"
        )


def measure_run(record: RunRecord, work: FixedWork, plan: StepPlan) -> RunMetrics:
    """Return the metrics of a run that has passed `check_work`."""
    timed = timed_rows(record, plan)
    start_s = record.steps[plan.head - 1]["time_s"]
    end_s = timed[-1]["time_s"]
    window = [(start_s, end_s)]
    seconds = end_s - start_s
    waited_s = sum(numbers(timed, "wait_s"))

    trained = sum(work.tokens_of_step(int(row["version"])) for row in timed)
    generated = sum(tokens_within(group, window) for server in record.servers for group in server.groups) / trained
    credited = min(1.0, generated)  # the rate of the slower side
    generating_s = [length(overlap(generating_spans(server), window)) for server in record.servers]
    return RunMetrics(
        step_s=seconds / plan.timed,
        wait_s=waited_s / plan.timed,
        tokens_per_s=credited * trained / seconds,
        samples_per_s=credited * plan.timed * work.samples_per_step / seconds,
        generated=generated,
        trainer_idle=waited_s / seconds,
        rollout_idle=_mean(1.0 - busy_s / seconds for busy_s in generating_s),
        update_s=_mean(length(overlap(_update_spans(server), window)) for server in record.servers) / plan.timed,
        age_mean=sum((number(row, "age_mean") or 0.0) * row["trained_tokens"] for row in timed) / trained,
        age_max=max(int(row["age_max"]) for row in timed),
    )


def timed_rows(record: RunRecord, plan: StepPlan) -> Sequence[Row]:
    """Return the steps between t0 and t1."""
    return record.steps[plan.head : plan.head + plan.timed]


def step_times(record: RunRecord, plan: StepPlan) -> list[tuple[float, float]]:
    """Return (wait, rest) of each timed step in seconds."""
    ends = [row["time_s"] for row in record.steps[plan.head - 1 : plan.head + plan.timed]]
    waits = numbers(timed_rows(record, plan), "wait_s")
    return [(wait_s, end_s - start_s - wait_s) for start_s, end_s, wait_s in zip(ends, ends[1:], waits, strict=False)]


def generating_spans(server: ServerTimeline) -> list[Span]:
    """Return when the server's engine could generate.

    It then has a group and the weights that the group's ticket requires, and is not loading other weights.
    """
    could_generate = []
    for group in server.groups:
        start_s, end_s = group.span
        could_generate.append((max(start_s, _loaded_at_s(server, group.version)), end_s))

    # The gaps between the updates: their edges, shifted by one.
    edges = [-math.inf]
    for update_start_s, update_end_s in _update_spans(server):
        edges += [update_start_s, update_end_s]
    edges.append(math.inf)
    between_updates = list(zip(edges[::2], edges[1::2], strict=True))
    return overlap(merged(could_generate), between_updates)


def tokens_within(group: Generated, window: Sequence[Span]) -> float:
    """Return the tokens of a group generated within the window, assuming an even rate over its time."""
    return group.tokens * length(overlap([group.span], window)) / max(length([group.span]), 1e-9)


def _loaded_at_s(server: ServerTimeline, version: int) -> float:
    """Return when the engine had loaded that version or a newer one; 0 if its timeline has no such update."""
    return min((update.span[1] for update in server.updates if update.version >= version), default=0.0)


def _update_spans(server: ServerTimeline) -> list[Span]:
    return merged(update.span for update in server.updates)


def _read_timeline(rows: Iterable[Row]) -> ServerTimeline:
    groups = []
    updates = []
    for row in rows:
        span = (number(row, "start_s") or 0.0, number(row, "end_s") or 0.0)
        number_in_name = str(row.get("name", "")).rpartition(" ")[2]  # `group 17`, `version 3`
        if row.get("track") == "generation":
            arguments = row.get("args") or {}
            groups.append(
                Generated(
                    seq=int(number_in_name),
                    version=int(arguments["version"]),
                    tokens=int(arguments["tokens"]),
                    span=span,
                )
            )
        elif row.get("track") == "weights":
            updates.append(LoadedUpdate(int(number_in_name), span))
    return ServerTimeline(tuple(groups), tuple(updates))


def _require_equal(run: str, verb: str, unit: str, actual: Mapping[int, int], expected: Mapping[int, int]) -> None:
    keys = actual.keys() | expected.keys()
    differing = sorted(key for key in keys if actual.get(key) != expected.get(key))
    if differing:
        first = differing[0]
        raise EngineError(
            f"the run {run} {verb} {sum(actual.values())} tokens instead of {sum(expected.values())}: "
            f"{len(differing)} of {len(expected)} {unit}s differ, first {unit} {first} with "
            f"{actual.get(first, 'none')} instead of {expected.get(first, 'none')}. Results of different work are not "
            "comparable; check the log for a restarted role"
        )


def _mean(values: Iterable[float]) -> float:
    samples = list(values)
    return sum(samples) / len(samples) if samples else 0.0

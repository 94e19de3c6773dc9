"""Which side of a run waits, and what to change: the rules and thresholds that all displays share.

    idle shares of both sides   --> find_bottleneck, describe_bottleneck --> report, page of runs, simulate
    seconds by cause            --> find_main_cause, ADVICE                   --> why
    heartbeats and group counts --> describe_wait                        --> terminal, log
    idle share of the trainer   --> WAITS, HARDLY_WAITS                   --> max_staleness: auto, alerts
    speed with a change         --> WORTHWHILE                           --> autoscaling, tune, max_staleness: auto

A side counts as waiting if it waits for more than a tenth of the time:

    share of time waiting     servers <= 10%     servers > 10%
    trainer <= 10%            balanced           training
    trainer >  10%            generation         turns

All displays share this threshold. For the same runs the report names generation, `why` analyses the waits,
`max_staleness: auto` may raise S (max_staleness), and the alert may fire. The number of servers that a run can use
comes from a separate model (`servers_wanted`), which shares WORTHWHILE.

All functions here are pure. `telemetry.idle` and `lab.simulate.why` measure their inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum

from async_grpo.staleness import Selector
from async_grpo.wire.board import ServerBeat

WAITS = 0.10
"""Share of the time above which a side counts as waiting. Identical runs on shared machines differ by this much, so a
shorter wait is no reason to change a run."""
HARDLY_WAITS = 0.03
"""Share of the trainer's waits below which `max_staleness: auto` may lower S. It is below WAITS, so that S does not
oscillate."""
WORTHWHILE = 0.05
"""Minimum gain in speed that is worth more servers or older tokens. Simulations are not more accurate than this."""
NOTEWORTHY = 0.05
"""Minimum share of the time for mentioning a disturbance (evaluations, missing processors)."""
SERVERS_CONTENDED = 0.3
"""If servers without processors cause at least this share of the trainer's waits, the trainer's own time without a
processor counts as well."""


class Bottleneck(StrEnum):
    """Conclusion from the idle shares of both sides."""

    GENERATION = "generation"
    TRAINING = "training"
    TURNS = "turns"
    """Each side waits for the other, so they hardly overlap."""
    BALANCED = "balanced"


def find_bottleneck(trainer_idle: float, rollout_idle: float) -> Bottleneck:
    """Return the bottleneck, from the shares of the time (0 to 1) in which the trainer waited for groups and the
    rollout servers generated nothing."""
    if trainer_idle > WAITS:
        return Bottleneck.TURNS if rollout_idle > WAITS else Bottleneck.GENERATION
    return Bottleneck.TRAINING if rollout_idle > WAITS else Bottleneck.BALANCED


def describe_bottleneck(
    trainer_idle: float | None,
    rollout_idle: float | None,
    evaluating: float | None = None,
    *,
    selector: Selector = "fifo",
    disturbed: int = 0,
) -> str:
    """Return a sentence with the idle shares and the conclusion from them; "" if the trainer's share is unknown.

    All shares are of the trainer's time, 0 to 1. `evaluating`: share in which servers evaluated. `disturbed`: number
    of steps that the shares exclude because a server was restarted.
    """
    if trainer_idle is None:
        return ""
    waited = f"The trainer waited for rollouts {trainer_idle:.0%} of its time"
    if rollout_idle is None:
        return f"{waited}; how long the rollout servers waited is not known."

    conclusion = _explain_bottleneck(trainer_idle, rollout_idle, selector)
    text = f"{waited}, and the rollout servers generated nothing for {rollout_idle:.0%} of it: {conclusion}."
    if evaluating is not None and evaluating >= NOTEWORTHY:
        text += f" Evaluations kept the servers busy for {evaluating:.0%} of it."
    if disturbed:
        steps = "1 step" if disturbed == 1 else f"{disturbed} steps"
        text += f" Not counted: {steps} in which a rollout server restarted."
    return text


def _explain_bottleneck(trainer_idle: float, rollout_idle: float, selector: Selector) -> str:
    match find_bottleneck(trainer_idle, rollout_idle):
        case Bottleneck.GENERATION:
            return (
                "generation was the bottleneck, and more rollout servers would make the run faster, unless `async-grpo "
                "why` names another cause"
            )
        case Bottleneck.TRAINING:
            return "training was the bottleneck, and a faster trainer would make the run faster"
        case Bottleneck.BALANCED:
            return "generation and training were balanced"
        case Bottleneck.TURNS if selector == "exact_age":
            return "the two sides took turns, as they must with the selector exact_age"
        case Bottleneck.TURNS:
            pass
    text = "the two sides took turns, and a larger max_staleness would let them work at the same time"
    if abs(trainer_idle - rollout_idle) > WAITS:
        slower = "generation" if trainer_idle > rollout_idle else "training"
        text += f"; {slower} took longer"
    return text


class Cause(StrEnum):
    """Cause of spent time. The first three, and part of CPU, are work of the trainer."""

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
    CPU = "processors"
    RESTART = "restart"


MEANINGS = {
    Cause.BUFFER: "a group was finished, and the batch came late",
    Cause.WEIGHTS: "servers waited for new weights, or loaded them",
    Cause.VERIFIERS: "completions were being judged",
    Cause.WINDOW: "no group could be admitted: (S + 1) P groups were active",
    Cause.TASKS: "no task (prompt) was there",
    Cause.SLOTS: "a group waited for a free slot (rollout.max_concurrency)",
    Cause.TAIL: "a group's longest completion ran while slots were free",
    Cause.SLOW_SERVER: "a group ran on a server that is much slower than the others",
    Cause.EVALUATION: "an evaluation ran next to the group, or kept the server's version",
    Cause.ENGINE: "a group ran in a full engine",
    Cause.CPU: "the server's processes waited for a processor",
    Cause.RESTART: "a server was away and was started again",
}
"""Cause -> what delayed the group that a batch waited for."""

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
    Cause.CPU: "processes wait for processors that others use: stop what else runs on these cores, give each side "
    "cores of its own (launch.cores), use fewer threads, or raise the container's CPU limit",
    Cause.RESTART: "a rollout server was away and was started again: its log says why it ended. No setting of the run "
    "would have shortened that; async-grpo why --last N explains the steps after it",
}
"""Cause -> advice."""


def find_main_cause(
    trainer: Mapping[Cause, float], waits: Mapping[Cause, float], seconds: float
) -> tuple[Cause, float]:
    """Return the cause that took most of the `seconds` of a run's steps, and its share of them.

    `trainer`: seconds of the trainer's own work by cause. `waits`: seconds of its waits by cause. While the trainer
    waits for groups, its computing does not count, because a faster trainer would only wait longer. Neither does its
    time without a processor, unless the servers lack processors too.
    """
    total_wait_s = sum(waits.values())
    is_waiting = total_wait_s > WAITS * seconds
    servers_contended = waits.get(Cause.CPU, 0.0) >= SERVERS_CONTENDED * total_wait_s

    seconds_by_cause = defaultdict(float, waits)
    for cause, spent_s in trainer.items():
        is_hidden = cause is Cause.COMPUTING or (cause is Cause.CPU and not servers_contended)
        if not (is_waiting and is_hidden):
            seconds_by_cause[cause] += spent_s
    if not seconds_by_cause:
        return Cause.COMPUTING, 0.0
    main = max(seconds_by_cause, key=lambda cause: seconds_by_cause[cause])
    return main, seconds_by_cause[main] / seconds if seconds else 0.0


def describe_wait(
    servers: Sequence[ServerBeat],
    *,
    is_training: bool,
    ready: int,
    inflight: int,
    groups_per_step: int,
    window_is_full: bool,
) -> str:
    """Return a sentence about the current wait. A trainer that has taken a batch is training; otherwise it waits.

    `ready` and `inflight`: number of finished and unfinished groups. `window_is_full`: no group may be admitted.
    """
    if is_training and not servers:
        return "no rollout server has reported; the trainer is training"
    if not servers:
        return "the trainer waits for a rollout server; none has reported"
    if is_training:
        return _describe_waiting_servers(servers, window_is_full)
    busy = [server.name for server in servers if server.running]
    evaluating = [server for server in servers if server.evaluation is not None]
    if evaluating and not busy and not ready:
        return f"the trainer waits: {evaluating[0].name} {describe_evaluation(evaluating[0])}"
    if ready >= groups_per_step and not inflight:
        return f"the rollout servers wait for the trainer: {ready} groups are ready, none is taken"
    if ready >= groups_per_step:
        # The selector decides: in order, the oldest group is still in flight; exact_age also wants newer ones first.
        return f"the trainer waits for the groups that are next in line; {ready} others are ready"
    if busy:
        return f"the trainer waits for {list_names(busy)}: {ready} of {groups_per_step} groups are ready"
    waiting = [server for server in servers if server.waiting_for]
    if waiting:
        return f"{_names_wait(waiting)} for {waiting[0].waiting_for}, and the trainer for its groups"
    return f"the trainer waits for groups: {ready} of {groups_per_step} are ready, {inflight} are being made"


def _describe_waiting_servers(servers: Sequence[ServerBeat], window_is_full: bool) -> str:
    """Return the wait while the trainer is training, when only rollout servers can be waiting."""
    idle = [server for server in servers if server.waiting_for and server.evaluation is None]
    evaluating = [server for server in servers if server.evaluation is not None]
    if len(evaluating) == len(servers):
        return f"the trainer is training; {evaluating[0].name} {describe_evaluation(evaluating[0])}"
    if not idle:
        return "nobody: training and generation overlap"
    if window_is_full:
        return f"{_names_wait(idle)} for the trainer: the staleness window is full"
    return f"{_names_wait(idle)} for {idle[0].waiting_for}"


def describe_evaluation(server: ServerBeat) -> str:
    """Return for example `evaluates version 0: 512 of 1,280 completions, 3 s left`; "" without an evaluation."""
    evaluation = server.evaluation
    if evaluation is None:
        return ""
    left = "" if evaluation.left_s is None else f", {evaluation.left_s:.0f} s left"
    return f"evaluates version {evaluation.version}: {evaluation.done:,} of {evaluation.total:,} completions{left}"


def list_names(names: Sequence[str]) -> str:
    """Return at most three of the names, and the number of the others.

    >>> list_names(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    return ", ".join(names[:3]) + more


def _names_wait(servers: Sequence[ServerBeat]) -> str:
    verb = "waits" if len(servers) == 1 else "wait"
    return f"{list_names([server.name for server in servers])} {verb}"

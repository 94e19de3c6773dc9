"""Who waits in a run, and what to change: the rules and the only thresholds of everything that answers this.

    idle shares of both sides   --> find_bottleneck, describe_bottleneck --> report, page of runs, simulate
    seconds by cause            --> main_cause, ADVICE                   --> why
    heartbeats and group counts --> describe_wait                        --> terminal, log
    idle share of the trainer   --> WAITS, NEVER_WAITS                   --> max_staleness: auto, alerts
    speed with a change         --> WORTHWHILE                           --> autoscaling, tune, max_staleness: auto

A side that waits for more than a tenth of the time waits, whoever asks:

    share of time waiting     servers <= 10%     servers > 10%
    trainer <= 10%            balanced           training
    trainer >  10%            generation         turns

So the report blames generation, `why` looks into the waits, `max_staleness: auto` may raise S and the alert may fire
for the same runs. How many servers a run can use is a model of its own (`servers_wanted`), which shares WORTHWHILE.

Everything here is a pure function of numbers that others measure (`telemetry.idle`, `lab.simulate.why`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum

from async_grpo.staleness import Selector
from async_grpo.wire.board import ServerBeat

WAITS = 0.10
"""Share of the time above which a side counts as waiting. Equal runs on shared machines differ by as much, so a shorter
wait is no reason to change a run."""
NEVER_WAITS = 0.03
"""Share below which the trainer counts as not waiting at all. `max_staleness: auto` lowers S only then, so that it does
not move up and down around WAITS."""
WORTHWHILE = 0.05
"""Smallest gain in speed that is worth more servers or older tokens: simulations are no more exact than that."""
NOTEWORTHY = 0.05
"""Share of the time from which a disturbance (evaluations, missing processors) is mentioned."""
BOTH_CONTENDED = 0.3
"""Share of the trainer's waits that servers spend waiting for processors, from which on contention slows both sides."""


class Bottleneck(StrEnum):
    """What the idle shares of both sides say."""

    GENERATION = "generation"
    TRAINING = "training"
    TURNS = "turns"
    """Each side waits for the other, so that they hardly overlap."""
    BALANCED = "balanced"


def find_bottleneck(trainer_idle: float, rollout_idle: float) -> Bottleneck:
    """The bottleneck by the shares of the time (0 to 1) in which the trainer waited for groups, and in which the
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
    """A sentence with the idle shares and what follows from them; "" if the trainer's is not known.

    All shares are of the trainer's time, 0 to 1. `evaluating`: the share in which servers evaluated. `disturbed`:
    number of steps that are not in the shares, because a server was started again.
    """
    if trainer_idle is None:
        return ""
    waited = f"The trainer waited for rollouts {trainer_idle:.0%} of its time"
    if rollout_idle is None:
        return f"{waited}; how long the rollout servers waited is not known."
    tested = ""
    if evaluating is not None and evaluating >= NOTEWORTHY:
        tested = f" Evaluations kept the servers busy for {evaluating:.0%} of it."
    without = ""
    if disturbed:
        steps = "1 step" if disturbed == 1 else f"{disturbed} steps"
        without = f" This is without {steps} in which a rollout server was started again."
    reading = _reading(trainer_idle, rollout_idle, selector)
    verdict = f"{waited}, and the rollout servers generated nothing for {rollout_idle:.0%} of it: {reading}."
    return f"{verdict}{tested}{without}"


def _reading(trainer_idle: float, rollout_idle: float, selector: Selector) -> str:
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
    longer = ""
    if abs(trainer_idle - rollout_idle) > WAITS:
        longer = f"; {'generation' if trainer_idle > rollout_idle else 'training'} took longer"
    return f"the two sides took turns, and a larger max_staleness would let them work at the same time{longer}"


class Cause(StrEnum):
    """What time went to. The first three are the trainer's own."""

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
    Cause.SLOTS: "a group waited for one of rollout.max_concurrency samples to end",
    Cause.TAIL: "a group's longest completion ran while slots were free",
    Cause.SLOW_SERVER: "a group ran on a server that is much slower than the others",
    Cause.EVALUATION: "an evaluation ran next to the group, or kept the server's version",
    Cause.ENGINE: "a group ran in a full engine",
    Cause.CPU: "the server's processes waited for a processor",
    Cause.RESTART: "a server was away and was started again",
}
"""What the group that a batch waited for was held up by, for readers of the table."""

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
"""What to do about each cause."""


def main_cause(trainer: Mapping[Cause, float], waits: Mapping[Cause, float], seconds: float) -> tuple[Cause, float]:
    """The cause that most of the `seconds` of a run's steps went to, and its share of them.

    `trainer`: seconds of the trainer's own work by cause, `waits`: those of its waits. The trainer's computing counts
    only if the trainer does not wait for groups, and so does its time without a processor, unless servers lack
    processors too.
    """
    waited_s = sum(waits.values())
    is_waiting = waited_s > WAITS * seconds
    contended = waits.get(Cause.CPU, 0.0) >= BOTH_CONTENDED * waited_s
    found = defaultdict(float, waits)
    for cause, spent_s in trainer.items():
        hides = cause is Cause.COMPUTING or (cause is Cause.CPU and not contended)
        if not (is_waiting and hides):
            found[cause] += spent_s
    cause = max(found, key=lambda cause: found[cause])
    return cause, found[cause] / seconds if seconds else 0.0


def describe_wait(
    servers: Sequence[ServerBeat],
    *,
    is_training: bool,
    ready: int,
    inflight: int,
    groups_per_step: int,
    window_is_full: bool,
) -> str:
    """A sentence about the wait of this moment. A trainer that has taken a batch is training; otherwise it waits.

    `ready` and `inflight`: finished and unfinished groups. `window_is_full`: no group may be admitted.
    """
    if not servers:
        return "the trainer waits for a rollout server; none has reported"
    if is_training:
        return _describe_waiting_servers(servers, window_is_full)
    busy = [server.name for server in servers if server.running]
    graded = [server for server in servers if server.evaluation is not None]
    if graded and not ready:
        return f"the trainer waits: {graded[0].name} {describe_evaluation(graded[0])}"
    if ready >= groups_per_step and not inflight:
        return f"the rollout servers wait for the trainer: {ready} groups are ready, none is taken"
    if ready >= groups_per_step:
        return f"the trainer waits for the oldest groups; {ready} newer ones are ready"
    if busy:
        return f"the trainer waits for {list_names(busy)}: {ready} of {groups_per_step} groups are ready"
    if stuck := [server for server in servers if server.waiting_for]:
        return f"{_wait(stuck)} for {stuck[0].waiting_for}, and the trainer for its groups"
    return f"the trainer waits for groups: {ready} of {groups_per_step} are ready, {inflight} are being made"


def _describe_waiting_servers(servers: Sequence[ServerBeat], window_is_full: bool) -> str:
    """The wait while the trainer is training: only rollout servers can be waiting."""
    idle = [server for server in servers if server.waiting_for and server.evaluation is None]
    if not idle:
        return "nobody: training and generation overlap"
    if window_is_full:
        return f"{_wait(idle)} for the trainer: the staleness window is full"
    return f"{_wait(idle)} for {idle[0].waiting_for}"


def describe_evaluation(server: ServerBeat) -> str:
    """`evaluates version 0: 512 of 1,280 completions, 3 s left`; "" if the server evaluates nothing."""
    if (now := server.evaluation) is None:
        return ""
    left = "" if now.left_s is None else f", {now.left_s:.0f} s left"
    return f"evaluates version {now.version}: {now.done:,} of {now.total:,} completions{left}"


def list_names(names: Sequence[str]) -> str:
    """At most three of the names, and the number of the others.

    >>> list_names(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    return ", ".join(names[:3]) + more


def _wait(servers: Sequence[ServerBeat]) -> str:
    verb = "waits" if len(servers) == 1 else "wait"
    return f"{list_names([server.name for server in servers])} {verb}"

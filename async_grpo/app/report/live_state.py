"""LiveState: a snapshot of a running job, and a sentence that says who waits for whom in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from async_grpo.telemetry.rows import Row
from async_grpo.wire.board import Evaluation, ServerBeat


class Warn(Protocol):
    """Shows a problem to a person. A JSON log gets its level and fields, by which alerts find it."""

    def __call__(self, text: str, *, level: Literal["warning", "error"] = "warning", **fields: object) -> None: ...


def warn_by(say: Callable[[str], object]) -> Warn:
    """A `Warn` that passes the text alone to `say`."""

    def warn(text: str, *, level: Literal["warning", "error"] = "warning", **fields: object) -> None:
        say(text)

    return warn


@dataclass(frozen=True, slots=True)
class RoleState:
    """A supervised process. `state` is starting, running, restarting, finished, stopped or failed."""

    name: str
    state: str
    restarts: int = 0
    stage: str = ""
    """The stage of its start; "" if unknown."""
    since_s: float = 0.0
    """Seconds since its process was started."""
    usual_s: float | None = None
    """Seconds that its last start on this machine took; None if unknown."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state of a run now; `step` is the latest step row, None before the first step."""

    step: Row | None = None
    steps_done: int = 0
    evaluations: Sequence[Evaluation] = ()
    waiting: int = 0
    """Tasks that have no ticket yet."""
    inflight: int = 0
    ready: int = 0
    taken: int = 0
    active: int = 0
    """Groups that hold a slot of the staleness window, of `capacity` = (S + 1) * P."""
    capacity: int = 0
    servers: Sequence[ServerBeat] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    roles: Sequence[RoleState] = ()
    elapsed_s: float = 0.0


def who_waits(state: LiveState, groups_per_step: int) -> str:
    """A sentence about the wait that matters now. A trainer that has taken a batch is training; otherwise it waits."""
    if starting := [role for role in state.roles if role.state in ("starting", "restarting")]:
        return "starting " + ", ".join(map(_start, starting[:3])) + _more(starting)
    if state.roles and all(role.state in ("finished", "stopped") for role in state.roles):
        return "nobody: every role has left"
    if not state.servers:
        return "the trainer waits for a rollout server; none has reported"
    if state.taken:
        return _while_training(state)
    return _while_trainer_is_idle(state, groups_per_step)


def evaluating(server: ServerBeat) -> str:
    """`evaluates version 0: 512 of 1,280 completions, 3 s left`; "" if the server evaluates nothing."""
    if (now := server.evaluation) is None:
        return ""
    left = "" if now.left_s is None else f", {now.left_s:.0f} s left"
    return f"evaluates version {now.version}: {now.done:,} of {now.total:,} completions{left}"


def _start(role: RoleState) -> str:
    """`rollout-0 (loading the engine, 8 s, last time 14 s)`."""
    known = [role.stage, f"{role.since_s:.0f} s"] if role.stage else []
    known += [f"last time {role.usual_s:.0f} s"] if role.usual_s is not None else []
    return f"{role.name} ({', '.join(known)})" if known else role.name


def _while_training(state: LiveState) -> str:
    """The wait while the trainer is training: only rollout servers can be waiting."""
    idle = [server for server in state.servers if server.waiting_for and server.evaluation is None]
    if not idle:
        return "nobody: training and generation overlap"
    if state.active >= state.capacity:
        return f"{_waits(idle)} for the trainer: the staleness window is full"
    return f"{_waits(idle)} for {idle[0].waiting_for}"


def _while_trainer_is_idle(state: LiveState, groups_per_step: int) -> str:
    """The wait while no batch is taken: groups are missing, not in ticket order, or about to be taken."""
    busy = [server.name for server in state.servers if server.running]
    graded = [server for server in state.servers if server.evaluation is not None]
    if graded and not state.ready:
        return f"the trainer waits: {graded[0].name} {evaluating(graded[0])}"
    if state.ready >= groups_per_step and not state.inflight:
        return f"the rollout servers wait for the trainer: {state.ready} groups are ready, none is taken"
    if state.ready >= groups_per_step:
        return f"the trainer waits for the oldest groups; {state.ready} newer ones are ready"
    if busy:
        return f"the trainer waits for {_names(busy)}: {state.ready} of {groups_per_step} groups are ready"
    stuck = [server for server in state.servers if server.waiting_for]
    if stuck:
        return f"{_waits(stuck)} for {stuck[0].waiting_for}, and the trainer for its groups"
    return (
        f"the trainer waits for groups: {state.ready} of {groups_per_step} are ready, {state.inflight} are being made"
    )


def _waits(servers: Sequence[ServerBeat]) -> str:
    verb = "waits" if len(servers) == 1 else "wait"
    return f"{_names([server.name for server in servers])} {verb}"


def _names(names: Sequence[str]) -> str:
    """The names, at most three of them."""
    return ", ".join(names[:3]) + _more(names)


def _more(items: Sequence[object]) -> str:
    return "" if len(items) <= 3 else f" and {len(items) - 3} more"

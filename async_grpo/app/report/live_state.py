"""LiveState: a snapshot of a running job, and a sentence that says who waits for whom in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_grpo.telemetry.rows import Row
from async_grpo.wire.board import Evaluation, ServerBeat


@dataclass(frozen=True, slots=True)
class RoleState:
    """A supervised process. `state` is starting, running, restarting, finished, stopped or failed."""

    name: str
    state: str
    restarts: int = 0


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
    if starting := [role.name for role in state.roles if role.state in ("starting", "restarting")]:
        return f"waiting for {_names(starting)} to start"
    if state.roles and all(role.state in ("finished", "stopped") for role in state.roles):
        return "nobody: every role has left"
    if not state.servers:
        return "trainer waits for a rollout server: none has reported"
    if state.taken:
        return _while_training(state)
    return _while_trainer_is_idle(state, groups_per_step)


def _while_training(state: LiveState) -> str:
    """The wait while the trainer is training: only rollout servers can be waiting."""
    idle = [server for server in state.servers if server.waiting_for]
    if not idle:
        return "nobody: training and generation overlap"
    if state.active >= state.capacity:
        return f"{_waits(idle)} for the staleness window (trainer is the bottleneck)"
    return f"{_waits(idle)} for {idle[0].waiting_for}"


def _while_trainer_is_idle(state: LiveState, groups_per_step: int) -> str:
    """The wait while no batch is taken: groups are missing, not in ticket order, or about to be taken."""
    busy = [server.name for server in state.servers if server.running]
    if state.ready >= groups_per_step and not state.inflight:
        return f"rollouts wait for the trainer: {state.ready} groups ready, none taken"
    if state.ready >= groups_per_step:
        return f"trainer waits for the oldest groups: {state.ready} ready, taken in ticket order"
    if busy:
        return f"trainer waits for {_names(busy)}: {state.ready} of {groups_per_step} groups ready"
    stuck = [server for server in state.servers if server.waiting_for]
    if stuck:
        return f"{_waits(stuck)} for {stuck[0].waiting_for}, and trainer for them"
    return f"trainer waits: {state.inflight} groups in flight, but no server generates (leases will expire)"


def _waits(servers: Sequence[ServerBeat]) -> str:
    verb = "waits" if len(servers) == 1 else "wait"
    return f"{_names([server.name for server in servers])} {verb}"


def _names(names: Sequence[str]) -> str:
    """The names, at most three of them."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"

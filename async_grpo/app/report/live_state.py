"""LiveState: a snapshot of a running job, and a sentence that says who waits for whom in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from async_grpo.telemetry.bottleneck import describe_wait, list_names
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
    """A sentence about the wait that matters now: for roles that start, or of one side for the other."""
    if starting := [_start(role) for role in state.roles if role.state in ("starting", "restarting")]:
        return f"starting {list_names(starting)}"
    if state.roles and all(role.state in ("finished", "stopped") for role in state.roles):
        return "nobody: every role has left"
    return describe_wait(
        state.servers,
        is_training=state.taken > 0,
        ready=state.ready,
        inflight=state.inflight,
        groups_per_step=groups_per_step,
        window_is_full=state.active >= state.capacity,
    )


def _start(role: RoleState) -> str:
    """`rollout-0 (loading the engine, 8 s, last time 14 s)`."""
    known = [role.stage, f"{role.since_s:.0f} s"] if role.stage else []
    known += [f"last time {role.usual_s:.0f} s"] if role.usual_s is not None else []
    return f"{role.name} ({', '.join(known)})" if known else role.name

"""LiveState: a snapshot of a running job, and a sentence about the wait that matters in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from async_grpo.telemetry.bottleneck import describe_evaluation, describe_wait, list_names
from async_grpo.telemetry.rows import Row
from async_grpo.wire.board import Evaluation, ServerBeat


class Warn(Protocol):
    """Shows a problem to the user. A JSON log also gets the level and the fields, which alerts select by."""

    def __call__(self, text: str, *, level: Literal["warning", "error"] = "warning", **fields: object) -> None: ...


def warn_as_text(print_text: Callable[[str], object]) -> Warn:
    """Return a `Warn` that passes the text to `print_text` and drops level and fields."""

    def warn(text: str, *, level: Literal["warning", "error"] = "warning", **fields: object) -> None:
        print_text(text)

    return warn


@dataclass(frozen=True, slots=True)
class RoleState:
    """A supervised process."""

    name: str
    state: str
    """starting, running, restarting, finished, stopped or failed."""
    restarts: int = 0
    stage: str = ""
    """Stage of its start; "" if unknown."""
    since_s: float = 0.0
    """Seconds since its process was started."""
    usual_s: float | None = None
    """Seconds that its last start on this machine took; None if unknown."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """Current state of a run."""

    step: Row | None = None
    """Newest row of a step; None before the first step."""
    steps_done: int = 0
    evaluations: Sequence[Evaluation] = ()
    waiting: int = 0
    """Tasks without a ticket."""
    inflight: int = 0
    ready: int = 0
    taken: int = 0
    active: int = 0
    """Groups that hold a slot of the staleness window."""
    capacity: int = 0
    """Slots of the staleness window: (S + 1) * P."""
    servers: Sequence[ServerBeat] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    roles: Sequence[RoleState] = ()
    elapsed_s: float = 0.0


def describe_current_wait(state: LiveState, groups_per_step: int) -> str:
    """Return a sentence about the wait that matters now: for starting roles, or of one side for the other."""
    starting = [_describe_start(role) for role in state.roles if role.state in ("starting", "restarting")]
    if starting:
        return f"starting {list_names(starting)}"
    if state.roles and all(role.state in ("finished", "stopped") for role in state.roles):
        return "nobody: all roles have ended"
    if any(role.name == "trainer" and role.state in ("finished", "stopped") for role in state.roles):
        evaluating = [server for server in state.servers if server.evaluation is not None]
        if evaluating:
            return f"the end of the run waits: {evaluating[0].name} {describe_evaluation(evaluating[0])}"
        return "nobody: the trainer has finished"
    return describe_wait(
        state.servers,
        is_training=state.taken > 0,
        ready=state.ready,
        inflight=state.inflight,
        groups_per_step=groups_per_step,
        window_is_full=state.active >= state.capacity,
    )


def _describe_start(role: RoleState) -> str:
    """`rollout-0 (loading the engine, 8 s, last time 14 s)`."""
    details = []
    if role.stage:
        details += [role.stage, f"{role.since_s:.0f} s"]
    if role.usual_s is not None:
        details.append(f"last time {role.usual_s:.0f} s")
    return f"{role.name} ({', '.join(details)})" if details else role.name

"""One consistent look at a running job, for the live view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_grpo.telemetry.rows import Row
from async_grpo.wire.board import Evaluation, ServerBeat


@dataclass(frozen=True, slots=True)
class RoleState:
    """A supervised process. `state` is a word such as starting, running, restarting, stopped, failed."""

    name: str
    state: str
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class LiveState:
    """What is known now; `step` is the latest step row, None before the first step."""

    step: Row | None = None
    steps_done: int = 0
    evaluations: Sequence[Evaluation] = ()
    waiting: int = 0
    """Tasks that no ticket has been given for."""
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

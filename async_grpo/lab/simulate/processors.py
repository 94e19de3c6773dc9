"""Slows engines and trainer down while both work on a machine that they share.

trainer computes   -->  every engine runs at 1 / engine_beside of its speed
an engine works    -->  the trainer runs at 1 / trainer_beside of its speed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from async_grpo.lab.simulate.engine import SimulatedEngine
from async_grpo.lab.simulate.timings import Timings


class EngineHost(Protocol):
    """A server, as seen from the shared machine."""

    engine: SimulatedEngine

    def set_slowdown(self, factor: float) -> None:
        """Generate `factor` times slower than alone from now on."""


class TrainingHost(Protocol):
    """The trainer, as seen from the shared machine."""

    def set_slowdown(self, factor: float) -> None:
        """Train `factor` times slower than alone from now on."""


class SharedProcessors:
    """The machine of engines and trainer. Factors of 1 in the timings mean that they share nothing."""

    def __init__(self, timings: Timings) -> None:
        self._engine_factor = timings.engine_beside
        self._trainer_factor = timings.trainer_beside
        self._servers: Sequence[EngineHost] = ()
        self._trainer: TrainingHost | None = None
        self._engines_work = False

    def connect(self, servers: Sequence[EngineHost], trainer: TrainingHost) -> None:
        """Set the roles that share the processors."""
        self._servers = servers
        self._trainer = trainer

    def update_engine_speed(self, trainer_computes: bool) -> None:
        """Adjust the engines after the trainer has started or stopped computing."""
        if self._engine_factor > 1:
            for server in self._servers:
                server.set_slowdown(self._engine_factor if trainer_computes else 1.0)

    def update_trainer_speed(self) -> None:
        """Adjust the trainer after samples have started or ended, if that changed whether any engine works."""
        if self._trainer_factor == 1 or self._trainer is None:
            return
        engines_work = any(server.engine.running for server in self._servers)
        if engines_work != self._engines_work:
            self._engines_work = engines_work
            self._trainer.set_slowdown(self._trainer_factor if engines_work else 1.0)

"""Engines and trainer that share processors, power or memory: each is slower while the other works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from async_grpo.lab.simulate.engine import SimulatedEngine
from async_grpo.lab.simulate.timings import Timings


class EngineHost(Protocol):
    """A server, of which this module sees the speed and the load."""

    engine: SimulatedEngine

    def slow_down(self, factor: float) -> None:
        """Generate at 1 / `factor` of the speed that the engine has alone."""


class TrainingHost(Protocol):
    """The trainer, of which this module sees the speed."""

    def slow_down(self, factor: float) -> None:
        """Train at 1 / `factor` of the speed that the trainer has alone."""


class SharedProcessors:
    """The machine that engines and trainer share, as far as `engine_beside` and `trainer_beside` say that they do."""

    def __init__(self, timings: Timings) -> None:
        self._engine_factor = timings.engine_beside
        self._trainer_factor = timings.trainer_beside
        self._servers: Sequence[EngineHost] = ()
        self._trainer: TrainingHost | None = None
        self._engines_work = False

    def connect(self, servers: Sequence[EngineHost], trainer: TrainingHost) -> None:
        """Name the roles that share the processors."""
        self._servers, self._trainer = servers, trainer

    def note_training(self, computing: bool) -> None:
        """The trainer started or stopped computing: change the speed of the engines."""
        if self._engine_factor > 1:
            for server in self._servers:
                server.slow_down(self._engine_factor if computing else 1.0)

    def note_generation(self) -> None:
        """Samples started or ended: change the speed of the trainer if all engines are idle now, or no longer are."""
        if self._trainer_factor > 1 and self._trainer is not None:
            engines_work = any(server.engine.running for server in self._servers)
            if engines_work != self._engines_work:
                self._engines_work = engines_work
                self._trainer.slow_down(self._trainer_factor if engines_work else 1.0)

"""A simulated run: servers and trainer of this project around its replay buffer, on a simulated clock.

    SimulatedServer x N --admit, insert--> SimulatedBuffer <--take, release-- SimulatedTrainer
            ^                                                                       |
            +------------------------- weights, after a transfer -------------------+

Imports go one way: simulation, trainer, server, buffer. The buffer wakes servers and trainer through the two interfaces
that it declares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from async_grpo.auto_staleness import StalenessDecision
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.buffer import SimulatedBuffer
from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.evaluation import EvaluationClaims
from async_grpo.lab.simulate.events import EventLoop
from async_grpo.lab.simulate.processors import SharedProcessors
from async_grpo.lab.simulate.server import SimulatedServer
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.simulate.trainer import SimulatedStep, SimulatedTrainer
from async_grpo.telemetry.idle import Span
from rollout_server.dispatch.concurrency import ADJUST_INTERVAL_S

MEAN_CRASHES = 10
"""Mean times between crashes that a run may stand still before it counts as stalled: some continue after a crash."""


@dataclass(slots=True)
class SimulatedRun:
    """Results of a simulation."""

    settings: SimulatedSettings
    steps: list[SimulatedStep]
    released: dict[str, int]
    admitted: int
    generated_tokens: float
    """For training."""
    inserted: int
    ended_s: float
    decisions: list[tuple[int, StalenessDecision]]
    """max_staleness: auto. Versions at which S changed, and why."""
    evaluations: list[Span] = field(default_factory=list)
    """Start and end of every evaluation that ended."""
    exchange_s: float = 0.0
    """Mean seconds of an exchange with the buffer, its wait for earlier ones included; 0 if they cost nothing."""


class Simulation:
    """The connected roles of a simulated run, which can be run once. `buffer_class`: a subclass can watch its calls."""

    def __init__(
        self,
        settings: SimulatedSettings,
        timings: Timings,
        *,
        seed: int,
        buffer_class: type[SimulatedBuffer] = SimulatedBuffer,
    ) -> None:
        self.context = context = SimulationContext(settings, timings, EventLoop(), np.random.default_rng(seed))
        self.processors = SharedProcessors(timings)
        self.evaluations = EvaluationClaims(context)
        self.buffer = buffer_class(context)
        self.servers = [
            SimulatedServer(number, context, self.buffer, self.evaluations, self.processors)
            for number in range(settings.servers)
        ]
        self.trainer = SimulatedTrainer(context, self.buffer, self.servers, self.processors)
        self.buffer.connect(self.servers, self.trainer)
        self.processors.connect(self.servers, self.trainer)
        self._progress: tuple[int, ...] = ()
        self._progress_s = 0.0
        """When `_is_stalled` first found that progress."""

    def run(self) -> SimulatedRun:
        """Simulate to the last step. Raises ConfigError if the run would stall."""
        events, trainer = self.context.events, self.trainer
        self._schedule_faults()
        self.buffer.start_source()
        trainer.start()
        for server in self.servers:
            server.start()
        if not events.run(lambda: trainer.is_over, is_stalled=self._is_stalled):
            raise ConfigError(
                f"the simulated run stalls at version {trainer.version}, after {events.now_s:.0f} s: nothing "
                "is left that could get it on. This combination of selector, admission and faults would stall for real"
            )
        return self._collect_results()

    def _is_stalled(self) -> bool:
        """True if the run has not got on for longer than it may have to wait for a recurring action: for a task, a free
        slot, a restart, or a crash that ends the leases of an idle server."""
        state, now_s = self.buffer.state, self.context.events.now_s
        progress = (self.trainer.version, state.admitted, state.inserted, state.released.total())
        if progress != self._progress:
            self._progress, self._progress_s = progress, now_s
        timings, faults = self.context.timings, self.context.timings.faults
        restarts_s = faults.server_restart_s + faults.trainer_restart_s + self.context.settings.lease_s
        crashes_s = MEAN_CRASHES * (faults.server_every_s + faults.trainer_every_s)
        return now_s - self._progress_s > 60 * ADJUST_INTERVAL_S + 2 * timings.task_s + restarts_s + crashes_s

    def _schedule_faults(self) -> None:
        faults = self.context.timings.faults
        crashes = [(faults.server_every_s, server.crash) for server in self.servers]
        crashes.append((faults.trainer_every_s, self.trainer.crash))
        for every_s, crash in crashes:
            if every_s:
                self._schedule_crash(every_s, crash)

    def _schedule_crash(self, every_s: float, crash: Callable[[], None]) -> None:
        """Crash after a random time with mean `every_s`, again and again."""

        def crash_and_schedule_next() -> None:
            crash()
            self._schedule_crash(every_s, crash)

        delay_s = float(self.context.generator.exponential(every_s))
        self.context.events.call_later(delay_s, crash_and_schedule_next, recurring=True)

    def _collect_results(self) -> SimulatedRun:
        state, evaluations, exchanges_s = self.buffer.state, self.evaluations.evaluations, self.buffer.exchanges_s
        return SimulatedRun(
            settings=self.context.settings,
            steps=self.trainer.steps,
            released=dict(state.released),
            admitted=state.admitted,
            generated_tokens=sum(server.engine.generated for server in self.servers) - self.evaluations.tokens,
            inserted=state.inserted,
            ended_s=self.context.events.now_s,
            decisions=self.trainer.decisions,
            evaluations=[(each.began_s, each.ended_s) for each in evaluations if each.ended_s is not None],
            exchange_s=sum(exchanges_s) / max(1, len(exchanges_s)),
        )


def simulate(settings: SimulatedSettings, timings: Timings, *, seed: int = 1) -> SimulatedRun:
    """Simulate a run. The same arguments give the same run. Raises ConfigError if it would stall."""
    return Simulation(settings, timings, seed=seed).run()

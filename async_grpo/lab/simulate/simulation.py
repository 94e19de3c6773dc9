"""A simulated run: servers and trainer of this project around its replay buffer, on a simulated clock.

    SimulatedServer x N --admit, insert--> SimulatedBuffer <--take, release-- SimulatedTrainer
            ^                                                                       |
            +------------------------- weights, after a transfer -------------------+

Imports go one way: simulation, trainer, server, buffer. The buffer wakes servers and trainer through two interfaces
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

STALL_CRASHES = 10
"""Number of mean times between crashes without progress until a run counts as stalled: some runs continue only after a
crash, which ends the leases of an idle server."""
STALL_ADJUSTMENTS = 60
"""Number of adjustments of the slots without progress until a run counts as stalled."""


@dataclass(slots=True)
class SimulatedRun:
    """Results of a simulation."""

    settings: SimulatedSettings
    steps: list[SimulatedStep]
    released: dict[str, int]
    """Number of ended groups by reason."""
    admitted: int
    generated_tokens: float
    """Tokens generated for training, without those of evaluations."""
    inserted: int
    ended_s: float
    decisions: list[tuple[int, StalenessDecision]]
    """max_staleness: auto. Versions at which S changed, and why."""
    evaluations: list[Span] = field(default_factory=list)
    """Start and end of every evaluation that ended."""
    exchange_s: float = 0.0
    """Mean seconds of an exchange with the buffer, including its wait for earlier ones; 0 if exchanges cost nothing."""


class Simulation:
    """The connected roles of a simulated run, which can be run once. `buffer_class`: a subclass can watch the calls."""

    def __init__(
        self,
        settings: SimulatedSettings,
        timings: Timings,
        *,
        seed: int,
        buffer_class: type[SimulatedBuffer] = SimulatedBuffer,
    ) -> None:
        self.context = SimulationContext(settings, timings, EventLoop(), np.random.default_rng(seed))
        self.processors = SharedProcessors(timings)
        self.evaluations = EvaluationClaims(self.context)
        self.buffer = buffer_class(self.context)
        self.servers = [
            SimulatedServer(number, self.context, self.buffer, self.evaluations, self.processors)
            for number in range(settings.servers)
        ]
        self.trainer = SimulatedTrainer(self.context, self.buffer, self.servers, self.processors)

        self.buffer.connect(self.servers, self.trainer)
        self.processors.connect(self.servers, self.trainer)
        self._progress: tuple[int, ...] = ()
        self._progress_since_s = 0.0
        """Time at which `_is_stalled` first saw `_progress`."""

    def run(self) -> SimulatedRun:
        """Simulate to the last step. Raises ConfigError if the run would stall."""
        events = self.context.events
        trainer = self.trainer
        self._schedule_faults()
        self.buffer.start_source()
        # The trainer first: it takes over the run, and servers get tickets of its epoch.
        trainer.start()
        for server in self.servers:
            server.start()

        if not events.run(lambda: trainer.is_over, is_stalled=self._is_stalled):
            raise ConfigError(
                f"the simulated run stalls at version {trainer.version}, after {events.now_s:.0f} s: no event is left "
                "that could continue it. A real run with this combination of selector, admission and faults would "
                "stall, too. Change one of them"
            )
        return self._collect_results()

    def _is_stalled(self) -> bool:
        """True if the run has made no progress for longer than any background action takes to cause some.

        These actions are: a task is read, slots are added, a role restarts, or a crash ends the leases of an idle
        server.
        """
        state = self.buffer.state
        now_s = self.context.events.now_s
        progress = (self.trainer.version, state.admitted, state.inserted, state.released.total())
        if progress != self._progress:
            self._progress = progress
            self._progress_since_s = now_s

        timings = self.context.timings
        faults = timings.faults
        restarts_s = faults.server_restart_s + faults.trainer_restart_s + self.context.settings.lease_s
        crashes_s = STALL_CRASHES * (faults.server_every_s + faults.trainer_every_s)
        limit_s = STALL_ADJUSTMENTS * ADJUST_INTERVAL_S + 2 * timings.task_s + restarts_s + crashes_s
        return now_s - self._progress_since_s > limit_s

    def _schedule_faults(self) -> None:
        faults = self.context.timings.faults
        if faults.server_every_s:
            for server in self.servers:
                self._schedule_crash(faults.server_every_s, server.crash)
        if faults.trainer_every_s:
            self._schedule_crash(faults.trainer_every_s, self.trainer.crash)

    def _schedule_crash(self, every_s: float, crash: Callable[[], None]) -> None:
        """Crash repeatedly, at random intervals with mean `every_s`."""

        def crash_and_schedule_next() -> None:
            crash()
            self._schedule_crash(every_s, crash)

        delay_s = float(self.context.generator.exponential(every_s))
        self.context.events.call_later(delay_s, crash_and_schedule_next, background=True)

    def _collect_results(self) -> SimulatedRun:
        state = self.buffer.state
        exchanges_s = self.buffer.exchanges_s
        generated_tokens = sum(server.engine.generated_tokens for server in self.servers)
        return SimulatedRun(
            settings=self.context.settings,
            steps=self.trainer.steps,
            released=dict(state.released),
            admitted=state.admitted,
            generated_tokens=generated_tokens - self.evaluations.generated_tokens,
            inserted=state.inserted,
            ended_s=self.context.events.now_s,
            decisions=self.trainer.decisions,
            evaluations=[
                (evaluation.started_s, evaluation.ended_s)
                for evaluation in self.evaluations.evaluations
                if evaluation.ended_s is not None
            ],
            exchange_s=sum(exchanges_s) / max(1, len(exchanges_s)),
        )


def simulate(settings: SimulatedSettings, timings: Timings, *, seed: int = 1) -> SimulatedRun:
    """Simulate a run. The same arguments give the same run. Raises ConfigError if it would stall."""
    return Simulation(settings, timings, seed=seed).run()

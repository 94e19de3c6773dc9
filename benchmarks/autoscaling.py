"""`python -m benchmarks.autoscaling`: compares the estimate of wanted servers with the optimum found by simulation.

    workload --simulated with `present` servers--> rows, heartbeats --> ServerDemand --> estimate
    workload --simulated with 1 to MAX_SERVERS servers--> the fewest servers within WORTHWHILE of the fastest

The estimate uses only what a live run shows: the rows of its steps and its servers' heartbeats. The simulation
(docs/simulate.md, also the basis of `async-grpo tune`) knows the timings. No engine and no trainer runs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from async_grpo.lab.simulate.buffer import SimulatedBuffer
from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.results import SimulatedMetrics, summarize_run
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import Simulation, simulate
from async_grpo.lab.simulate.timings import EngineTimings, Timings, TrainerTimings
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.telemetry.bottleneck import WORTHWHILE
from async_grpo.telemetry.servers_wanted import ServerDemand
from async_grpo.wire.board import ServerBeat
from buffer.base import Batch

MAX_SERVERS = 16
STEPS = 60
SEED = 1
BEAT_S = 1.0
PRESENT = (1, 4)
"""Numbers of servers that a run has when the estimate is made."""


@dataclass(frozen=True, slots=True)
class ScaledWorkload:
    """A run to find the best number of servers for."""

    name: str
    max_staleness: int
    trainer: TrainerTimings
    engine: EngineTimings
    lengths: LengthModel
    slots: int = 64

    def settings(self, servers: int) -> SimulatedSettings:
        """Settings of a simulation with 16 groups of 8 samples per step."""
        policy = ReplayPolicy(StalenessWindow(self.max_staleness, 16, STEPS * 16))
        return SimulatedSettings(policy=policy, steps=STEPS, group_size=8, servers=servers, max_concurrency=self.slots)

    @property
    def timings(self) -> Timings:
        """Timings of the simulation."""
        return Timings(trainer=self.trainer, engine=self.engine, lengths=self.lengths)


_EVEN = LengthModel(kind="lognormal", mean=400, sigma=0.4, cap=2048)
_TAIL = LengthModel(kind="lognormal", mean=400, sigma=1.3, cap=8192)
_GPU = EngineTimings(step_s=0.02, request_s=0.0002)
_CPU = EngineTimings(step_s=0.004, request_s=0.002)
WORKLOADS = (
    ScaledWorkload("trainer-bound", 2, TrainerTimings(base_s=1, token_s=0.0005, variation=0.1), _GPU, _EVEN),
    ScaledWorkload("rollout-bound", 4, TrainerTimings(base_s=0.5, token_s=0.00008, variation=0.1), _GPU, _EVEN, 32),
    ScaledWorkload("window-bound (S = 0)", 0, TrainerTimings(base_s=1, token_s=0.0001), _GPU, _EVEN),
    ScaledWorkload("long tail", 1, TrainerTimings(base_s=1, token_s=0.0001), _GPU, _TAIL),
    ScaledWorkload("engine slowed by load", 2, TrainerTimings(base_s=1, token_s=0.0002), _CPU, _EVEN),
)


class WatchedBuffer(SimulatedBuffer):
    """A simulated buffer that records the completion lengths of each batch."""

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.lengths: list[list[float]] = []

    def release_batch(self, batch: Batch) -> None:
        """Record the lengths, then release the batch."""
        samples = []
        for record in batch.groups:
            samples += self.groups[record.seq].finished
        self.lengths.append([sample.generated_tokens for sample in samples])
        super().release_batch(batch)


class WatchedSimulation(Simulation):
    """A simulated run that sends the rows and heartbeats of a live run to a `ServerDemand`."""

    buffer: WatchedBuffer

    def __init__(self, workload: ScaledWorkload, servers: int) -> None:
        settings = workload.settings(servers)
        super().__init__(settings, workload.timings, seed=SEED, buffer_class=WatchedBuffer)
        self.demand = ServerDemand(
            settings.policy,
            started_samples=settings.samples_started_per_group,
            slots=settings.max_concurrency,
            streaming=settings.streaming,
        )
        self._generated = [0.0] * servers
        self.context.events.call_later(BEAT_S, self._send_heartbeats)

    def _send_heartbeats(self) -> None:
        now_s = self.context.events.now_s
        for number, server in enumerate(self.servers):
            server.engine.advance_to(now_s)
            rate = (server.engine.generated_tokens - self._generated[number]) / BEAT_S
            self._generated[number] = server.engine.generated_tokens
            running = server.engine.running
            beat = ServerBeat(name=server.name, pid=0, version=0, running=running, tokens_per_s=rate, time_s=now_s)
            self.demand.add_heartbeats([beat])
        self.context.events.call_later(BEAT_S, self._send_heartbeats)

    def run_and_measure_demand(self) -> ServerDemand:
        """Run to the end. Returns the demand measured from its rows and heartbeats."""
        for step, lengths in zip(self.run().steps, self.buffer.lengths, strict=True):
            mean = sum(lengths) / len(lengths)
            longest = max(lengths)
            row = {"step_s": step.step_s, "wait_s": step.wait_s, "staleness": step.staleness}
            self.demand.add_step(row | {"completion_tokens_mean": mean, "completion_tokens_max": longest})
        return self.demand


def estimate_servers(workload: ScaledWorkload, servers: int) -> int | None:
    """Return the estimate of wanted servers for a run of this workload with `servers` servers."""
    return WatchedSimulation(workload, servers).run_and_measure_demand().estimate_servers(MAX_SERVERS)


def simulate_workload(workload: ScaledWorkload, servers: int) -> SimulatedMetrics:
    """Simulate the workload with `servers` servers."""
    return summarize_run(simulate(workload.settings(servers), workload.timings, seed=SEED))


def fewest_sufficient(results: Sequence[SimulatedMetrics]) -> int:
    """Return the fewest servers whose step is within WORTHWHILE of the last result; results are for 1, 2, 3 ..."""
    max_step_s = results[-1].step_s * (1 + WORTHWHILE)
    return next(servers for servers, result in enumerate(results, start=1) if result.step_s <= max_step_s)


def random_workloads(count: int, seed: int) -> list[ScaledWorkload]:
    """Draw workloads to which nothing was fitted."""
    generator = random.Random(seed)
    workloads: list[ScaledWorkload] = []
    for number in range(count):
        step_s = generator.choice([0.005, 0.01, 0.03])
        busy_s = generator.choice([0.2, 1.0, 3.0, 10.0, 30.0])
        engine = EngineTimings(step_s=step_s, request_s=step_s * generator.choice([0.003, 0.01, 0.03, 0.1]))
        trainer = TrainerTimings(base_s=0.2 * busy_s, token_s=0.8 * busy_s / 60_000, variation=0.1)
        lengths = LengthModel(kind="lognormal", mean=400, sigma=generator.choice([0.3, 0.7, 1.2]), cap=6000)
        staleness = generator.choice([0, 1, 2, 4, 8])
        slots = generator.choice([16, 32, 64, 128])
        name = f"random {number}: S = {staleness}"
        workloads.append(ScaledWorkload(name, staleness, trainer, engine, lengths, slots))
    return workloads


def main() -> None:
    """Print the table of the named workloads, or of random ones."""
    parser = argparse.ArgumentParser(description="Compare the estimate of wanted servers with simulations.")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="use N random workloads instead")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workloads: Sequence[ScaledWorkload] = WORKLOADS
    if arguments.random:
        workloads = random_workloads(arguments.random, arguments.seed)

    title = f"servers wanted, of 1 to {MAX_SERVERS}: the fewest within {WORTHWHILE:.0%} of the speed of {MAX_SERVERS}"
    table = Table(title=title)
    seconds = ("step with 1", "with the gauge's", "with the simulation's", f"with {MAX_SERVERS}")
    for column in ("workload", "gauge, having 1", "having 4", "simulation", *seconds):
        table.add_column(column)

    excess: list[int] = []
    losses: list[float] = []
    for workload in workloads:
        results = [simulate_workload(workload, servers) for servers in range(1, MAX_SERVERS + 1)]
        estimates = [estimate_servers(workload, servers) or 1 for servers in PRESENT]
        best = fewest_sufficient(results)
        steps_s = [results[servers - 1].step_s for servers in (1, estimates[0], best, MAX_SERVERS)]
        counts = [str(count) for count in (*estimates, best)]
        table.add_row(workload.name, *counts, *(f"{step_s:.2f} s" for step_s in steps_s))
        excess.append(estimates[0] - best)
        losses.append(steps_s[1] / steps_s[3] - 1)

    console = Console(width=120)
    console.print(table)
    console.print(f"{sum(map(abs, excess)) / len(excess):.1f} servers off in the mean, at most {max(map(abs, excess))}")
    mean_loss = sum(losses) / len(losses)
    console.print(f"slower than with {MAX_SERVERS}: {mean_loss:.1%} in the mean, at most {max(losses):.1%}")


if __name__ == "__main__":
    main()

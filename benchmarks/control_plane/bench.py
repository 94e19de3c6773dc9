"""Benchmark of the control plane: how many rollout servers one buffer, one run board and one publisher can serve.

    trainer without a model --take, publish, release--> Valkey <--admit, insert, beat-- N RolloutServers
           `--- ZmqWeightSender --announcements--> receivers --> engines that replay timings

Servers, dispatchers, buffer, board, announcements and receivers are real. Engines, rewards and training steps are not,
so that a thousand servers fit on one machine. Their processes share its cores with Valkey. So the results contain both
the throughput of the whole here, compared with the same engines alone, and the CPU time per group of each part, from
which the capacity of one Valkey on a dedicated core follows.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.progress import Progress
from rich.table import Table

from async_grpo.lab.bench.measure import (
    Machine,
    Measurement,
    add_progress_bar,
    format_value,
    measure_load_average,
    measurement_table,
)
from async_grpo.lab.bench.rig import bench_server
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import BufferTimings, EngineTimings, SyncTimings, Timings, TrainerTimings
from async_grpo.telemetry.logging import configure_logging
from benchmarks.control_plane.replay import PROMPT, ReplayPlan, percentile
from benchmarks.control_plane.round import RoundResult, run_round

LENGTH_COUNT = 4096
SLOTS = 16
QUICK_SLOTS = 4
QUICK_S = 2.0
LENGTHS = LengthModel(kind="lognormal", mean=256, sigma=0.8, cap=1024)
QUICK_TOKEN_S = 0.0005
MEMORY_BYTES = 4 << 30
MIN_BARE_RATIO = 0.9
"""Rounds below this fraction of the bare engines' rate are not used to fit the costs."""
BARE = "the same engines alone"
_LATENCIES = {"admit_s": "admission", "insert_s": "insert", "late_s": "heartbeats late by"}


async def measure(
    progress: Progress,
    *,
    quick: bool,
    servers: Sequence[int],
    faster: Sequence[int],
    seconds: float,
    token_ms: float,
    source: Path | None,
    write_timings: Path | None,
) -> list[Measurement]:
    """Run one round per number of servers, and one with the smallest number per factor in `faster`.

    A factor multiplies the token speed. `write_timings` is the file for the costs that `async-grpo simulate` reads.
    Raises ConfigError, RoleFailed, WaitTimeout, BufferFault.
    """
    configure_logging("bench")
    slots = QUICK_SLOTS if quick else SLOTS
    if source is not None:
        lengths, token_s = _read_recorded_lengths(source, slots)
    else:
        lengths = _draw_lengths(LENGTHS)
        token_s = token_ms / 1e3
    if quick:
        servers = [2, 4]
        faster = []
        seconds = QUICK_S
        token_s = QUICK_TOKEN_S

    rounds = [(size, 1) for size in servers] + [(min(servers), factor) for factor in faster]
    step = add_progress_bar(progress, "rounds", len(rounds))
    measurements: list[Measurement] = []
    results: list[RoundResult] = []
    for size, factor in rounds:
        result = await _run_round(size, lengths, token_s / factor, slots, seconds)
        results.append(result)
        measurements += measure_round(result, factor)
        step()

    costs = fit_costs(results)
    if write_timings is not None:
        make_timings(lengths, token_s, costs).write(write_timings)
    return [*measurements, *measure_capacity(costs, max(servers)), measure_load_average()]


async def _run_round(servers: int, lengths: list[int], token_s: float, slots: int, seconds: float) -> RoundResult:
    """Run a round on a new Valkey."""
    with (
        tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder,
        bench_server(None, memory_bytes=MEMORY_BYTES) as redis,
    ):
        run = f"bench-{uuid.uuid4().hex}"
        plan = ReplayPlan(run, folder, redis.url or "", servers, lengths, token_s, slots)
        return await run_round(plan, seconds)


def _read_recorded_lengths(source: Path, slots: int) -> tuple[list[int], float]:
    """Return a recorded run's completion lengths, and its seconds per token with all slots busy. Raises ConfigError."""
    from async_grpo.lab.simulate.prediction import calibrate_and_check
    from async_grpo.lab.simulate.recorded import read_recorded

    timings, _ = calibrate_and_check([read_recorded(source)])
    return _draw_lengths(timings.lengths), timings.engine.step_s + slots * timings.engine.request_s


def _draw_lengths(lengths: LengthModel) -> list[int]:
    return [int(length) for length in lengths.draw_groups(np.random.default_rng(1), LENGTH_COUNT, 1)[:, 0]]


def measure_round(result: RoundResult, factor: int) -> Iterator[Measurement]:
    """Yield the measurements of a round with `factor` times the token speed."""
    name = f"{result.plan.servers} servers"
    if factor != 1:
        name += f", tokens {factor} times as fast"
    groups = result.groups_per_s
    before = result.before
    after = result.after
    yield Measurement(f"{name}: inserted", groups, "groups/s", result.bare_per_s, BARE, groups / result.bare_per_s)

    latencies_s = {label: result.collect(field) for field, label in _LATENCIES.items()}
    latencies_s["published to applied"] = result.applied_s
    for label, values_s in latencies_s.items():
        yield Measurement(f"{name}: {label}, median", 1e3 * percentile(values_s, 0.5), "ms")
        yield Measurement(f"{name}: {label}, p99", 1e3 * percentile(values_s, 0.99), "ms")

    yield Measurement(f"{name}: servers that the board knows", after.servers, "", result.plan.servers, "started")
    yield Measurement(f"{name}: commands to Valkey", (after.commands - before.commands) / result.seconds, "1/s")
    yield Measurement(f"{name}: connections to Valkey", after.connections, "")
    cpu_times_s = {
        "Valkey": after.redis_cpu_s - before.redis_cpu_s,
        "all servers": sum(report.cpu_s for report in result.reports),
        "the trainer's end": after.trainer_cpu_s - before.trainer_cpu_s,
    }
    for part, cpu_s in cpu_times_s.items():
        yield Measurement(f"{name}: CPU time of {part}", 1e3 * cpu_s / (groups * result.seconds), "ms/group")
        yield Measurement(f"{name}: cores of {part}", cpu_s / result.seconds, "cores")


def fit_costs(results: Sequence[RoundResult]) -> BufferTimings:
    """Fit Valkey's cost of a group and of a server by non-negative least squares.

        CPU seconds per second = a * groups/s + b * servers

    Rounds in which the machine could not keep up are left out, because late servers call Valkey less often.
    """
    from scipy.optimize import nnls

    usable = [result for result in results if result.groups_per_s >= MIN_BARE_RATIO * result.bare_per_s]
    if not usable:
        usable = list(results)
    rows = [[result.groups_per_s, result.plan.servers] for result in usable]
    cpu_shares = [(result.after.redis_cpu_s - result.before.redis_cpu_s) / result.seconds for result in usable]
    (group_s, server_share), _ = nnls(np.array(rows, float), np.array(cpu_shares))

    # Two exchanges per group: one to admit it, one to insert it.
    return BufferTimings(exchange_s=round(float(group_s) / 2, 7), server_share=round(float(server_share), 7))


def make_timings(lengths: Sequence[int], token_s: float, costs: BufferTimings) -> Timings:
    """Return simulator timings with the replayed engine and the buffer's costs; everything else takes no time."""
    return Timings(
        source="python -m benchmarks.control_plane",
        prompt_tokens=len(PROMPT),
        lengths=LengthModel(kind="recorded", recorded=[[length] for length in lengths], cap=max(lengths)),
        engine=EngineTimings(step_s=token_s, request_s=0.0, prefill_s=0.0, call_s=0.0),
        trainer=TrainerTimings(base_s=0.0, token_s=0.0),
        sync=SyncTimings(stall_s=0.0, transfer_s=0.0, load_s=0.0),
        buffer=costs,
    )


def measure_capacity(costs: BufferTimings, servers: int) -> Iterator[Measurement]:
    """Yield the costs, and the capacity of one Valkey with a dedicated core that serves `servers` servers."""
    yield Measurement("Valkey's CPU time: a group", 2e3 * costs.exchange_s, "ms")
    yield Measurement("Valkey's CPU time: a server, each second", 1e3 * costs.server_share, "ms")
    remaining_share = max(0.0, 1 - servers * costs.server_share)
    groups_per_s = remaining_share / (2 * costs.exchange_s) if costs.exchange_s else 0.0
    yield Measurement(f"one core of Valkey carries beside the heartbeats of {servers}", groups_per_s, "groups/s")


def render(title: str, measurements: Sequence[Measurement], machine: Machine) -> RenderableType:
    """Render a table with one column per round, and below it the measurements that belong to no round."""
    by_name: dict[str, Measurement] = {}
    for measurement in measurements:
        if " servers" in measurement.name.partition(": ")[0]:
            by_name[measurement.name] = measurement
    round_names = dict.fromkeys(name.split(": ")[0] for name in by_name)
    row_names = dict.fromkeys(name.split(": ")[1] for name in by_name)

    rounds = Table(title=title, caption=f"in brackets the ratio to {BARE}", caption_justify="left")
    rounds.add_column("")
    for round_name in round_names:
        rounds.add_column(round_name, justify="right")
    for row_name in row_names:
        cells = [by_name[f"{round_name}: {row_name}"] for round_name in round_names]
        rounds.add_row(f"{row_name} {cells[0].unit}".strip(), *(_cell_text(cell) for cell in cells))

    others = [measurement for measurement in measurements if measurement.name not in by_name]
    return Group(rounds, measurement_table("", others, machine))


def _cell_text(measurement: Measurement) -> str:
    text = format_value(measurement.value)
    if measurement.ratio is not None:
        text += f" ({measurement.ratio:.2f})"
    return text

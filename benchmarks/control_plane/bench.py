"""The bench of the control plane: how many rollout servers one buffer, one board and one publisher can serve.

    trainer without a model --take, publish, release--> Valkey <--admit, insert, beat-- N RolloutServers
           `--- ZmqWeightSender --announcements--> receivers --> engines that replay timings

Servers, dispatchers, buffer, board, announcements and receivers are real. Engines, verdicts and training steps are not,
so that one machine has room for a thousand servers. Their processes share its cores with Valkey; so the figures say
both what all of it reached here, beside the same engines alone, and the CPU time that a group costs each part, from
which follows what one Valkey on a core of its own carries.
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

from async_grpo.lab.bench.measure import Machine, Measurement, final_load, progress_bar, short, table
from async_grpo.lab.bench.rig import bench_server
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import BufferTimings, EngineTimings, SyncTimings, Timings, TrainerTimings
from async_grpo.telemetry.logging import configure_logging
from benchmarks.control_plane.replay import PROMPT, ReplayPlan, percentile
from benchmarks.control_plane.round import RoundResult, play_round

DRAWN = 4096
SLOTS, QUICK_SLOTS = 16, 4
QUICK_S = 2.0
LENGTHS = LengthModel(kind="lognormal", mean=256, sigma=0.8, cap=1024)
QUICK_TOKEN_S = 0.0005
MEMORY_BYTES = 4 << 30
KEPT_UP = 0.9
"""Share of the engines' own rate from which on a round counts for the costs."""
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
    """All figures: a round for each number of servers, and one with the smallest number for each factor of `faster`, by
    which tokens come faster than recorded. `write_timings` gets what `async-grpo simulate` needs of them.

    Raises ConfigError, RoleFailed, WaitTimeout, BufferFault.
    """
    configure_logging("bench")
    slots = QUICK_SLOTS if quick else SLOTS
    lengths, token_s = _replayed(source, slots) if source is not None else (_drawn(LENGTHS), token_ms / 1e3)
    if quick:
        servers, faster, seconds, token_s = [2, 4], [], QUICK_S, QUICK_TOKEN_S
    rounds = [(size, 1) for size in servers] + [(min(servers), factor) for factor in faster]
    step = progress_bar(progress, "rounds", len(rounds))
    figures, results = list[Measurement](), list[RoundResult]()
    for size, factor in rounds:
        results.append(await _round(size, lengths, token_s / factor, slots, seconds))
        figures += figures_of(results[-1], factor)
        step()
    costs = costs_of(results)
    if write_timings is not None:
        timings_of(lengths, token_s, costs).write(write_timings)
    return [*figures, *carried(costs, max(servers)), final_load()]


async def _round(servers: int, lengths: list[int], token_s: float, slots: int, seconds: float) -> RoundResult:
    """A round on a Valkey of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder,
        bench_server(None, memory_bytes=MEMORY_BYTES) as redis,
    ):
        run = f"bench-{uuid.uuid4().hex}"
        plan = ReplayPlan(run, folder, redis.url or "", servers, lengths, token_s, slots)
        return await play_round(plan, seconds)


def _replayed(source: Path, slots: int) -> tuple[list[int], float]:
    """Lengths to draw from, and the seconds of a token with all slots busy. Raises ConfigError."""
    from async_grpo.lab.simulate.prediction import calibrated
    from async_grpo.lab.simulate.recorded import read_recorded

    timings, _ = calibrated([read_recorded(source)])
    return _drawn(timings.lengths), timings.engine.step_s + slots * timings.engine.request_s


def _drawn(lengths: LengthModel) -> list[int]:
    return [int(length) for length in lengths.groups(np.random.default_rng(1), DRAWN, 1)[:, 0]]


def figures_of(result: RoundResult, factor: int) -> Iterator[Measurement]:
    """The rows of a round."""
    name = f"{result.plan.servers} servers" + (f", tokens {factor} times as fast" if factor != 1 else "")
    groups, before, after = result.groups_per_s, result.before, result.after
    yield Measurement(f"{name}: inserted", groups, "groups/s", result.bare_per_s, BARE, groups / result.bare_per_s)
    latencies = {word: result.noted(field) for field, word in _LATENCIES.items()}
    for word, values in {**latencies, "published to applied": result.applied_s}.items():
        yield Measurement(f"{name}: {word}, median", 1e3 * percentile(values, 0.5), "ms")
        yield Measurement(f"{name}: {word}, p99", 1e3 * percentile(values, 0.99), "ms")
    yield Measurement(f"{name}: servers that the board knows", after.servers, "", result.plan.servers, "started")
    yield Measurement(f"{name}: commands to Valkey", (after.commands - before.commands) / result.seconds, "1/s")
    yield Measurement(f"{name}: connections to Valkey", after.connections, "")
    spent = {
        "Valkey": after.redis_cpu_s - before.redis_cpu_s,
        "all servers": sum(report.cpu_s for report in result.reports),
        "the trainer's end": after.trainer_cpu_s - before.trainer_cpu_s,
    }
    for part, cpu_s in spent.items():
        yield Measurement(f"{name}: CPU time of {part}", 1e3 * cpu_s / (groups * result.seconds), "ms/group")
        yield Measurement(f"{name}: cores of {part}", cpu_s / result.seconds, "cores")


def costs_of(results: Sequence[RoundResult]) -> BufferTimings:
    """What a group and a server cost Valkey: CPU seconds a second = a * groups/s + b * servers, by least squares.
    Rounds in which the machine could not keep up do not count: late servers repeat less."""
    from scipy.optimize import nnls

    kept_up = [result for result in results if result.groups_per_s >= KEPT_UP * result.bare_per_s] or results
    rows = [[result.groups_per_s, result.plan.servers] for result in kept_up]
    spent = [(result.after.redis_cpu_s - result.before.redis_cpu_s) / result.seconds for result in kept_up]
    (group_s, server_share), _ = nnls(np.array(rows, float), np.array(spent))
    return BufferTimings(exchange_s=round(float(group_s) / 2, 7), server_share=round(float(server_share), 7))


def timings_of(lengths: Sequence[int], token_s: float, costs: BufferTimings) -> Timings:
    """The replayed timings with the buffer's costs, and nothing else that would take time."""
    return Timings(
        source="python -m benchmarks.control_plane",
        prompt_tokens=len(PROMPT),
        lengths=LengthModel(kind="recorded", recorded=[[length] for length in lengths], cap=max(lengths)),
        engine=EngineTimings(step_s=token_s, request_s=0.0, prefill_s=0.0, call_s=0.0),
        trainer=TrainerTimings(base_s=0.0, token_s=0.0),
        sync=SyncTimings(stall_s=0.0, transfer_s=0.0, load_s=0.0),
        buffer=costs,
    )


def carried(costs: BufferTimings, servers: int) -> Iterator[Measurement]:
    """What follows from the costs for one Valkey that has a core for itself."""
    yield Measurement("Valkey's CPU time: a group", 2e3 * costs.exchange_s, "ms")
    yield Measurement("Valkey's CPU time: a server, each second", 1e3 * costs.server_share, "ms")
    left = max(0.0, 1 - servers * costs.server_share)
    carries = left / (2 * costs.exchange_s) if costs.exchange_s else 0.0
    yield Measurement(f"one core of Valkey carries beside the heartbeats of {servers}", carries, "groups/s")


def view(title: str, figures: Sequence[Measurement], machine: Machine) -> RenderableType:
    """A column for each round, and below the figures that belong to none."""
    by_name = {figure.name: figure for figure in figures if " servers" in figure.name.partition(": ")[0]}
    rounds, rows = (dict.fromkeys(name.split(": ")[place] for name in by_name) for place in (0, 1))
    shown = Table(title=title, caption=f"in brackets the ratio to {BARE}", caption_justify="left")
    shown.add_column("")
    for name in rounds:
        shown.add_column(name, justify="right")
    for row in rows:
        cells = [by_name[f"{name}: {row}"] for name in rounds]
        texts = (short(cell.value) + (f" ({cell.ratio:.2f})" if cell.ratio is not None else "") for cell in cells)
        shown.add_row(f"{row} {cells[0].unit}".strip(), *texts)
    return Group(shown, table("", [figure for figure in figures if figure.name not in by_name], machine))

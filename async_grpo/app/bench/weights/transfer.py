"""A whole model to one receiver, and how long the trainer stands still for it.

    ours    publish: copy into the store | hash, announce, fetch, verify, commit: the receiver holds it
    baselines                               | the bytes of that store into another shared memory

The model is changed in every chunk before every round, and a round has each of them, and the memcpy, once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from async_grpo.app.bench.measure import Measurement, Step, Stopwatch
from async_grpo.app.bench.weights.baselines import TransferBaseline, disk, gloo, tcp
from async_grpo.app.bench.weights.plane import WARM_UPS, BenchPlane, Moved, TinyModelSize, Weights, bench_plane
from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.shared_memory import allocate
from async_grpo.weights.store import WeightStore

Bytes = npt.NDArray[np.uint8]

CONFIG = WeightsConfig(encoding="dense")
BASELINES = {
    "tcp": "TCP loop, sendall to recv_into",
    "gloo": "gloo broadcast, one flat tensor",
    "disk": "safetensors, save and load",
}


@dataclass(frozen=True, slots=True)
class TransferRound:
    """What one round took, in seconds; fields with `cpu` are processor time."""

    moved: Moved
    fetch_s: float
    """The part of the move from the manifest to the commit."""
    cpu_s: float
    memcpy_s: float
    baselines_s: dict[str, float]
    tcp_cpu_s: float


async def transfer(size: TinyModelSize, rounds: int, step: Step) -> list[Measurement]:
    """Throughput beside each baseline, and the stall beside a memcpy; medians of `rounds` rounds."""
    weights = Weights(size.layout())
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(bench_plane("transfer", weights.layout, CONFIG, 1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-grpo-bench-")))
        target = plane.publisher.store.with_name("baseline")
        _, memory = allocate(target, weights.layout.total_bytes)
        baselines = {
            "tcp": await stack.enter_async_context(tcp(target)),
            "gloo": await stack.enter_async_context(gloo(target, folder)),
            "disk": await stack.enter_async_context(disk(target, folder, weights.layout)),
        }
        copy = np.frombuffer(memory, np.uint8, weights.layout.total_bytes)
        measured = []
        for _ in range(WARM_UPS + rounds):
            measured.append(await _round(plane, weights, baselines, copy))
            step()
        waits_s = [await _wait_for_the_encoder(plane, weights) for _ in range(rounds)]
    return _figures(weights.layout.total_bytes, measured[WARM_UPS:], waits_s)


async def _round(
    plane: BenchPlane, weights: Weights, baselines: dict[str, TransferBaseline], copy: Bytes
) -> TransferRound:
    weights.touch(CONFIG.chunk_bytes)
    memcpy_s = _memcpy(copy, weights.flat)
    with _processor_time(plane.process_ids) as ours:
        moved = await plane.move(weights)
    memcpy_s = (memcpy_s + _memcpy(copy, weights.flat)) / 2
    block = WeightStore.adopt(plane.publisher.store).snapshot(WeightVersion(0, plane.version)).block
    with _processor_time(baselines["tcp"].process_ids) as theirs:
        took_s = {"tcp": await baselines["tcp"].seconds(block)}
    for name in ("gloo", "disk"):
        took_s[name] = await baselines[name].seconds(block)
    return TransferRound(
        moved, plane.receivers[0].stats.last_transfer_s, ours.seconds, memcpy_s, took_s, theirs.seconds
    )


async def _wait_for_the_encoder(plane: BenchPlane, weights: Weights) -> float:
    """Seconds that the trainer waits if the next version follows at once."""
    weights.touch(CONFIG.chunk_bytes)
    plane.publish(weights)
    weights.touch(CONFIG.chunk_bytes)
    return (await plane.move(weights)).publication.waited_s


def _memcpy(target: Bytes, source: Bytes) -> float:
    with Stopwatch() as spent:
        np.copyto(target, source)
    return spent.seconds


def _processor_time(processes: Sequence[int]) -> Stopwatch:
    """A stopwatch over the processor time of these processes.

    Linux numbers the clock of a process like this (clock_getcpuclockid); /proc counts in 10 ms only.
    """
    return Stopwatch(lambda: sum(time.clock_gettime((~process << 3) | 2) for process in processes))


def _figures(total_bytes: int, rounds: Sequence[TransferRound], waits_s: Sequence[float]) -> list[Measurement]:
    gigabytes, paired = total_bytes / 1e9, Measurement.paired
    name = f"dense, {gigabytes:.2f} GB to one receiver"

    def speeds(ours_s: Sequence[float], other: str) -> list[tuple[float, float]]:
        pairs = zip(ours_s, rounds, strict=True)
        return [(gigabytes / own_s, gigabytes / each.baselines_s[other]) for own_s, each in pairs]

    moves_s = [each.moved.seconds for each in rounds]
    fetches = speeds([each.fetch_s for each in rounds], "tcp")
    costs = [(each.cpu_s / gigabytes, each.tcp_cpu_s / gigabytes) for each in rounds]
    stalls_ms = [(1e3 * each.moved.publication.stall_s, 1e3 * each.memcpy_s) for each in rounds]
    waits_inside_s = median(each.moved.publication.waited_s for each in rounds)
    return [
        *(paired(f"{name}, beside {other}", "GB/s", speeds(moves_s, other), is_) for other, is_ in BASELINES.items()),
        paired(f"{name}, from manifest to commit", "GB/s", fetches, BASELINES["tcp"]),
        paired(f"{name}, processor time, both ends", "s/GB", costs, BASELINES["tcp"]),
        paired("trainer's stall for one version", "ms", stalls_ms, "one memcpy of the weights"),
        Measurement("of it, waiting for the encoder", 1e3 * waits_inside_s, "ms"),
        Measurement("waiting for the encoder, a version right after another", 1e3 * median(waits_s), "ms"),
    ]

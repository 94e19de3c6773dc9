"""Benchmark of weight transfer: real publisher and receiver processes, shared memory, loopback.

- transfer   a whole model to one receiver, compared with a TCP loop, gloo and a file (`baselines`)
- copy       one version into the store in one thread, compared with one memcpy of the weights
- patches    size of the patches after AdamW steps (`training`), and cost of the codec. Rates are per core: bytes of the
             dense chunks per second of CPU time. A memcpy of the same chunks is timed in the same way
- locations  versions through a folder, and a bucket if one is set, dense and as patches (`locations`)
- ranks      a model that several ranks publish to two engines, and the trainer's stall (`ranks`)
- engine     transfer, pause and load of a real engine, compared with a checkpoint folder (`engine_updates`)
- fanout     four and eight receivers, through relays and directly: bytes that the trainer sends, and time until all
             receivers have the version. Both setups run in parallel and publish in turns, so that other load on the
             machine affects both

    relays      trainer --> 2 receivers --> 2 each --> ...
    direct      trainer --> every receiver

The tensors have the shapes of a Qwen2.5 model (`plane`). Everything runs on one machine, so a relay saves the trainer's
egress but no time: on several machines it would relieve the trainer's network card.

One round of `transfer`, with a change in every chunk before it:

    ours        publish: copy into the store | hash, announce, fetch, verify, commit: the receiver has it
    baselines                                | copy the bytes of that store into another shared memory
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
from rich.progress import Progress

from async_grpo.config.model import TinyQwen2Config
from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt
from async_grpo.lab.bench.measure import Measurement, Step, Stopwatch, add_progress_bar
from async_grpo.lab.bench.rollout.bench import LARGE, TINY
from async_grpo.telemetry.logging import configure_logging
from async_grpo.weights import delta
from async_grpo.weights.chunks import cut_into_chunks
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.shared_memory import allocate_file
from async_grpo.weights.store import WeightStore
from benchmarks.weights.baselines import TransferBaseline, disk, gloo, tcp
from benchmarks.weights.engine_updates import EnginePlatform, update_engine
from benchmarks.weights.locations import measure_locations
from benchmarks.weights.plane import WARM_UPS, BenchPlane, TinyModelSize, Transfer, Weights, bench_plane
from benchmarks.weights.ranks import publish_from_ranks
from benchmarks.weights.training import TIMED_LR, Training

WARM_UP_STEPS = 10
LEARNING_RATES = (TIMED_LR, 3e-6, 1e-5)
DELTA = WeightsConfig(encoding="delta")
DENSE = WeightsConfig(encoding="dense")
FANOUT = 2
RELAYS = WeightsConfig(encoding="dense", fanout=FANOUT)
DIRECT = WeightsConfig(encoding="dense", fanout=0)
DIRECT_NAME = "the trainer sends to each"
RECEIVERS = (4, 8)
RANKS = (2, 4)
Bytes = npt.NDArray[np.uint8]

BASELINES = {
    "tcp": "TCP loop, sendall to recv_into",
    "gloo": "gloo broadcast, one flat tensor",
    "disk": "safetensors, save and load",
}


@dataclass(frozen=True, slots=True)
class WeightsBenchSize:
    """Model sizes and numbers of rounds."""

    whole: TinyModelSize
    rounds: int
    part: TinyModelSize
    part_rounds: int
    layers: int
    """Number of layers of the Qwen2.5-1.5B that several ranks publish."""
    ranks_rounds: int
    engine: TinyQwen2Config
    engine_rounds: int


FULL = WeightsBenchSize(
    TinyModelSize(layers=27, vocab=151_936), 7, TinyModelSize(layers=4, vocab=8192), 5, 28, 5, LARGE, 5
)
"""1.08 GB with the shapes of Qwen2.5-0.5B and three more layers; 134 MB; 3.09 GB of Qwen2.5-1.5B; 111 MB."""
QUICK = WeightsBenchSize(
    TinyModelSize(layers=1, vocab=512, hidden=448), 1, TinyModelSize(layers=1, vocab=512, hidden=448), 1, 2, 1, TINY, 1
)


async def measure(
    progress: Progress, *, quick: bool, engine: EnginePlatform = "cpu", bucket: str | None = None
) -> list[Measurement]:
    """Run all benchmarks.

    `quick` only shows that they work. `engine` is the platform of the engine to update; "none" skips it. `bucket` is
    the URL of a bucket to send versions through, too.
    """
    configure_logging("bench")
    sizes = QUICK if quick else FULL
    measurements: list[Measurement] = []
    if engine != "none":  # first, so that a missing vLLM is reported before minutes of other measurements
        step = add_progress_bar(progress, "an engine that generates", WARM_UPS + sizes.engine_rounds)
        measurements += await update_engine(sizes.engine, engine, sizes.engine_rounds, step)

    step = add_progress_bar(progress, "a whole model to one receiver", WARM_UPS + sizes.rounds)
    measurements += await measure_transfer(sizes.whole, sizes.rounds, step)

    step = add_progress_bar(progress, "patches", WARM_UP_STEPS + sizes.part_rounds)
    measurements += await measure_patches(sizes.part, sizes.part_rounds, step)

    locations = 1 if bucket is None else 2
    step = add_progress_bar(progress, "through a folder or a bucket", locations * (WARM_UPS + sizes.part_rounds))
    measurements += await measure_locations(Training(sizes.part.layout()), bucket, sizes.part_rounds, step)

    for ranks in RANKS:
        step = add_progress_bar(progress, f"published by {ranks} ranks", WARM_UPS + sizes.ranks_rounds)
        measurements += await publish_from_ranks(ranks, sizes.layers, sizes.ranks_rounds, step)
    for receivers in RECEIVERS:
        step = add_progress_bar(progress, f"to {receivers} receivers", WARM_UPS + sizes.part_rounds)
        measurements += await measure_fanout(sizes.part, receivers, sizes.part_rounds, step)
    return measurements


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Cost of one optimizer step's patches on one core."""

    ratio: float
    """Size of the dense chunks divided by the size of the patches."""
    encode_s: float
    decode_s: float
    """Includes the copy of the base, as in a receiver."""
    memcpy_s: float


async def measure_patches(size: TinyModelSize, rounds: int, step: Step) -> list[Measurement]:
    """Measure patch sizes at several learning rates, and codec speed and transfer time at the first of them."""
    training = Training(size.layout())
    weights = training.weights
    for _ in range(WARM_UP_STEPS):
        training.step(TIMED_LR)
        step()

    costs: list[CodecCost] = []
    transfers_ms: list[tuple[float, float]] = []
    async with (
        bench_plane("delta", weights.layout, DELTA, 1) as patched,
        bench_plane("dense", weights.layout, DENSE, 1) as dense,
    ):
        for plane in (patched, dense):
            await plane.transfer(weights)
        for _ in range(rounds):
            costs.append(_measure_codec(training, TIMED_LR))
            patched_s = (await patched.transfer(weights)).seconds
            dense_s = (await dense.transfer(weights)).seconds
            transfers_ms.append((1e3 * patched_s, 1e3 * dense_s))
            step()

    gigabytes = weights.layout.total_bytes / 1e9
    measurements: list[Measurement] = []
    for lr in LEARNING_RATES:
        ratio = _measure_codec(training, lr).ratio if lr != TIMED_LR else median(cost.ratio for cost in costs)
        measurements.append(Measurement(f"AdamW, lr {lr:g}: patches are smaller than dense", ratio, "times"))

    name = f"AdamW, lr {TIMED_LR:g}"
    memcpy = "memcpy of the same chunks"
    encoding = [(gigabytes / cost.encode_s, gigabytes / cost.memcpy_s) for cost in costs]
    decoding = [(gigabytes / cost.decode_s, gigabytes / cost.memcpy_s) for cost in costs]
    return [
        *measurements,
        Measurement.paired(f"{name}: encoding, one core", "GB/s", encoding, memcpy),
        Measurement.paired(f"{name}: decoding, one core", "GB/s", decoding, memcpy),
        Measurement.paired(f"{name}: {gigabytes:.2f} GB to one receiver", "ms", transfers_ms, "the same, dense"),
    ]


def _measure_codec(training: Training, lr: float) -> CodecCost:
    """Take one optimizer step, and encode and decode it. Raises WeightsCorrupt if the result differs."""
    base = training.weights.flat.copy()
    training.step(lr)
    new = training.weights.flat
    block = base.copy()
    chunks = cut_into_chunks(training.weights.layout, DELTA.chunk_bytes)
    with Stopwatch(time.thread_time) as memcpy:
        for chunk in chunks:
            chunk.view(block.data)[:] = chunk.view(base.data)
    with Stopwatch(time.thread_time) as encoding:
        encoded = [delta.make_patch(chunk.view(base.data), chunk.view(new.data), chunk.item_bytes) for chunk in chunks]
    with Stopwatch(time.thread_time) as decoding:
        for chunk, patch in zip(chunks, encoded, strict=True):
            chunk.view(block.data)[:] = chunk.view(base.data)
            delta.apply_patch(chunk.view(block.data), patch)
    if not np.array_equal(block, new):
        raise WeightsCorrupt("the decoded weights differ from the encoded ones: the codec is broken.")
    return CodecCost(new.nbytes / sum(map(len, encoded)), encoding.seconds, decoding.seconds, memcpy.seconds)


async def measure_fanout(size: TinyModelSize, receivers: int, rounds: int, step: Step) -> list[Measurement]:
    """Measure time and egress with relays and without; medians of `rounds` pairs."""
    weights = Weights(size.layout())
    copies: list[tuple[float, float]] = []
    times_ms: list[tuple[float, float]] = []
    async with (
        bench_plane("relays", weights.layout, RELAYS, receivers) as relays,
        bench_plane("direct", weights.layout, DIRECT, receivers) as direct,
    ):
        for _ in range(WARM_UPS + rounds):
            weights.change_every_chunk(RELAYS.chunk_bytes)
            relayed_copies, relayed_s = await _publish_to_all(relays, weights)
            direct_copies, direct_s = await _publish_to_all(direct, weights)
            copies.append((relayed_copies, direct_copies))
            times_ms.append((1e3 * relayed_s, 1e3 * direct_s))
            step()
    name = f"{weights.layout.total_bytes / 1e9:.2f} GB to {receivers} receivers, fanout {FANOUT}"
    return [
        Measurement.paired(f"{name}: the trainer sends", "copies", copies[WARM_UPS:], DIRECT_NAME),
        Measurement.paired(f"{name}: until all have it", "ms", times_ms[WARM_UPS:], DIRECT_NAME),
    ]


async def _publish_to_all(plane: BenchPlane, weights: Weights) -> tuple[float, float]:
    """Publish one version. Returns the copies of it that the trainer sent, and the seconds until all received it."""
    before_bytes = plane.publisher.fetch_stats().served_bytes
    transfer = await plane.transfer(weights)
    sent_bytes = plane.publisher.fetch_stats().served_bytes - before_bytes
    return sent_bytes / weights.layout.total_bytes, transfer.seconds


@dataclass(frozen=True, slots=True)
class TransferRound:
    """Times of one round in seconds; `cpu` is CPU time."""

    transfer: Transfer
    fetch_s: float
    """Part of the transfer from the manifest to the commit."""
    cpu_s: float
    memcpy_s: float
    baselines_s: dict[str, float]
    tcp_cpu_s: float


async def measure_transfer(size: TinyModelSize, rounds: int, step: Step) -> list[Measurement]:
    """Compare throughput with each baseline, and the copy into the store with a memcpy; medians of `rounds` rounds."""
    weights = Weights(size.layout())
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(bench_plane("transfer", weights.layout, DENSE, 1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-grpo-bench-")))
        target = plane.publisher.store.with_name("baseline")
        _, memory = allocate_file(target, weights.layout.total_bytes)
        baselines = {
            "tcp": await stack.enter_async_context(tcp(target)),
            "gloo": await stack.enter_async_context(gloo(target, folder)),
            "disk": await stack.enter_async_context(disk(target, folder, weights.layout)),
        }
        copy = np.frombuffer(memory, np.uint8, weights.layout.total_bytes)
        results: list[TransferRound] = []
        for _ in range(WARM_UPS + rounds):
            results.append(await _run_round(plane, weights, baselines, copy))
            step()
        waits_s = [await _measure_encoder_wait(plane, weights) for _ in range(rounds)]
    return _summarize(weights.layout.total_bytes, results[WARM_UPS:], waits_s)


async def _run_round(
    plane: BenchPlane, weights: Weights, baselines: dict[str, TransferBaseline], copy: Bytes
) -> TransferRound:
    weights.change_every_chunk(DENSE.chunk_bytes)

    # A memcpy before and one after, so that a drift of the machine's speed cancels out.
    memcpy_s = _time_memcpy(copy, weights.flat)
    with _cpu_time(plane.process_ids) as own_cpu:
        transfer = await plane.transfer(weights)
    memcpy_s = (memcpy_s + _time_memcpy(copy, weights.flat)) / 2

    block = WeightStore.adopt(plane.publisher.store).snapshot(WeightVersion(0, plane.version)).block
    with _cpu_time(baselines["tcp"].process_ids) as tcp_cpu:
        baselines_s = {"tcp": await baselines["tcp"].time_transfer(block)}
    baselines_s["gloo"] = await baselines["gloo"].time_transfer(block)
    # The disk last: the kernel writes its data back in the background afterwards, which would slow the others down.
    baselines_s["disk"] = await baselines["disk"].time_transfer(block)

    fetch_s = plane.receivers[0].stats.last_transfer_s
    return TransferRound(transfer, fetch_s, own_cpu.seconds, memcpy_s, baselines_s, tcp_cpu.seconds)


async def _measure_encoder_wait(plane: BenchPlane, weights: Weights) -> float:
    """Seconds that the trainer waits if it publishes two versions in immediate succession."""
    weights.change_every_chunk(DENSE.chunk_bytes)
    plane.publish(weights)
    weights.change_every_chunk(DENSE.chunk_bytes)
    return (await plane.transfer(weights)).publication.waited_s


def _time_memcpy(target: Bytes, source: Bytes) -> float:
    with Stopwatch() as stopwatch:
        np.copyto(target, source)
    return stopwatch.seconds


def _cpu_time(processes: Sequence[int]) -> Stopwatch:
    """Stopwatch of the CPU time of these processes.

    The clock numbers are those of clock_getcpuclockid on Linux. /proc has a resolution of 10 ms only.
    """
    return Stopwatch(lambda: sum(time.clock_gettime((~process << 3) | 2) for process in processes))


def _summarize(total_bytes: int, rounds: Sequence[TransferRound], waits_s: Sequence[float]) -> list[Measurement]:
    gigabytes = total_bytes / 1e9
    name = f"dense, {gigabytes:.2f} GB to one receiver"
    paired = Measurement.paired

    transfer_s = median(result.transfer.seconds for result in rounds)
    fetch_s = median(result.fetch_s for result in rounds)
    measurements = [
        Measurement(f"{name}, from publish until everything is received", transfer_s, "s"),
        Measurement("of it, the transfer from manifest to commit", fetch_s, "s"),
    ]
    for baseline, description in BASELINES.items():
        speeds = [(gigabytes / result.transfer.seconds, gigabytes / result.baselines_s[baseline]) for result in rounds]
        measurements.append(paired(f"{name}, beside {baseline}", "GB/s", speeds, description))

    fetch_speeds = [(gigabytes / result.fetch_s, gigabytes / result.baselines_s["tcp"]) for result in rounds]
    cpu_costs = [(result.cpu_s / gigabytes, result.tcp_cpu_s / gigabytes) for result in rounds]
    copies_ms = [(1e3 * result.transfer.publication.stall_s, 1e3 * result.memcpy_s) for result in rounds]
    waited_s = median(result.transfer.publication.waited_s for result in rounds)
    return [
        *measurements,
        paired(f"{name}, from manifest to commit", "GB/s", fetch_speeds, BASELINES["tcp"]),
        paired(f"{name}, processor time, both ends", "s/GB", cpu_costs, BASELINES["tcp"]),
        paired("one version into the store, in one thread", "ms", copies_ms, "one memcpy of the weights"),
        Measurement("of it, waiting for the encoder", 1e3 * waited_s, "ms"),
        Measurement("waiting for the encoder, a version right after another", 1e3 * median(waits_s), "ms"),
    ]

"""The bench of the weight plane: real publisher and receiver processes, shared memory, loopback.

- transfer   a whole model to one receiver, beside a plain TCP loop, gloo and a file (`baselines`)
- copy       one version into the store, in one thread, beside one memcpy of the weights
- patches    what Adam leaves to send (`training`), and what encoding and decoding it costs. Rates are of one core:
             bytes of the whole chunks by CPU time. A memcpy of the same chunks is timed in the same way
- locations  versions through a folder, and a bucket if one is given, dense and as differences (`locations`)
- ranks      a model that several ranks publish to two engines, and the trainer's stall (`ranks`)
- engine     transfer, pause and load of a real engine, beside a checkpoint folder (`engine_updates`)
- fanout     four and eight receivers, through relays and straight from the trainer: what the trainer sends, and how
             long it takes until all of them have it. Both planes are up at once and publish in turns, so that a busy
             moment of the machine hits both

    relays      trainer --> 2 receivers --> 2 each --> ...
    direct      trainer --> every receiver

The block has the shapes of a Qwen2.5 model (`plane`). Everything shares one machine, so a relay saves the trainer's
egress but no time: on several machines it would spare the trainer's network card.

One round of `transfer`, whose model is changed in every chunk before it:

    ours        publish: copy into the store | hash, announce, fetch, verify, commit: the receiver holds it
    baselines                                | the bytes of that store into another shared memory
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
from async_grpo.lab.bench.measure import Measurement, Step, Stopwatch, progress_bar
from async_grpo.lab.bench.rollout.bench import LARGE, TINY
from async_grpo.telemetry.logging import configure_logging
from async_grpo.weights import delta
from async_grpo.weights.chunks import cut_into_chunks
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.shared_memory import allocate_file
from async_grpo.weights.store import WeightStore
from benchmarks.weights.baselines import TransferBaseline, disk, gloo, tcp
from benchmarks.weights.engine_updates import EnginePlatform, update_engine
from benchmarks.weights.locations import through_locations
from benchmarks.weights.plane import WARM_UPS, BenchPlane, Moved, TinyModelSize, Weights, bench_plane
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
    """How much is measured, on models of which size."""

    whole: TinyModelSize
    rounds: int
    part: TinyModelSize
    part_rounds: int
    layers: int
    """Of the Qwen2.5-1.5B that several ranks publish."""
    ranks_rounds: int
    engine: TinyQwen2Config
    engine_rounds: int


FULL = WeightsBenchSize(
    TinyModelSize(layers=27, vocab=151_936), 7, TinyModelSize(layers=4, vocab=8192), 5, 28, 5, LARGE, 5
)
"""1.08 GB, the shapes of Qwen2.5-0.5B with three layers more; 134 MB; 3.09 GB, Qwen2.5-1.5B; 111 MB."""
QUICK = WeightsBenchSize(
    TinyModelSize(layers=1, vocab=512, hidden=448), 1, TinyModelSize(layers=1, vocab=512, hidden=448), 1, 2, 1, TINY, 1
)


async def measure(
    progress: Progress, *, quick: bool, engine: EnginePlatform = "cpu", bucket: str | None = None
) -> list[Measurement]:
    """All figures; `quick` only shows that the bench works. `engine`: the platform of the engine that is updated;
    none: without one. `bucket`: its URL, to send versions through it, too."""
    configure_logging("bench")
    effort = QUICK if quick else FULL
    figures: list[Measurement] = []
    if engine != "none":  # first, so that a missing vLLM is noticed before minutes of other figures
        step = progress_bar(progress, "an engine that generates", WARM_UPS + effort.engine_rounds)
        figures += await update_engine(effort.engine, engine, effort.engine_rounds, step)
    step = progress_bar(progress, "a whole model to one receiver", WARM_UPS + effort.rounds)
    figures += await transfer(effort.whole, effort.rounds, step)
    step = progress_bar(progress, "patches", WARM_UP_STEPS + effort.part_rounds)
    figures += await patches(effort.part, effort.part_rounds, step)
    step = progress_bar(progress, "through a folder or a bucket", (1 + bool(bucket)) * (WARM_UPS + effort.part_rounds))
    figures += await through_locations(Training(effort.part.layout()), bucket, effort.part_rounds, step)
    for ranks in RANKS:
        step = progress_bar(progress, f"published by {ranks} ranks", WARM_UPS + effort.ranks_rounds)
        figures += await publish_from_ranks(ranks, effort.layers, effort.ranks_rounds, step)
    for receivers in RECEIVERS:
        step = progress_bar(progress, f"to {receivers} receivers", WARM_UPS + effort.part_rounds)
        figures += await fanout(effort.part, receivers, effort.part_rounds, step)
    return figures


@dataclass(frozen=True, slots=True)
class Codec:
    """One step, encoded and decoded by one core."""

    ratio: float
    encode_s: float
    decode_s: float
    """Includes the copy of the base, as in a receiver."""
    memcpy_s: float


async def patches(size: TinyModelSize, rounds: int, step: Step) -> list[Measurement]:
    """The sizes of patches at several learning rates; speeds, and the time to one receiver, at the first of them."""
    training = Training(size.layout())
    weights, timed_lr = training.weights, TIMED_LR
    for _ in range(WARM_UP_STEPS):
        training.step(timed_lr)
        step()
    codecs: list[Codec] = []
    moves: list[tuple[float, float]] = []
    async with (
        bench_plane("delta", weights.layout, DELTA, 1) as patched,
        bench_plane("dense", weights.layout, DENSE, 1) as dense,
    ):
        for plane in (patched, dense):
            await plane.move(weights)
        for _ in range(rounds):
            codecs.append(_codec(training, timed_lr))
            moves.append((1e3 * (await patched.move(weights)).seconds, 1e3 * (await dense.move(weights)).seconds))
            step()
    ratios = [median(each.ratio for each in codecs), *(_codec(training, lr).ratio for lr in LEARNING_RATES[1:])]
    gigabytes, name, memcpy = weights.layout.total_bytes / 1e9, f"AdamW, lr {timed_lr:g}", "memcpy of the same chunks"
    rates = [(gigabytes / each.encode_s, gigabytes / each.decode_s, gigabytes / each.memcpy_s) for each in codecs]
    return [
        *(
            Measurement(f"AdamW, lr {lr:g}: patches are smaller than dense", ratio, "times")
            for lr, ratio in zip(LEARNING_RATES, ratios, strict=True)
        ),
        Measurement.paired(f"{name}: encoding, one core", "GB/s", [(own, copy) for own, _, copy in rates], memcpy),
        Measurement.paired(f"{name}: decoding, one core", "GB/s", [(own, copy) for _, own, copy in rates], memcpy),
        Measurement.paired(f"{name}: {gigabytes:.2f} GB to one receiver", "ms", moves, "the same, dense"),
    ]


def _codec(training: Training, lr: float) -> Codec:
    """Take a step, and encode and decode it. Raises WeightsCorrupt if it does not come out as it was."""
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
        raise WeightsCorrupt("a step came out of its patches otherwise than it went in: the codec is broken.")
    return Codec(new.nbytes / sum(map(len, encoded)), encoding.seconds, decoding.seconds, memcpy.seconds)


async def fanout(size: TinyModelSize, receivers: int, rounds: int, step: Step) -> list[Measurement]:
    """Time and egress, relays beside direct; medians of `rounds` pairs."""
    weights = Weights(size.layout())
    copies: list[tuple[float, float]] = []
    times_ms: list[tuple[float, float]] = []
    async with (
        bench_plane("relays", weights.layout, RELAYS, receivers) as relays,
        bench_plane("direct", weights.layout, DIRECT, receivers) as direct,
    ):
        for _ in range(WARM_UPS + rounds):
            weights.touch(RELAYS.chunk_bytes)
            ours, theirs = await _spread(relays, weights), await _spread(direct, weights)
            copies.append((ours[0], theirs[0]))
            times_ms.append((1e3 * ours[1], 1e3 * theirs[1]))
            step()
    name = f"{weights.layout.total_bytes / 1e9:.2f} GB to {receivers} receivers, fanout {FANOUT}"
    return [
        Measurement.paired(f"{name}: the trainer sends", "copies", copies[WARM_UPS:], DIRECT_NAME),
        Measurement.paired(f"{name}: until all have it", "ms", times_ms[WARM_UPS:], DIRECT_NAME),
    ]


async def _spread(plane: BenchPlane, weights: Weights) -> tuple[float, float]:
    """One version to all receivers: the copies that left the trainer, and the seconds that it took."""
    sent = plane.publisher.fetch_stats().served_bytes
    moved = await plane.move(weights)
    return (plane.publisher.fetch_stats().served_bytes - sent) / weights.layout.total_bytes, moved.seconds


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
    """Throughput beside each baseline, and the copy into the store beside a memcpy; medians of `rounds` rounds."""
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
        measured = []
        for _ in range(WARM_UPS + rounds):
            measured.append(await _round(plane, weights, baselines, copy))
            step()
        waits_s = [await _wait_for_the_encoder(plane, weights) for _ in range(rounds)]
    return _figures(weights.layout.total_bytes, measured[WARM_UPS:], waits_s)


async def _round(
    plane: BenchPlane, weights: Weights, baselines: dict[str, TransferBaseline], copy: Bytes
) -> TransferRound:
    weights.touch(DENSE.chunk_bytes)
    memcpy_s = _memcpy(copy, weights.flat)
    with _processor_time(plane.process_ids) as ours:
        moved = await plane.move(weights)
    memcpy_s = (memcpy_s + _memcpy(copy, weights.flat)) / 2
    block = WeightStore.adopt(plane.publisher.store).snapshot(WeightVersion(0, plane.version)).block
    with _processor_time(baselines["tcp"].process_ids) as theirs:
        took_s = {"tcp": await baselines["tcp"].seconds(block)}
    took_s["gloo"] = await baselines["gloo"].seconds(block)
    took_s["disk"] = await baselines["disk"].seconds(block)  # last: what it wrote goes to the disk afterwards
    fetch_s = plane.receivers[0].stats.last_transfer_s
    return TransferRound(moved, fetch_s, ours.seconds, memcpy_s, took_s, theirs.seconds)


async def _wait_for_the_encoder(plane: BenchPlane, weights: Weights) -> float:
    """Seconds that the trainer waits if the next version follows at once."""
    weights.touch(DENSE.chunk_bytes)
    plane.publish(weights)
    weights.touch(DENSE.chunk_bytes)
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
    copies_ms = [(1e3 * each.moved.publication.stall_s, 1e3 * each.memcpy_s) for each in rounds]
    waits_inside_s = median(each.moved.publication.waited_s for each in rounds)
    transfer_s = median(each.fetch_s for each in rounds)
    return [
        Measurement(f"{name}, from publish until everything is received", median(moves_s), "s"),
        Measurement("of it, the transfer from manifest to commit", transfer_s, "s"),
        *(paired(f"{name}, beside {other}", "GB/s", speeds(moves_s, other), is_) for other, is_ in BASELINES.items()),
        paired(f"{name}, from manifest to commit", "GB/s", fetches, BASELINES["tcp"]),
        paired(f"{name}, processor time, both ends", "s/GB", costs, BASELINES["tcp"]),
        paired("one version into the store, in one thread", "ms", copies_ms, "one memcpy of the weights"),
        Measurement("of it, waiting for the encoder", 1e3 * waits_inside_s, "ms"),
        Measurement("waiting for the encoder, a version right after another", 1e3 * median(waits_s), "ms"),
    ]

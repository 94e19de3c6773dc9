"""The bench of the weight plane: real publisher and receiver processes, shared memory, loopback.

- transfer   a whole model to one receiver, beside a plain TCP loop, gloo and a file (`baselines`)
- stall      how long the trainer stands still, beside one memcpy of the weights
- patches    what Adam leaves to send, and what encoding and decoding it costs
- fanout     four and eight receivers, through relays and straight from the trainer: what the trainer sends, and how
             long it takes until all of them have it. Both planes are up at once and publish in turns, so that a busy
             moment of the machine hits both

    relays      trainer --> 2 receivers --> 2 each --> ...
    direct      trainer --> every receiver

The block has the shapes of a Qwen2.5 model (`plane`). Everything shares one machine, so a relay saves the trainer's
egress but no time: on several machines it would spare the trainer's network card.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.progress import Progress

from async_grpo.app.bench.measure import Measurement, Step, progress_bar
from async_grpo.app.bench.weights.deltas import WARM_UP_STEPS, patches
from async_grpo.app.bench.weights.plane import WARM_UPS, BenchPlane, TinyModelSize, Weights, bench_plane
from async_grpo.app.bench.weights.transfer import transfer
from async_grpo.config.weights import WeightsConfig

FANOUT = 2
RELAYS = WeightsConfig(encoding="dense", fanout=FANOUT)
DIRECT = WeightsConfig(encoding="dense", fanout=0)
DIRECT_NAME = "the trainer sends to each"
RECEIVERS = (4, 8)


@dataclass(frozen=True, slots=True)
class WeightsBenchSize:
    """How much is measured, on models of which size."""

    whole: TinyModelSize
    rounds: int
    part: TinyModelSize
    part_rounds: int


FULL = WeightsBenchSize(TinyModelSize(layers=27, vocab=151_936), 7, TinyModelSize(layers=4, vocab=8192), 5)
"""1.08 GB, the shapes of Qwen2.5-0.5B with three layers more; and 134 MB."""
QUICK = WeightsBenchSize(
    TinyModelSize(layers=1, vocab=512, hidden=448), 1, TinyModelSize(layers=1, vocab=512, hidden=448), 1
)


async def measure(progress: Progress, *, quick: bool) -> list[Measurement]:
    """All figures; `quick` only shows that the bench works."""
    effort = QUICK if quick else FULL
    step = progress_bar(progress, "a whole model to one receiver", WARM_UPS + effort.rounds)
    figures = await transfer(effort.whole, effort.rounds, step)
    step = progress_bar(progress, "patches", WARM_UP_STEPS + effort.part_rounds)
    figures += await patches(effort.part, effort.part_rounds, step)
    for receivers in RECEIVERS:
        step = progress_bar(progress, f"to {receivers} receivers", WARM_UPS + effort.part_rounds)
        figures += await fanout(effort.part, receivers, effort.part_rounds, step)
    return figures


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
    sent = plane.publisher.stats().served_bytes
    moved = await plane.move(weights)
    return (plane.publisher.stats().served_bytes - sent) / weights.layout.total_bytes, moved.seconds

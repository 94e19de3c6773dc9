"""The bench of the weight plane: real publisher and receiver processes, shared memory, loopback.

- transfer   a whole model to one receiver, beside a plain TCP loop, gloo and a file (`baselines`)
- stall      how long the trainer stands still, beside one memcpy of the weights
- patches    what Adam leaves to send, and what encoding and decoding it costs
- fanout     four and eight receivers, through relays and straight from the trainer: what the trainer sends, and how
             long it takes until all of them have it. Both planes are up at once and publish in turn, so that a busy
             moment of the machine hits both

    relays      trainer --> 2 receivers --> 2 each --> ...
    direct      trainer --> every receiver

The block has the shapes of a Qwen2.5 model (`plane`). Everything shares one machine, so a relay saves the trainer's
egress but no time: on several machines it would spare the trainer's network card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.progress import Progress

from async_grpo.app.bench.measure import Measurement
from async_grpo.app.bench.weights.deltas import WARM_UP_STEPS, patches
from async_grpo.app.bench.weights.plane import WARM_UPS, BenchPlane, TinyModelSize, Weights, bench_plane
from async_grpo.app.bench.weights.transfer import transfer
from async_grpo.config.weights import WeightsConfig

FANOUT = 2
RELAYS = WeightsConfig(encoding="dense", fanout=FANOUT)
DIRECT = WeightsConfig(encoding="dense", fanout=0)
DIRECT_NAME = "the trainer sends to each"


@dataclass(frozen=True, slots=True)
class FanoutTime:
    """One version to all receivers."""

    seconds: float
    copies: float
    """That left the trainer."""


async def fanout(size: TinyModelSize, receivers: int, rounds: int, step: Callable[[], None]) -> list[Measurement]:
    """Time and egress, relays beside direct; medians of `rounds` pairs."""
    weights = Weights(size.layout())
    pairs: list[tuple[FanoutTime, FanoutTime]] = []
    async with (
        bench_plane("relays", weights.layout, RELAYS, receivers) as relays,
        bench_plane("direct", weights.layout, DIRECT, receivers) as direct,
    ):
        for _ in range(WARM_UPS + rounds):
            weights.touch(RELAYS.chunk_bytes)
            pairs.append((await _spread(relays, weights), await _spread(direct, weights)))
            step()
    return _figures(f"{weights.layout.total_bytes / 1e9:.2f} GB to {receivers} receivers", pairs[WARM_UPS:])


async def _spread(plane: BenchPlane, weights: Weights) -> FanoutTime:
    sent = plane.publisher.stats().served_bytes
    moved = await plane.move(weights)
    return FanoutTime(moved.seconds, (plane.publisher.stats().served_bytes - sent) / weights.layout.total_bytes)


def _figures(name: str, pairs: Sequence[tuple[FanoutTime, FanoutTime]]) -> list[Measurement]:
    return [
        Measurement(
            name=f"{name}, fanout {FANOUT}: the trainer sends",
            value=median(ours.copies for ours, _ in pairs),
            unit="copies",
            baseline=median(theirs.copies for _, theirs in pairs),
            baseline_name=DIRECT_NAME,
            ratio=median(ours.copies / theirs.copies for ours, theirs in pairs),
        ),
        Measurement(
            name=f"{name}, fanout {FANOUT}: until all have it",
            value=median(1e3 * ours.seconds for ours, _ in pairs),
            unit="ms",
            baseline=median(1e3 * theirs.seconds for _, theirs in pairs),
            baseline_name=DIRECT_NAME,
            ratio=median(ours.seconds / theirs.seconds for ours, theirs in pairs),
        ),
    ]


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

    def steps(what: str, total: int) -> Callable[[], None]:
        task = progress.add_task(what, total=total)
        return lambda: progress.advance(task)

    figures = await transfer(
        effort.whole, effort.rounds, steps("a whole model to one receiver", WARM_UPS + effort.rounds)
    )
    step = steps("patches", WARM_UP_STEPS + effort.part_rounds)
    figures += await patches(effort.part, effort.part_rounds, step)
    for receivers in RECEIVERS:
        step = steps(f"to {receivers} receivers", WARM_UPS + effort.part_rounds)
        figures += await fanout(effort.part, receivers, effort.part_rounds, step)
    return figures

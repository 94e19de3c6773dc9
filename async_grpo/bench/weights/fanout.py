"""Many receivers: what the trainer sends, and how long it takes until all of them have it.

    relays      trainer --> 2 receivers --> 2 each --> ...
    direct      trainer --> every receiver

Both planes are up at once and publish in turn, so that a busy moment of the machine hits both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from async_grpo.bench.figures import Figure
from async_grpo.bench.weights.model import ModelSize, Weights
from async_grpo.bench.weights.plane import WARM_UPS, BenchPlane, bench_plane
from async_grpo.config.weights import WeightsConfig

FANOUT = 2
RELAYS = WeightsConfig(encoding="dense", fanout=FANOUT)
DIRECT = WeightsConfig(encoding="dense", fanout=0)
DIRECT_NAME = "the trainer sends to each"


@dataclass(frozen=True, slots=True)
class Spread:
    """One version to all receivers."""

    seconds: float
    copies: float
    """That left the trainer."""


async def fanout(size: ModelSize, receivers: int, rounds: int, step: Callable[[], None]) -> list[Figure]:
    """Time and egress, relays beside direct; medians of `rounds` pairs."""
    weights = Weights(size.layout())
    pairs: list[tuple[Spread, Spread]] = []
    async with (
        bench_plane("relays", weights.layout, RELAYS, receivers) as relays,
        bench_plane("direct", weights.layout, DIRECT, receivers) as direct,
    ):
        for _ in range(WARM_UPS + rounds):
            weights.touch(RELAYS.chunk_bytes)
            pairs.append((await _spread(relays, weights), await _spread(direct, weights)))
            step()
    return _figures(f"{weights.layout.total_bytes / 1e9:.2f} GB to {receivers} receivers", pairs[WARM_UPS:])


async def _spread(plane: BenchPlane, weights: Weights) -> Spread:
    sent = plane.publisher.stats().served_bytes
    moved = await plane.move(weights)
    return Spread(moved.seconds, (plane.publisher.stats().served_bytes - sent) / weights.layout.total_bytes)


def _figures(name: str, pairs: Sequence[tuple[Spread, Spread]]) -> list[Figure]:
    return [
        Figure(
            name=f"{name}, fanout {FANOUT}: the trainer sends",
            value=median(ours.copies for ours, _ in pairs),
            unit="copies",
            baseline=median(theirs.copies for _, theirs in pairs),
            baseline_name=DIRECT_NAME,
            ratio=median(ours.copies / theirs.copies for ours, theirs in pairs),
        ),
        Figure(
            name=f"{name}, fanout {FANOUT}: until all have it",
            value=median(1e3 * ours.seconds for ours, _ in pairs),
            unit="ms",
            baseline=median(1e3 * theirs.seconds for _, theirs in pairs),
            baseline_name=DIRECT_NAME,
            ratio=median(ours.seconds / theirs.seconds for ours, theirs in pairs),
        ),
    ]

"""A whole model to one receiver, and how long the trainer stands still for it.

    ours    publish: copy into the store | hash, announce, fetch, verify, commit: the receiver holds it
    rivals                               | the bytes of that store into another shared memory

The model is changed in every chunk between two rounds. Every round has each of them, and the memcpy, once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from async_grpo.bench.figures import Figure
from async_grpo.bench.weights.model import ModelSize, Weights
from async_grpo.bench.weights.plane import BenchPlane, bench_plane
from async_grpo.bench.weights.rivals import Rival, disk, gloo, tcp
from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.manifest import Identity
from async_grpo.weights.memory import allocate
from async_grpo.weights.store import WeightStore

CONFIG = WeightsConfig(encoding="dense")
WARM_UPS = 2
"""One for each slot."""
BASELINES = {
    "tcp": "TCP loop, sendall to recv_into",
    "gloo": "gloo broadcast, one flat tensor",
    "disk": "safetensors, save and load",
}


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds."""

    whole: float
    """From the end of `publish` until the receiver holds the version."""
    fetch: float
    """Of it, from the manifest to the commit."""
    stall: float
    waited: float
    memcpy: float
    rivals: dict[str, float]


async def transfer(size: ModelSize, rounds: int, step: Callable[[], None]) -> list[Figure]:
    """Throughput beside each rival, and the stall beside a memcpy; medians of `rounds` rounds."""
    weights = Weights(size.layout())
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(bench_plane("transfer", weights.layout, CONFIG, 1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-grpo-bench-")))
        target = plane.publisher.store.with_name("rival")
        _, memory = allocate(target, weights.layout.total_bytes)
        rivals = {
            "tcp": await stack.enter_async_context(tcp(target)),
            "gloo": await stack.enter_async_context(gloo(target, folder)),
            "disk": await stack.enter_async_context(disk(target, folder, weights.layout)),
        }
        copy = np.frombuffer(memory, np.uint8, weights.layout.total_bytes)
        measured = []
        for number in range(WARM_UPS + rounds):
            measured.append(await _round(plane, weights, rivals, copy))
            if number >= WARM_UPS - 1:
                step()
    return _figures(weights.layout.total_bytes, measured[WARM_UPS:])


async def _round(plane: BenchPlane, weights: Weights, rivals: dict[str, Rival], copy: np.ndarray) -> Round:
    weights.touch(CONFIG.chunk_bytes)
    memcpy = _memcpy(copy, weights.flat)
    moved = await plane.move(weights)
    block = WeightStore.adopt(plane.publisher.store).snapshot(Identity(0, plane.version)).block
    return Round(
        whole=moved.seconds,
        fetch=plane.receivers[0].stats.last_transfer_s,
        stall=moved.publication.stall_s,
        waited=moved.publication.waited_s,
        memcpy=memcpy,
        rivals={name: await rival.seconds(block) for name, rival in rivals.items()},
    )

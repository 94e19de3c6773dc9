"""Versions through a folder or a bucket (`weights.location`), beside the same bytes plainly written there and read.

    ours       publish: copy into the store | encode, write, announce, look, read, verify, commit: the receiver holds it
    baseline                                | write one object | read it

The receiver looks every `weights.heartbeat_s`, so a version waits for it half of that on average.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from async_grpo.config.weights import WeightsConfig
from async_grpo.lab.bench.measure import Measurement, Step, Stopwatch
from async_grpo.weights.folder.objects import Objects, open_objects
from async_grpo.weights.folder.sender import FolderWeightSender
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.shared_memory import remove_stores, store_path
from benchmarks.weights.baselines import WAIT_S
from benchmarks.weights.plane import WARM_UPS, Weights
from benchmarks.weights.training import TIMED_LR, Training

_BASELINE = "baseline"


class LocationPlane:
    """A sender, one receiver, and the place between them."""

    def __init__(self, sender: FolderWeightSender, receiver: SharedWeightReceiver, objects: Objects) -> None:
        self._sender = sender
        self._receiver = receiver
        self._objects = objects
        self._version = -1

    async def move(self, weights: Weights) -> float:
        """Seconds from the end of `publish` until the receiver has the weights. Raises WaitTimeout, WeightsError."""
        before = WeightVersion(0, self._version) if self._version >= 0 else None
        self._version += 1
        self._sender.publish_weights(self._version, weights.arrays())
        started_s = time.monotonic()
        await self._receiver.wait_for_newer_version(before, WAIT_S)
        return time.monotonic() - started_s

    def plainly(self, weights: Weights) -> float:
        """Seconds to write the weights as one object and to read it. Raises OSError."""
        with Stopwatch() as spent:
            self._objects.write(_BASELINE, [weights.flat.data])
            self._objects.read(_BASELINE)
        return spent.seconds


@asynccontextmanager
async def location_plane(name: str, training: Training, config: WeightsConfig) -> AsyncIterator[LocationPlane]:
    """Threads, processes, stores and objects are gone afterwards."""
    run = f"bench-{os.getpid()}-{name}"
    sender = FolderWeightSender(training.weights.layout, run, 0, config)
    objects = open_objects(config)

    async def resolve() -> object:
        return sender.address

    receiver = SharedWeightReceiver(resolve, store_path(run, "machine"), config)  # type: ignore[arg-type]
    try:
        yield LocationPlane(sender, receiver, objects)
    finally:
        await receiver.close()
        await asyncio.to_thread(sender.close)
        objects.remove([_BASELINE])
        remove_stores(run)


async def through_locations(training: Training, bucket: str | None, rounds: int, step: Step) -> list[Measurement]:
    """Medians of `rounds` steps of AdamW, dense and as differences; through a folder, and through `bucket` if given."""
    found = []
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        places = {"a folder": WeightsConfig(transport="shared_filesystem", location=str(Path(folder)))}
        if bucket is not None:
            places["a bucket"] = WeightsConfig(transport="object_store", location=bucket)
        for place, config in places.items():
            found += await _through(place, training, config, rounds, step)
    return found


async def _through(place: str, training: Training, config: WeightsConfig, rounds: int, step: Step) -> list[Measurement]:
    dense, delta = (config.model_copy(update={"encoding": encoding}) for encoding in ("dense", "delta"))
    moves: list[tuple[float, float]] = []
    patches: list[tuple[float, float]] = []
    async with (
        location_plane("dense", training, dense) as whole,
        location_plane("delta", training, delta) as patched,
    ):
        for _ in range(WARM_UPS + rounds):
            training.step(TIMED_LR)
            plain_ms = 1e3 * whole.plainly(training.weights)
            moves.append((1e3 * await whole.move(training.weights), plain_ms))
            patches.append((1e3 * await patched.move(training.weights), plain_ms))
            step()
    gigabytes = training.weights.layout.total_bytes / 1e9
    name, plainly = f"{gigabytes:.2f} GB through {place}", "one object of these bytes, written and read"
    return [
        Measurement.paired(f"{name}, dense", "ms", moves[WARM_UPS:], plainly),
        Measurement.paired(f"{name}, AdamW, lr {TIMED_LR:g}, as differences", "ms", patches[WARM_UPS:], plainly),
    ]

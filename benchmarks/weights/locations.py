"""Benchmark of versions through a folder or bucket (`weights.location`), compared with writing and reading one object.

    ours       publish: copy into the store | encode, write, announce, poll, read, verify, commit: the receiver has it
    baseline                                | write one object | read it

The receiver polls every `weights.heartbeat_s`, so on average a version waits half of that.
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
    """A sender, one receiver, and the location between them."""

    def __init__(self, sender: FolderWeightSender, receiver: SharedWeightReceiver, objects: Objects) -> None:
        self._sender = sender
        self._receiver = receiver
        self._objects = objects
        self._version = -1

    async def time_transfer(self, weights: Weights) -> float:
        """Publish the weights. Returns the seconds from then until the receiver has them. Raises WaitTimeout,
        WeightsError."""
        before = WeightVersion(0, self._version) if self._version >= 0 else None
        self._version += 1
        self._sender.publish_weights(self._version, weights.arrays())
        started_s = time.monotonic()
        await self._receiver.wait_for_newer_version(before, WAIT_S)
        return time.monotonic() - started_s

    def time_plain_object(self, weights: Weights) -> float:
        """Write the weights as one object and read it. Returns the seconds. Raises OSError."""
        with Stopwatch() as stopwatch:
            self._objects.write(_BASELINE, [weights.flat.data])
            self._objects.read(_BASELINE)
        return stopwatch.seconds


@asynccontextmanager
async def location_plane(name: str, training: Training, config: WeightsConfig) -> AsyncIterator[LocationPlane]:
    """Start a sender and a receiver. Removes all threads, processes, stores and objects."""
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


async def measure_locations(training: Training, bucket: str | None, rounds: int, step: Step) -> list[Measurement]:
    """Measure `rounds` AdamW steps, dense and as patches, through a folder, and through `bucket` if it is set."""
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        locations = {"a folder": WeightsConfig(transport="shared_filesystem", location=str(Path(folder)))}
        if bucket is not None:
            locations["a bucket"] = WeightsConfig(transport="object_store", location=bucket)
        for location, config in locations.items():
            measurements += await _measure_location(location, training, config, rounds, step)
    return measurements


async def _measure_location(
    location: str, training: Training, config: WeightsConfig, rounds: int, step: Step
) -> list[Measurement]:
    dense_config = config.model_copy(update={"encoding": "dense"})
    delta_config = config.model_copy(update={"encoding": "delta"})
    dense_ms: list[tuple[float, float]] = []
    patched_ms: list[tuple[float, float]] = []
    async with (
        location_plane("dense", training, dense_config) as dense,
        location_plane("delta", training, delta_config) as patched,
    ):
        for _ in range(WARM_UPS + rounds):
            training.step(TIMED_LR)
            plain_ms = 1e3 * dense.time_plain_object(training.weights)
            dense_ms.append((1e3 * await dense.time_transfer(training.weights), plain_ms))
            patched_ms.append((1e3 * await patched.time_transfer(training.weights), plain_ms))
            step()

    gigabytes = training.weights.layout.total_bytes / 1e9
    name = f"{gigabytes:.2f} GB through {location}"
    baseline = "one object of these bytes, written and read"
    return [
        Measurement.paired(f"{name}, dense", "ms", dense_ms[WARM_UPS:], baseline),
        Measurement.paired(f"{name}, AdamW, lr {TIMED_LR:g}, as differences", "ms", patched_ms[WARM_UPS:], baseline),
    ]

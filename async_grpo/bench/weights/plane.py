"""A weight plane for the bench: one publisher, receivers of as many machines as are wanted, all on this one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from async_grpo.bench.weights.model import Weights
from async_grpo.bench.weights.signals import WAIT_S
from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WaitTimeout
from async_grpo.weights.manifest import Identity, Layout
from async_grpo.weights.publisher import Publication, WeightPublisher
from async_grpo.weights.receiver import WeightReceiver
from async_grpo.weights.store import remove_stores, store_path
from async_grpo.wire.board import PublisherAddress

WARM_UPS = 2
"""Versions before the first that is timed: one for each slot."""
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Moved:
    """One version on its way: the trainer's part, and from there until every receiver holds it."""

    publication: Publication
    seconds: float


class BenchPlane:
    """Publishes version after version, and waits for each."""

    def __init__(self, publisher: WeightPublisher, receivers: list[WeightReceiver]) -> None:
        self.publisher = publisher
        self.receivers = receivers
        self.version = -1

    @property
    def process_ids(self) -> list[int]:
        """Of the publisher and the receivers, not of this process."""
        started = [receiver.process_id for receiver in self.receivers]
        return [self.publisher.process_id, *(process for process in started if process is not None)]

    def publish(self, weights: Weights) -> Publication:
        """The next version; waits for nobody but the encoder."""
        self.version += 1
        return self.publisher.publish(self.version, weights.arrays())

    async def move(self, weights: Weights) -> Moved:
        """Publish the weights as they are. Raises WaitTimeout and whatever the plane fails with."""
        publication = self.publish(weights)
        started_s = time.monotonic()
        before = Identity(0, self.version - 1) if self.version else None
        await asyncio.gather(*(receiver.next_version(before, WAIT_S) for receiver in self.receivers))
        return Moved(publication, time.monotonic() - started_s)


@asynccontextmanager
async def bench_plane(name: str, layout: Layout, config: WeightsConfig, receivers: int) -> AsyncIterator[BenchPlane]:
    """All receivers have joined. Processes and stores are gone afterwards."""
    run = f"bench-{os.getpid()}-{name}"
    try:
        async with AsyncExitStack() as stack:
            publisher = stack.enter_context(WeightPublisher(layout, run, 0, config))

            async def resolve() -> PublisherAddress:
                return publisher.address

            made = []
            for number in range(receivers):
                receiver = WeightReceiver(resolve, store_path(run, f"machine-{number}"), config)
                stack.push_async_callback(receiver.close)
                made.append(receiver)
            await _until_joined(publisher, receivers)
            yield BenchPlane(publisher, made)
    finally:
        remove_stores(run)


async def _until_joined(publisher: WeightPublisher, receivers: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while publisher.stats().receivers < receivers:
        if time.monotonic() > deadline:
            raise WaitTimeout(f"{receivers} receivers of the bench to register", WAIT_S)
        await asyncio.sleep(_LOOK_EVERY_S)

"""Fixtures of the weight benchmarks: a publisher, several receivers, a model.

Each receiver stands for one machine, but all run on this one. The model has the tensors of a Qwen2.5 in bfloat16, as
raw bits.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from async_grpo.config.model import Precision
from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WaitTimeout
from async_grpo.weights.chunks import cut_into_chunks
from async_grpo.weights.manifest import TensorLayout, WeightVersion, make_layout
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.sender import Publication
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.zmq.sender import ZmqWeightSender
from async_grpo.wire.board import PublisherAddress
from benchmarks.weights.baselines import WAIT_S

DTYPE: Precision = "bfloat16"
WARM_UPS = 2
"""Versions before the first timed one: one per slot."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class TinyModelSize:
    """Size of a model in the proportions of Qwen2.5-0.5B, which has 24 layers of 896 and 151,936 tokens."""

    layers: int
    vocab: int
    hidden: int = 896

    def layout(self) -> TensorLayout:
        """Layout of all tensors. The output matrix is tied to the embedding."""
        return make_layout((name, DTYPE, shape) for name, shape in _shapes(self))


class Weights:
    """The values of one model in one buffer, whose pages are all allocated."""

    def __init__(self, layout: TensorLayout, seed: int = 0) -> None:
        self.layout = layout
        self.flat: npt.NDArray[np.uint8] = np.random.default_rng(seed).integers(0, 256, layout.total_bytes, np.uint8)

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield every tensor by name, without copying, as the trainer publishes them."""
        for spec in self.layout.tensors:
            yield spec.name, self.flat[spec.offset : spec.offset + spec.nbytes]

    def change_every_chunk(self, chunk_bytes: int) -> None:
        """Change one byte in every chunk, so that all chunks must be transferred."""
        starts = [chunk.start for chunk in cut_into_chunks(self.layout, chunk_bytes)]
        self.flat[starts] ^= 1


def _shapes(size: TinyModelSize) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = size.hidden
    key_value = size.hidden // 7
    intermediate = size.hidden * 38 // 7
    yield "model.embed_tokens.weight", (size.vocab, hidden)
    for layer in range(size.layers):
        for name, shape in (
            ("self_attn.q_proj.weight", (hidden, hidden)),
            ("self_attn.q_proj.bias", (hidden,)),
            ("self_attn.k_proj.weight", (key_value, hidden)),
            ("self_attn.k_proj.bias", (key_value,)),
            ("self_attn.v_proj.weight", (key_value, hidden)),
            ("self_attn.v_proj.bias", (key_value,)),
            ("self_attn.o_proj.weight", (hidden, hidden)),
            ("mlp.gate_proj.weight", (intermediate, hidden)),
            ("mlp.up_proj.weight", (intermediate, hidden)),
            ("mlp.down_proj.weight", (hidden, intermediate)),
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
        ):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Times of one version."""

    publication: Publication
    """The trainer's part."""
    seconds: float
    """From the return of `publish_weights` until every receiver has the version."""


class BenchPlane:
    """A publisher and its receivers."""

    def __init__(self, publisher: ZmqWeightSender, receivers: list[SharedWeightReceiver]) -> None:
        self.publisher = publisher
        self.receivers = receivers
        self.version = -1

    @property
    def process_ids(self) -> list[int]:
        """PIDs of the publisher and the receivers, without this process."""
        process_ids = [self.publisher.process_id]
        for receiver in self.receivers:
            if receiver.process_id is not None:
                process_ids.append(receiver.process_id)
        return process_ids

    def publish(self, weights: Weights) -> Publication:
        """Publish the next version. Waits only for the encoder."""
        self.version += 1
        return self.publisher.publish_weights(self.version, weights.arrays())

    async def transfer(self, weights: Weights) -> Transfer:
        """Publish the weights and wait until every receiver has them. Raises WaitTimeout, WeightsError."""
        publication = self.publish(weights)
        started_s = time.monotonic()
        before = WeightVersion(0, self.version - 1) if self.version else None
        await asyncio.gather(*(receiver.wait_for_newer_version(before, WAIT_S) for receiver in self.receivers))
        return Transfer(publication, time.monotonic() - started_s)


@asynccontextmanager
async def bench_plane(
    name: str, layout: TensorLayout, config: WeightsConfig, receiver_count: int
) -> AsyncIterator[BenchPlane]:
    """Start a publisher and receivers, and wait until they are registered. Removes all processes and stores."""
    run = f"bench-{os.getpid()}-{name}"
    try:
        async with AsyncExitStack() as stack:
            publisher = stack.enter_context(ZmqWeightSender(layout, run, 0, config))

            async def resolve() -> PublisherAddress:
                return publisher.address

            receivers: list[SharedWeightReceiver] = []
            for number in range(receiver_count):
                receiver = SharedWeightReceiver(resolve, store_path(run, f"machine-{number}"), config)
                stack.push_async_callback(receiver.close)
                receivers.append(receiver)
            await _wait_for_receivers(publisher, receiver_count)
            yield BenchPlane(publisher, receivers)
    finally:
        remove_stores(run)


async def _wait_for_receivers(publisher: ZmqWeightSender, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while publisher.fetch_stats().receivers < count:
        if time.monotonic() > deadline:
            raise WaitTimeout(f"{count} receivers of the bench to register", WAIT_S)
        await asyncio.sleep(_POLL_S)

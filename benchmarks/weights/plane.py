"""What the bench of the weight plane works on: a publisher, receivers of several machines, a model to move.

All receivers run on this machine. The model is the tensors of a Qwen2.5 in bfloat16, as raw bits.
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
"""Versions before the first that is timed: one for each slot."""
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class TinyModelSize:
    """A model in the proportions of Qwen2.5-0.5B, which has 24 layers of 896 and 151,936 tokens."""

    layers: int
    vocab: int
    hidden: int = 896

    def layout(self) -> TensorLayout:
        """The layout of all tensors; the output matrix is the embedding."""
        return make_layout((name, DTYPE, shape) for name, shape in _shapes(self))


class Weights:
    """The values of one model, in one warm buffer; `arrays` are what the trainer publishes."""

    def __init__(self, layout: TensorLayout, seed: int = 0) -> None:
        self.layout = layout
        self.flat: npt.NDArray[np.uint8] = np.random.default_rng(seed).integers(0, 256, layout.total_bytes, np.uint8)

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Every tensor by name, in place."""
        for spec in self.layout.tensors:
            yield spec.name, self.flat[spec.offset : spec.offset + spec.nbytes]

    def touch(self, chunk_bytes: int) -> None:
        """Change something in every chunk, so that nothing can be left out of the next transfer."""
        self.flat[[chunk.start for chunk in cut_into_chunks(self.layout, chunk_bytes)]] ^= 1


def _shapes(size: TinyModelSize) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, key_value, intermediate = size.hidden, size.hidden // 7, size.hidden * 38 // 7
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
class Moved:
    """One version on its way: the trainer's part, and from there until every receiver holds it."""

    publication: Publication
    seconds: float


class BenchPlane:
    """Publishes version after version, and waits for each."""

    def __init__(self, publisher: ZmqWeightSender, receivers: list[SharedWeightReceiver]) -> None:
        self.publisher = publisher
        self.receivers = receivers
        self.version = -1

    @property
    def process_ids(self) -> list[int]:
        """The processes of the publisher and the receivers, without this one."""
        started = [receiver.process_id for receiver in self.receivers]
        return [self.publisher.process_id, *(process for process in started if process is not None)]

    def publish(self, weights: Weights) -> Publication:
        """Publish the next version; waits for the encoder only."""
        self.version += 1
        return self.publisher.publish_weights(self.version, weights.arrays())

    async def move(self, weights: Weights) -> Moved:
        """Publish the weights as they are. Raises WaitTimeout and WeightsError."""
        publication = self.publish(weights)
        started_s = time.monotonic()
        before = WeightVersion(0, self.version - 1) if self.version else None
        await asyncio.gather(*(receiver.wait_for_newer_version(before, WAIT_S) for receiver in self.receivers))
        return Moved(publication, time.monotonic() - started_s)


@asynccontextmanager
async def bench_plane(
    name: str, layout: TensorLayout, config: WeightsConfig, receivers: int
) -> AsyncIterator[BenchPlane]:
    """A publisher and its receivers, which have joined. Processes and stores are gone afterwards."""
    run = f"bench-{os.getpid()}-{name}"
    try:
        async with AsyncExitStack() as stack:
            publisher = stack.enter_context(ZmqWeightSender(layout, run, 0, config))

            async def resolve() -> PublisherAddress:
                return publisher.address

            made = []
            for number in range(receivers):
                receiver = SharedWeightReceiver(resolve, store_path(run, f"machine-{number}"), config)
                stack.push_async_callback(receiver.close)
                made.append(receiver)
            await _until_joined(publisher, receivers)
            yield BenchPlane(publisher, made)
    finally:
        remove_stores(run)


async def _until_joined(publisher: ZmqWeightSender, receivers: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while publisher.fetch_stats().receivers < receivers:
        if time.monotonic() > deadline:
            raise WaitTimeout(f"{receivers} receivers of the bench to register", WAIT_S)
        await asyncio.sleep(_LOOK_EVERY_S)

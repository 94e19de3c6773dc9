"""What is there once and used by all rounds: a model, its engine, a reward pool.

Stage.whole   rounds through the whole server   --+
Stage.bare    rounds of the plain loop          --+--> one engine
Stage.waves   rounds of waves                   --+
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.bench.rollout.pairs import Clock, Round
from async_grpo.bench.rollout.whole_server import Surroundings, through_the_server
from async_grpo.bench.rollout.work import Lengths, Work
from async_grpo.bench.words import number_words
from async_grpo.config.buffer import RedisConfig
from async_grpo.config.model import Precision
from async_grpo.config.rewards import RewardsConfig
from async_grpo.config.rollout import VllmConfig
from async_grpo.rewards.pool import RewardPool
from async_grpo.weights.store import remove_stores, store_path
from rollout_server.bench.moving_weights import ModelSize, MovingWeights
from rollout_server.engines.bare import Loop, continuous, waves
from rollout_server.engines.protocol import Generation, GenerationRequest
from rollout_server.engines.vllm_engine import VllmEngine

PRECISION: Precision = "bfloat16"


class DrawnLengths(VllmEngine):
    """vLLM that ends every completion at the length that was drawn for its seed."""

    lengths: Lengths

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `VllmEngine.generate`, with another max_tokens."""
        assert request.seed is not None
        return await super().generate(replace(request, max_tokens=self.lengths.of(request.seed)))


@dataclass(frozen=True, slots=True)
class Stage:
    """A started engine that has its first weights."""

    engine: DrawnLengths
    around: Surroundings
    parameters: int

    @property
    def policy(self) -> str:
        """The model, in words."""
        return f"{self.parameters / 1e6:.3g}M parameters"

    async def whole(self, work: Work) -> Round:
        """A round through the whole server."""
        self.engine.lengths = work.lengths
        return await through_the_server(self.around, work)

    async def bare(self, work: Work) -> Round:
        """A round of bare vLLM, its slots always full."""
        return await self._plain(continuous, work)

    async def waves(self, work: Work) -> Round:
        """A round of bare vLLM in waves."""
        return await self._plain(waves, work)

    async def _plain(self, loop: Loop, work: Work) -> Round:
        requests = work.requests(self.around.vocabulary)
        clock = Clock()
        tokens = await loop(self.engine.async_llm, requests, work.concurrency)
        return Round(tokens, *clock.stop())


@asynccontextmanager
async def open_stage(size: ModelSize, redis: RedisConfig, *, longest: int) -> AsyncIterator[Stage]:
    """A random model of that size, for sequences of up to `longest` tokens. Raises EngineError,
    DependencyError."""
    run = f"bench-rollout-{uuid.uuid4().hex}"
    config = VllmConfig(max_model_len=longest)
    try:
        with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
            model = Path(folder) / "model"
            weights = MovingWeights(size, model, store_path(run, "weights"), seed=1)
            tokenizer = number_words(model, size.vocab_size)
            engine = DrawnLengths(model, config, precision=PRECISION, seed=1, name="bench")
            async with RewardPool(RewardsConfig()) as pool:
                around = Surroundings(model, Path(folder), engine, pool, tokenizer, size.vocab_size, redis)
                try:
                    await _start(engine, weights)
                    yield Stage(engine, around, weights.parameters)
                finally:
                    await engine.aclose()
    finally:
        remove_stores(run)


async def _start(engine: DrawnLengths, weights: MovingWeights) -> None:
    """With version 0 of the weights, which the tickets ask for."""
    await engine.start()
    first = weights.step()
    await engine.update_weights(weights.store.path, epoch=first.epoch, version=first.version, interruption="keep")

"""An exam room without a run: prompts, workflow and reward pool of a configuration around whatever samples.

    checkpoint --> VllmEngine --+
                                +--> ExamHall --> Exam
    live servers --> remote ----+

Everything is closed in the reverse order, also when a later part cannot be had.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.data.source import TaskSource, Tokenizer, make_source
from async_grpo.rewards.pool import RewardPool
from rollout_server.engines.protocol import Sampler
from rollout_server.engines.vllm_engine import VllmEngine
from rollout_server.seeds import sample_seed
from rollout_server.workflows import Workflow, make_workflow


@dataclass(frozen=True, slots=True)
class ExamHall:
    """What `exam.Exam` needs, and nothing of a run."""

    config: RunConfig
    name: str
    engine: Sampler
    pool: RewardPool
    workflow: Workflow
    source: TaskSource


@asynccontextmanager
async def open_engine(config: RunConfig, model: Path, name: str) -> AsyncIterator[Sampler]:
    """An engine with the weights of a Hugging Face folder, set up as those of the run. Raises EngineError,
    DependencyError."""
    seed = sample_seed(config.seed, name) % 2**31
    engine = VllmEngine(model, config.rollout.vllm, precision=config.model.precision, seed=seed, name=name)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.aclose()


@asynccontextmanager
async def open_hall(
    config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, name: str, *, kept: int
) -> AsyncIterator[ExamHall]:
    """The configuration's held-out prompts, workflow and rewards around a sampler; the run kept the first `kept` of
    them from training. Raises ConfigError, DataError."""
    source = make_source(config, tokenizer, kept=kept)
    async with RewardPool(config.rewards) as pool:
        yield ExamHall(config, name, sampler, pool, make_workflow(config.rollout, tokenizer), source)

"""One round through the whole rollout server, and the setup that all rounds share.

    WorkSource --tasks--> server --tickets--> RolloutServer --groups--> server --batches--> consumer

The context is the real one: Redis buffer and board, reward processes, engine, heartbeat, partials, logger. The weights
stand still (`NoNews`), and the run's evaluations are on the board already, so that nothing is evaluated. The staleness
window holds the whole round, so that it never blocks. The round waits for the consumer, which the last inserted group
unblocks.

RolloutSetup holds what exists once: a model, its engine, a reward pool.

    RolloutSetup.whole   rounds through the whole server   --+
    RolloutSetup.bare    rounds of the plain loop          --+--> one engine
    RolloutSetup.waves   rounds of waves                   --+
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import buffer
from async_grpo.config import RunConfig
from async_grpo.config.buffer import RedisConfig
from async_grpo.config.model import Precision, TinyQwen2Config
from async_grpo.config.rewards import RewardsConfig
from async_grpo.config.rollout import RolloutConfig, VllmConfig
from async_grpo.data.tokenizer import Tokenizer, load_tokenizer
from async_grpo.errors import WaitTimeout
from async_grpo.lab.bench.measure import Stopwatch
from async_grpo.lab.bench.rig import check_trained
from async_grpo.lab.bench.rollout.bare_vllm import Loop, generate_continuously, generate_in_waves
from async_grpo.lab.bench.rollout.workload import RolloutRound, RolloutWork, number_model
from async_grpo.rewards.pool import RewardPool
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import WeightStore
from async_grpo.wire import Group, Task
from async_grpo.wire.board import Evaluation
from buffer.base import ReplayBuffer, RunBoard
from rollout_server.context import ServerContext
from rollout_server.engines.base import Generation, GenerationRequest
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.run_logger import RolloutLogger
from rollout_server.server import RolloutServer
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows import make_workflow

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

NAME = "rollout-0"
PRECISION: Precision = "bfloat16"
TAKE_TIMEOUT_S = 240.0
END_TIMEOUT_S = 30.0


class DrawnLengths(VllmEngine):
    """vLLM that ends every completion at the length that was drawn for its seed."""

    lengths: Mapping[int, int]
    """Tokens of the completion, by the seed of the request."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate as `VllmEngine` does, with another max_tokens."""
        assert request.seed is not None
        return await super().generate(replace(request, max_tokens=self.lengths[request.seed]))


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """A started engine that has its first weights, and everything else that outlives a round."""

    model: Path
    folder: Path
    """Gets the files of the rounds."""
    engine: DrawnLengths
    pool: RewardPool
    tokenizer: Tokenizer
    vocabulary: int
    redis: RedisConfig
    parameters: int

    @property
    def policy(self) -> str:
        """The model, in words."""
        return f"{self.parameters / 1e6:.3g}M parameters"

    async def whole(self, work: RolloutWork) -> RolloutRound:
        """A round through the whole server, from the start of its loops until the last batch is released.

        Raises BufferFault if groups are missing, WaitTimeout if they do not come.
        """
        self.engine.lengths = work.lengths_by_seed()
        config = self._config(work)
        state, board = await buffer.open_run(config), await buffer.connect_board(config.redis, config.name)
        try:
            for version in (0, config.steps):  # so nothing is left to evaluate
                await board.put_evaluation(Evaluation(version=version, prompts=0, samples=0, sampled_accuracy=0.0))
            epoch = (await state.rollback(0)).epoch  # as the trainer does when it begins
            async with _serving(self._context(work, config, state, board)):
                with Stopwatch() as spent, Stopwatch(time.process_time) as cpu:
                    groups = await _consume(state, epoch, config.steps)
                await state.end_run()
            await check_trained(state, work.groups, "round")
        finally:
            await state.aclose()
            await board.aclose()
            await buffer.wipe_run(config.redis, config.name)
        groups.sort(key=lambda group: group.task.index)
        return RolloutRound([s.length for group in groups for s in group.samples], spent.seconds, cpu.seconds)

    async def bare(self, work: RolloutWork) -> RolloutRound:
        """A round of bare vLLM, its slots always full."""
        return await self._plain(generate_continuously, work)

    async def waves(self, work: RolloutWork) -> RolloutRound:
        """A round of bare vLLM in waves."""
        return await self._plain(generate_in_waves, work)

    async def _plain(self, loop: Loop, work: RolloutWork) -> RolloutRound:
        requests = work.requests(self.vocabulary)
        with Stopwatch() as spent, Stopwatch(time.process_time) as cpu:
            tokens = await loop(self.engine.async_llm, requests, work.concurrency)
        return RolloutRound(tokens, spent.seconds, cpu.seconds)

    def _config(self, work: RolloutWork) -> RunConfig:
        """A run of this work alone."""
        steps = work.groups // work.groups_per_step
        return RunConfig.model_validate(
            {
                "name": f"bench-{uuid.uuid4().hex}",
                "runs_dir": self.folder,
                "seed": work.seed,
                "steps": steps,
                "max_staleness": steps - 1,
                "group_size": work.group_size,
                "groups_per_step": work.groups_per_step,
                "model": {"path": self.model},
                "sampling": {"max_tokens": work.lengths.longest},
                "rollout": {"max_concurrency": work.concurrency, "vllm": {"max_model_len": work.longest}},
                "redis": self.redis,
            }
        )

    def _context(self, work: RolloutWork, config: RunConfig, state: ReplayBuffer, board: RunBoard) -> ServerContext:
        return ServerContext(
            config=config,
            name=NAME,
            engine=self.engine,
            buffer=state,
            board=board,
            pool=self.pool,
            workflow=make_workflow(config.rollout, self.tokenizer),
            source=WorkSource(work, self.vocabulary),
            logger=RolloutLogger(config.run_dir, NAME, samples_every=config.telemetry.samples_every),
        )


@asynccontextmanager
async def _serving(context: ServerContext) -> AsyncIterator[None]:
    """A server that serves for the length of the block, which ends the run."""
    watcher = WeightWatcher(
        NoNews(),
        context.engine,
        interruption=context.config.rollout.interruption,
        update_timeout_s=context.config.weights.update_timeout_s,
        board=context.board,
        logger=context.logger,
    )
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(RolloutServer(context, watcher).serve())
            yield
            if not (await asyncio.wait([serving], timeout=END_TIMEOUT_S))[0]:
                raise WaitTimeout("the rollout server to see that the run has ended", END_TIMEOUT_S)
    finally:
        context.logger.close()


async def _consume(state: ReplayBuffer, epoch: int, steps: int) -> list[Group]:
    """All groups, batch after batch. No version is published in between: the weights stand still."""
    groups: list[Group] = []
    for version in range(steps):
        batch = await state.take_batch(epoch=epoch, version=version, timeout_s=TAKE_TIMEOUT_S)
        groups += batch.groups
        await state.release_batch(batch)
    return groups


class WorkSource:
    """The work as a stream of tasks."""

    def __init__(self, work: RolloutWork, vocabulary: int) -> None:
        self._work = work
        self._vocabulary = vocabulary
        self.dropped: Mapping[str, int] = {}

    def task(self, index: int) -> Task:
        return self._work.task(index, self._vocabulary)

    def held_out(self) -> list[Task]:
        return []


class NoNews:
    """A receiver for weights that stand still."""

    last_transfer_s = 0.0

    async def wait_for_newer_version(self, after: WeightVersion, timeout_s: float) -> WeightVersion:
        await asyncio.sleep(timeout_s)
        raise WaitTimeout("weights that stand still", timeout_s)

    @asynccontextmanager
    async def hold_newest(self) -> AsyncIterator[HeldWeights]:
        raise WaitTimeout("weights that stand still", 0.0)
        yield

    async def close(self) -> None: ...


@asynccontextmanager
async def open_setup(
    size: TinyQwen2Config, vocabulary: int, redis: RedisConfig, *, longest: int
) -> AsyncIterator[RolloutSetup]:
    """A random model of that size, for sequences of up to `longest` tokens. Raises EngineError,
    DependencyError."""
    run = f"bench-rollout-{uuid.uuid4().hex}"
    try:
        with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as name:
            folder = Path(name)
            model = folder / "model"
            store = _store_of(number_model(model, size, vocabulary, PRECISION), store_path(run, "weights"))
            parameters = sum(spec.nbytes for spec in store.layout.tensors) // 2
            config = RolloutConfig(vllm=VllmConfig(max_model_len=longest))
            engine = DrawnLengths(model, config, precision=PRECISION, seed=1, name="bench")
            async with RewardPool(RewardsConfig()) as pool:
                tokenizer = load_tokenizer(model)
                try:
                    await engine.start()
                    held = HeldWeights.in_store(store.path, epoch=0, version=0)
                    await engine.update_weights(held, interruption="keep")
                    yield RolloutSetup(model, folder, engine, pool, tokenizer, vocabulary, redis, parameters)
                finally:
                    await engine.aclose()
    finally:
        remove_stores(run)


def _store_of(model: Qwen2ForCausalLM, path: Path) -> WeightStore:
    """A store with version 0 of the weights, which the tickets ask for."""
    import torch

    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    store = WeightStore.create(path, make_layout([(name, PRECISION, list(t.shape)) for name, t in tensors.items()]))
    block = np.frombuffer(store.begin_write(), np.uint16)
    for spec in store.layout.tensors:
        values = tensors[spec.name].reshape(-1).view(torch.uint16).numpy()
        block[spec.offset // 2 : (spec.offset + spec.nbytes) // 2] = values
    store.commit_write(WeightVersion(0, 0))
    return store

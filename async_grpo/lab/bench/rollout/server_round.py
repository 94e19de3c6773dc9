"""One round through the whole rollout server, and the setup that all rounds share.

    WorkSource --tasks--> server --tickets--> RolloutServer --groups--> server --batches--> consumer

The context is real: Redis buffer and board, reward processes, engine, heartbeat, partials, logger. The weights do not
change (`ConstantWeights`), and the run's evaluations are already on the board, so nothing is evaluated. The staleness
window covers the whole round, so it never blocks. The round waits for the consumer, which the last inserted group
unblocks.

RolloutSetup has what all rounds share: a model, its engine, a reward pool.

    run_server_round   through the whole server     --+
    run_bare_round     bare vLLM, continuous loop   --+--> one engine
    run_wave_round     bare vLLM, in waves          --+
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
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
from async_grpo.lab.bench.sampling_masks import measure_bytes_per_token
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


class FixedLengthEngine(VllmEngine):
    """vLLM that ends every completion at the length drawn for its seed."""

    lengths: Mapping[int, int]
    """Tokens of each completion by the seed of its request."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate with the drawn length as max_tokens."""
        assert request.seed is not None
        return await super().generate(replace(request, max_tokens=self.lengths[request.seed]))


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """A started engine with its first weights, and everything else that all rounds share."""

    model: Path
    folder: Path
    """Folder for the files of the rounds."""
    engine: FixedLengthEngine
    pool: RewardPool
    tokenizer: Tokenizer
    vocabulary: int
    redis: RedisConfig
    parameters: int

    @property
    def policy(self) -> str:
        """Description of the model."""
        return f"{self.parameters / 1e6:.3g}M parameters"

    async def run_server_round(self, work: RolloutWork) -> RolloutRound:
        """Run a round through the whole server, from the start of its loops until the last batch is released.

        Raises BufferFault if groups are missing, WaitTimeout if they do not arrive.
        """
        self.engine.lengths = work.lengths_by_seed()
        config = self._build_config(work)
        state = await buffer.open_run(config)
        board = await buffer.connect_board(config.redis, config.name)
        try:
            for version in (0, config.steps):  # nothing is left to evaluate
                await board.put_evaluation(Evaluation(version=version, prompts=0, samples=0, sampled_accuracy=0.0))
            epoch = (await state.rollback(0)).epoch  # as the trainer does at its start
            async with _serving(self._build_context(work, config, state, board)):
                with Stopwatch() as spent, Stopwatch(time.process_time) as cpu:
                    groups = await _consume(state, epoch, config.steps)
                await state.end_run()
            await check_trained(state, work.groups, "round")
        finally:
            await state.aclose()
            await board.aclose()
            await buffer.wipe_run(config.redis, config.name)
        groups.sort(key=lambda group: group.task.index)
        samples = [sample for group in groups for sample in group.samples]
        masks = [mask for sample in samples if (mask := sample.sampling_mask()) is not None]
        lengths = [sample.length for sample in samples]
        return RolloutRound(
            lengths,
            spent.seconds,
            cpu.seconds,
            bytes_per_token=measure_bytes_per_token(groups),
            kept_per_token=sum(len(mask.token_ids) for mask in masks) / sum(lengths),
        )

    async def run_bare_round(self, work: RolloutWork) -> RolloutRound:
        """Run a round of bare vLLM with all slots always in use."""
        return await self._run_loop(generate_continuously, work)

    async def run_wave_round(self, work: RolloutWork) -> RolloutRound:
        """Run a round of bare vLLM in waves."""
        return await self._run_loop(generate_in_waves, work)

    async def _run_loop(self, loop: Loop, work: RolloutWork) -> RolloutRound:
        requests = work.requests(self.vocabulary)
        with Stopwatch() as spent, Stopwatch(time.process_time) as cpu:
            tokens = await loop(self.engine.async_llm, requests, work.concurrency)
        return RolloutRound(tokens, spent.seconds, cpu.seconds)

    def _build_config(self, work: RolloutWork) -> RunConfig:
        """Return the configuration of a run with this work only."""
        steps = work.groups // work.groups_per_step
        truncation = {} if work.truncation is None else asdict(work.truncation)
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
                "sampling": {"max_tokens": work.lengths.longest, **truncation},
                "rollout": {"max_concurrency": work.concurrency, "vllm": {"max_model_len": work.longest}},
                "redis": self.redis,
            }
        )

    def _build_context(
        self, work: RolloutWork, config: RunConfig, state: ReplayBuffer, board: RunBoard
    ) -> ServerContext:
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
    """Run a server for the duration of the block, which must end the run."""
    watcher = WeightWatcher(
        ConstantWeights(),
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
            done, _ = await asyncio.wait([serving], timeout=END_TIMEOUT_S)
            if not done:
                raise WaitTimeout("the rollout server to detect the end of the run", END_TIMEOUT_S)
    finally:
        context.logger.close()


async def _consume(state: ReplayBuffer, epoch: int, steps: int) -> list[Group]:
    """Take and release all batches and return their groups. No version is published: the weights do not change."""
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


class ConstantWeights:
    """A weight receiver that never receives a new version."""

    last_transfer_s = 0.0

    async def wait_for_newer_version(self, after: WeightVersion, timeout_s: float) -> WeightVersion:
        await asyncio.sleep(timeout_s)
        raise WaitTimeout("new weights, which this bench never publishes", timeout_s)

    @asynccontextmanager
    async def hold_newest(self) -> AsyncIterator[HeldWeights]:
        raise WaitTimeout("new weights, which this bench never publishes", 0.0)
        yield  # makes this a generator

    async def close(self) -> None: ...


@asynccontextmanager
async def open_setup(
    size: TinyQwen2Config, vocabulary: int, redis: RedisConfig, *, longest: int
) -> AsyncIterator[RolloutSetup]:
    """Open a setup with a random model for sequences of up to `longest` tokens.

    Raises EngineError, DependencyError.
    """
    run = f"bench-rollout-{uuid.uuid4().hex}"
    try:
        with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as name:
            folder = Path(name)
            model = folder / "model"
            store = _create_store(number_model(model, size, vocabulary, PRECISION), store_path(run, "weights"))
            parameters = sum(spec.nbytes for spec in store.layout.tensors) // 2
            config = RolloutConfig(vllm=VllmConfig(max_model_len=longest))
            engine = FixedLengthEngine(model, config, precision=PRECISION, seed=1, name="bench")
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


def _create_store(model: Qwen2ForCausalLM, path: Path) -> WeightStore:
    """Create a store with version 0 of the weights, which the tickets require."""
    import torch

    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    store = WeightStore.create(path, make_layout([(name, PRECISION, list(t.shape)) for name, t in tensors.items()]))
    block = np.frombuffer(store.begin_write(), np.uint16)
    for spec in store.layout.tensors:
        values = tensors[spec.name].reshape(-1).view(torch.uint16).numpy()
        block[spec.offset // 2 : (spec.offset + spec.nbytes) // 2] = values
    store.commit_write(WeightVersion(0, 0))
    return store

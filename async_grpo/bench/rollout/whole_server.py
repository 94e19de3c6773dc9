"""One round through the whole rollout server.

    Feeder --tasks--> server --tickets--> RolloutServer --groups--> server --batches--> consumer

The cast is the real one: Redis buffer and board, reward processes, engine, pulse, partials, diary. The weights
stand still (`NoNews`) and the run's evaluations are on the board already, so that nothing is evaluated. The
staleness window holds the whole round, so that it never blocks.

The round waits for the consumer; the last group that is inserted unblocks it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import buffer
from async_grpo.bench.rollout.pairs import Clock, Round
from async_grpo.bench.rollout.work import Work
from async_grpo.config import RunConfig
from async_grpo.config.buffer import RedisConfig
from async_grpo.data.source import Tokenizer
from async_grpo.errors import BufferFault, WaitTimeout
from async_grpo.rewards.pool import RewardPool
from async_grpo.weights.manifest import Identity
from async_grpo.wire import Group, Task
from async_grpo.wire.board import Evaluation
from buffer.board import RunBoard
from buffer.protocol import ReplayBuffer
from rollout_server.cast import Cast
from rollout_server.diary import Diary
from rollout_server.engines.protocol import Engine
from rollout_server.server import RolloutServer
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows import make_workflow

NAME = "rollout-0"
TAKE_TIMEOUT_S = 240.0
END_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What outlives a round. `folder` is for the files of the rounds."""

    model: Path
    folder: Path
    engine: Engine
    pool: RewardPool
    tokenizer: Tokenizer
    vocabulary: int
    redis: RedisConfig


async def through_the_server(around: Surroundings, work: Work) -> Round:
    """From the start of the server's loops until the last batch is released. Raises BufferFault if groups are
    missing, WaitTimeout if they do not come."""
    config = config_of(around, work)
    state, board = await buffer.open_run(config), await buffer.connect_board(config.redis, config.name)
    try:
        epoch = await _begin(config, state, board)
        async with _serving(_cast(around, work, config, state, board)):
            clock = Clock()
            groups = await _consume(state, epoch, config.steps)
            took = clock.stop()
            await state.end()
        await _check(state, work)
    finally:
        await state.aclose()
        await board.aclose()
        await buffer.wipe_run(config.redis, config.name)
    ordered = sorted(groups, key=lambda group: group.task.index)
    return Round([sample.length for group in ordered for sample in group.samples], *took)


def config_of(around: Surroundings, work: Work) -> RunConfig:
    """A run of this work alone."""
    steps = work.groups // work.groups_per_step
    return RunConfig.model_validate(
        {
            "name": f"bench-{uuid.uuid4().hex}",
            "runs_dir": around.folder,
            "seed": work.seed,
            "steps": steps,
            "max_staleness": steps - 1,
            "group_size": work.group_size,
            "groups_per_step": work.groups_per_step,
            "model": {"path": around.model},
            "sampling": {"max_tokens": work.lengths.longest},
            "rollout": {
                "max_concurrency": work.concurrency,
                "vllm": {"max_model_len": work.longest},
            },
            "redis": around.redis,
        }
    )


async def _begin(config: RunConfig, state: ReplayBuffer, board: RunBoard) -> int:
    """As the trainer does; returns its epoch."""
    for version in (0, config.steps):
        await board.put_evaluation(Evaluation(version=version, prompts=0, samples=0, sampled_accuracy=0.0))
    return (await state.rollback(0)).epoch


def _cast(around: Surroundings, work: Work, config: RunConfig, state: ReplayBuffer, board: RunBoard) -> Cast:
    return Cast(
        config=config,
        name=NAME,
        engine=around.engine,
        buffer=state,
        board=board,
        pool=around.pool,
        workflow=make_workflow(config.rollout, around.tokenizer),
        source=WorkSource(work, around.vocabulary),
        diary=Diary(config.run_dir, NAME, samples_every=config.telemetry.samples_every),
    )


@asynccontextmanager
async def _serving(cast: Cast) -> AsyncIterator[None]:
    """The server serves for the length of the block, which ends the run."""
    watcher = WeightWatcher(
        NoNews(),
        cast.engine,
        store=Path("unused"),
        interruption=cast.config.rollout.interruption,
        update_timeout_s=cast.config.weights.update_timeout_s,
        diary=cast.diary,
    )
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(RolloutServer(cast, watcher).serve())
            yield
            if not (await asyncio.wait([serving], timeout=END_TIMEOUT_S))[0]:
                raise WaitTimeout("the rollout server to see that the run has ended", END_TIMEOUT_S)
    finally:
        cast.diary.close()


async def _consume(state: ReplayBuffer, epoch: int, steps: int) -> list[Group]:
    """Batch after batch. No version is published in between: the weights stand still."""
    groups: list[Group] = []
    for version in range(steps):
        batch = await state.take(epoch=epoch, version=version, timeout_s=TAKE_TIMEOUT_S)
        groups += batch.groups
        await state.release(batch)
    return groups


async def _check(state: ReplayBuffer, work: Work) -> None:
    stats = await state.stats()
    if not stats.balanced or stats.released["trained"] != work.groups:
        raise BufferFault(f"the round over {work.groups} groups ended with {stats}: groups are missing")


class WorkSource:
    """The work as a stream of tasks."""

    def __init__(self, work: Work, vocabulary: int) -> None:
        self._work = work
        self._vocabulary = vocabulary
        self.dropped: Mapping[str, int] = {}

    def task(self, index: int) -> Task:
        return self._work.task(index, self._vocabulary)

    def held_out(self) -> list[Task]:
        return []


class NoNews:
    """A receiver for weights that stand still."""

    async def next_version(self, after: Identity, timeout_s: float) -> Identity:
        await asyncio.sleep(timeout_s)
        raise WaitTimeout("weights that stand still", timeout_s)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Identity]:
        raise WaitTimeout("weights that stand still", 0.0)
        yield

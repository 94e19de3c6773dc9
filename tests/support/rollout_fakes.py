"""In-memory fakes for the parts around a rollout server, controlled by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, dump
from async_grpo.data.base import make_task
from async_grpo.errors import WaitTimeout
from async_grpo.rewards.base import RewardFailure, RewardInput, RewardResult
from async_grpo.rewards.pool import RewardPool
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire import Task, VersionSpan
from buffer import BufferStats, InMemoryBoard, InMemoryBuffer, ReplayBuffer, RunBoard
from rollout_server.context import ServerContext
from rollout_server.dispatch.admission import TaskFeeder
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.engines.base import (
    Engine,
    EngineLoad,
    Generation,
    GenerationRequest,
    Interruption,
    UpdateTimes,
)
from rollout_server.engines.proof import LogprobProof
from rollout_server.run_logger import RolloutLogger
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows import SingleTurn
from tests.support.tokenizers import Bytes


class FakeEngine:
    """Answers `answer(request)` immediately, or with `hold` when the test calls `release`."""

    def __init__(self, answer: Callable[[GenerationRequest], str] = lambda request: "yes") -> None:
        self.answer = answer
        self.version = 0
        self.requests: list[GenerationRequest] = []
        self.versions: list[int] = []
        self.held: dict[str, asyncio.Future[None]] = {}
        self.hold = False
        self.stuck = False
        self.error: Exception | None = None
        self.running = 0
        self.peak = 0
        self.tokens = 0
        self.streamed = 0
        self.updates: list[int] = []
        self.asleep = False

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        self.versions.append(self.version)
        self.running += 1
        self.peak = max(self.peak, self.running)
        version = self.version
        try:
            await self._wait(request.request_id)
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        tokens = np.frombuffer(self.answer(request).encode(), np.uint8).astype(np.int32)[: request.max_tokens]
        self.tokens += len(tokens)
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Generation(tokens, logprobs, [VersionSpan(version, 0, len(tokens))], "stop")

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        self.requests.append(request)
        self.running += 1
        try:
            await self._wait(request.request_id)
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        tokens = self.answer(request).encode()[: request.max_tokens]
        for count, token in enumerate(tokens, start=1):
            self.streamed += 1
            reason = "stop" if count == len(tokens) else ""
            logprob = np.full(1, -0.5, np.float32)
            yield Generation(np.array([token], np.int32), logprob, [VersionSpan(self.version, 0, 1)], reason)

    async def _wait(self, request_id: str) -> None:
        if not self.hold:
            await asyncio.sleep(0)
            return
        self.held[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.held[request_id]
        finally:
            self.held.pop(request_id, None)

    def peek(self, request_id: str) -> Generation | None:
        return None

    def release(self, *request_ids: str) -> None:
        for request_id in request_ids or list(self.held):
            self.held.pop(request_id).set_result(None)

    async def update_weights(self, weights: HeldWeights, *, interruption: str) -> UpdateTimes:
        await asyncio.sleep(3600.0 if self.stuck else 0)
        self.version = weights.version
        self.updates.append(weights.version)
        return UpdateTimes(pause_s=0.01, load_s=0.004)

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> None:
        return None

    description = "a fake engine"
    note = ""

    def load(self) -> EngineLoad:
        return EngineLoad(self.running, 0, self.tokens, streamed_tokens=self.streamed)

    async def sleep(self) -> None:
        await asyncio.sleep(3600.0 if self.stuck else 0)
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...


class FakeReceiver:
    """Weights that the test publishes."""

    last_transfer_s = 0.3

    def __init__(self, *identities: WeightVersion) -> None:
        self.newest = max(identities, default=None)
        self.held = False
        self._changed = asyncio.Condition()

    async def publish(self, epoch: int, version: int) -> None:
        async with self._changed:
            self.newest = WeightVersion(epoch, version)
            self._changed.notify_all()

    async def wait_for_newer_version(self, after: WeightVersion, timeout_s: float) -> WeightVersion:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.newest is not None and self.newest > after)
        except TimeoutError:
            raise WaitTimeout("weights", timeout_s) from None
        assert self.newest is not None
        return self.newest

    @asynccontextmanager
    async def hold_newest(self) -> AsyncIterator[HeldWeights]:
        assert self.newest is not None
        self.held = True
        yield HeldWeights.in_store(Path("/dev/shm/unused"), epoch=self.newest.epoch, version=self.newest.version)
        self.held = False

    async def close(self) -> None: ...


class FakePool:
    """Reward 1 if the completion is the answer, 0 if not, unverifiable if it is "?". Extraction fails for "!"."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None

    async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        if self.gate is not None:
            await self.gate.wait()
        return [self._verdict(item.completion, item.answer) for item in items]

    def explain_missing_extraction(self, name: str) -> str | None:
        return None if name == "answer_tag" else f"{name} has none"

    async def extract_answers(self, name: str, completions: Sequence[str]) -> list[str | RewardFailure | None]:
        special = {"?": None, "!": RewardFailure("extraction", "ValueError: no")}
        return [special.get(completion, completion) for completion in completions]

    def _verdict(self, completion: str, answer: str) -> RewardResult:
        if completion == "?":
            failed = RewardFailure("raised", "cannot say")
            return RewardResult({}, None, {"answer_tag": failed}, failed.kind, failed.reason)
        score = float(completion == answer)
        return RewardResult(scores={"answer_tag": score}, reward=score)


class YesSource:
    """Tasks with the answer "yes"."""

    dropped: dict[str, int] = {}

    def task(self, index: int) -> Task:
        return make_task(index, f"p{index}", [1, 2, 3], "yes")

    def held_out(self) -> list[Task]:
        return [make_task(index, f"held{index}", [4, 5, 6], "yes") for index in range(4)]


def config_of(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": {"random": {}},
            "steps": 4,
            "max_staleness": 1,
            "group_size": 4,
            "groups_per_step": 2,
            "sampling": {"max_tokens": 8},
            "rollout": {"max_concurrency": 8},
            "eval": {"prompts": 4, "samples": 2},
            **changes,
        }
    )


def leave_run_folder(config: RunConfig) -> RunFolder:
    """Make a run folder with a configuration file only."""
    folder = RunFolder(config.run_dir)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(dump(config))
    return folder


def buffer_of(config: RunConfig) -> InMemoryBuffer:
    return InMemoryBuffer(policy=config.replay_policy, lease_s=config.lease_s, max_attempts=config.rollout.max_attempts)


def context_of(
    tmp_path: Path,
    config: RunConfig,
    engine: FakeEngine | Engine,
    buffer: InMemoryBuffer | None = None,
    board: InMemoryBoard | None = None,
    name: str = "rollout-0",
) -> ServerContext:
    return ServerContext(
        config=config,
        name=name,
        engine=cast(Any, engine),
        buffer=buffer or buffer_of(config),
        board=board or InMemoryBoard(),
        pool=cast(RewardPool, FakePool()),
        workflow=SingleTurn(Bytes()),
        source=YesSource(),
        logger=RolloutLogger(tmp_path, name, samples_every=1),
        proof=LogprobProof((1.0, 0.5), 16, 3e-6),
    )


def watcher_of(
    context: ServerContext,
    receiver: FakeReceiver,
    update_timeout_s: float = 5.0,
    interruption: Interruption = "keep",
    board: RunBoard | None = None,
) -> WeightWatcher:
    return WeightWatcher(
        receiver,
        context.engine,
        interruption=interruption,
        update_timeout_s=update_timeout_s,
        board=board or context.board,
        logger=context.logger,
    )


@asynccontextmanager
async def dispatching(
    context: ServerContext, receiver: FakeReceiver | None = None
) -> AsyncIterator[tuple[Dispatcher, asyncio.Task[None]]]:
    """Run a dispatcher with feeder and weights; yields it and its task. It is stopped as by SIGTERM after the block."""
    receiver = receiver or FakeReceiver(WeightVersion(1, 0))
    watcher = watcher_of(context, receiver, interruption=context.config.rollout.interruption)
    await watcher.wait_for_initial_weights(1.0)
    feeder = TaskFeeder(context.buffer, context.source, target=64)
    dispatcher = Dispatcher(context, watcher, feeder)
    loops = [asyncio.create_task(loop) for loop in (watcher.run_updating(), feeder.run_feeding())]
    running = asyncio.create_task(dispatcher.run_until_end())
    try:
        yield dispatcher, running
    finally:
        for task in (running, *loops):
            task.cancel()
        await asyncio.gather(running, *loops, return_exceptions=True)


async def until_buffer(buffer: ReplayBuffer, condition: Callable[[BufferStats], bool]) -> None:
    """Wait until the buffer's statistics fulfil the condition."""
    async with asyncio.timeout(5.0):
        while not condition(await buffer.stats()):
            await asyncio.sleep(0.001)

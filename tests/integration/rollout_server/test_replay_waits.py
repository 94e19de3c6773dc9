"""Servers wait for weights while a trainer repeats its steps after a crash, on the real buffer and board."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import AsyncGrpoError, WaitTimeout
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire.board import ReplayProgress
from buffer import RedisBuffer, RunBoard, connect, connect_board
from rollout_server import weight_watcher
from rollout_server.weight_watcher import WeightWatcher
from tests.support.buffer_cases import policy
from tests.support.rollout_fakes import FakeEngine, FakeReceiver, config_of, context_of, watcher_of

SAVED, HEAD = 2, 8
TIMEOUT_S, STEP_S = 0.6, 0.3
"""Timeout of a server and duration of a step: all steps together take three times as long as the timeout."""


@dataclass
class SlowTrainer:
    """Resumes at version SAVED of a run that was at HEAD, and repeats its steps."""

    buffer: RedisBuffer
    board: RunBoard
    receiver: FakeReceiver
    stops_at: int = HEAD

    async def run(self) -> None:
        resume = await self.buffer.rollback(SAVED)
        assert resume.head_version == HEAD
        for version in range(SAVED, self.stops_at + 1):
            await asyncio.sleep(STEP_S)
            await self.board.report_replay(
                ReplayProgress(epoch=resume.epoch, version=version, target=resume.head_version)
            )
        if self.stops_at == HEAD:
            await self.receiver.publish(resume.epoch, HEAD)


@asynccontextmanager
async def crashed_run(redis: RedisConfig) -> AsyncIterator[tuple[RedisBuffer, RunBoard]]:
    run = uuid.uuid4().hex
    buffer = await connect(redis, run, policy=policy(), lease_s=30.0, max_attempts=3)
    board = await connect_board(redis, run)
    epoch = (await buffer.rollback(0)).epoch
    for version in range(HEAD + 1):
        await buffer.publish_version(epoch=epoch, version=version)
    await board.report_replay(ReplayProgress(epoch=epoch, version=0, target=0))  # as every trainer reports at its start
    try:
        yield buffer, board
    finally:
        await buffer.aclose()
        await board.aclose()


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_watcher, "BOARD_POLL_S", 0.05)


def server(folder: Path, receiver: FakeReceiver, board: RunBoard) -> WeightWatcher:
    return watcher_of(context_of(folder, config_of(), FakeEngine()), receiver, board=board)


async def test_a_starting_server_waits_while_a_replay_advances(tmp_path: Path, redis_config: RedisConfig) -> None:
    receiver = FakeReceiver()
    async with crashed_run(redis_config) as (buffer, board), asyncio.TaskGroup() as tasks:
        started_s = time.monotonic()
        tasks.create_task(SlowTrainer(buffer, board, receiver).run())
        await server(tmp_path, receiver, board).wait_for_initial_weights(TIMEOUT_S)
        assert time.monotonic() - started_s > 2 * TIMEOUT_S


async def test_waiting_for_the_newest_version_lasts_while_a_replay_advances(
    tmp_path: Path, redis_config: RedisConfig
) -> None:
    receiver = FakeReceiver(WeightVersion(1, HEAD - 1))
    async with crashed_run(redis_config) as (buffer, board):
        watcher = server(tmp_path, receiver, board)
        await watcher.wait_for_initial_weights(TIMEOUT_S)
        loops = [
            asyncio.create_task(loop) for loop in (watcher.run_updating(), SlowTrainer(buffer, board, receiver).run())
        ]
        await watcher.wait_for_version(HEAD, TIMEOUT_S)
        for loop in loops:
            loop.cancel()


async def test_a_stalled_replay_ends_the_wait_and_is_described(tmp_path: Path, redis_config: RedisConfig) -> None:
    receiver = FakeReceiver()
    async with crashed_run(redis_config) as (buffer, board), asyncio.TaskGroup() as tasks:
        tasks.create_task(SlowTrainer(buffer, board, receiver, stops_at=SAVED + 3).run())
        with pytest.raises(WaitTimeout, match=rf"version {SAVED + 3} of {HEAD}.*launch\.ready_timeout_s"):
            await server(tmp_path, receiver, board).wait_for_initial_weights(TIMEOUT_S)
        with pytest.raises(WaitTimeout, match=rf"version {SAVED + 3} of {HEAD}.*weights\.update_timeout_s"):
            await server(tmp_path, receiver, board).wait_for_version(HEAD, TIMEOUT_S)


async def test_the_last_report_of_a_dead_trainer_extends_no_wait(tmp_path: Path, redis_config: RedisConfig) -> None:
    async with crashed_run(redis_config) as (_, board):
        await board.report_replay(ReplayProgress(epoch=5, version=3, target=HEAD))
        started_s = time.monotonic()
        with pytest.raises(WaitTimeout, match=f"version 3 of {HEAD}.*not advanced"):
            await server(tmp_path, FakeReceiver(), board).wait_for_initial_weights(TIMEOUT_S)
        assert time.monotonic() - started_s < 3 * TIMEOUT_S


async def test_a_silent_board_is_neither_an_advance_nor_an_error(tmp_path: Path) -> None:
    class Silent:
        async def replay_progress(self) -> ReplayProgress | None:
            raise AsyncGrpoError("no answer")

    with pytest.raises(WaitTimeout, match=r"weights\.bind"):
        await server(tmp_path, FakeReceiver(), Silent()).wait_for_initial_weights(TIMEOUT_S)  # type: ignore[arg-type]

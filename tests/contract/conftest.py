"""Every test of the contract runs on each implementation."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from async_grpo.config.buffer import RedisConfig
from async_grpo.staleness import ReplayPolicy
from buffer import InMemoryBoard, InMemoryBuffer, ReplayBuffer, RunBoard, connect, connect_board
from tests.support.buffer_cases import Open, policy, tasks


@pytest.fixture(params=["memory", "redis"])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def open_buffer(implementation: str, redis_config: RedisConfig) -> AsyncIterator[Open]:
    """Opens a run: tasks are there, a trainer has taken over in epoch 1 and published version 0."""
    async with AsyncExitStack() as stack:

        async def opened(
            replay_policy: ReplayPolicy | None = None, *, lease_s: float = 30.0, put: int = 100, **options: Any
        ) -> ReplayBuffer:
            replay_policy = replay_policy or policy()
            options = {"max_attempts": 3, "lease_s": lease_s, **options}
            buffer: ReplayBuffer
            if implementation == "memory":
                buffer = InMemoryBuffer(replay_policy, **options)
            else:
                buffer = await connect(redis_config, uuid.uuid4().hex, policy=replay_policy, **options)
            stack.push_async_callback(buffer.aclose)
            if put:
                await buffer.put_tasks(tasks(0, put))
            await buffer.rollback(0)
            return buffer

        yield opened


@pytest.fixture
async def board(implementation: str, redis_config: RedisConfig) -> AsyncIterator[RunBoard]:
    board: RunBoard = InMemoryBoard()
    if implementation == "redis":
        board = await connect_board(redis_config, uuid.uuid4().hex)
    yield board
    await board.aclose()

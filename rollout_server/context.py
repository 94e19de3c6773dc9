"""What the nouns of one rollout server share."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.data.base import TaskSource
from async_grpo.rewards.pool import RewardPool
from buffer.base import ReplayBuffer, RunBoard
from rollout_server.engines.base import Engine
from rollout_server.run_logger import RolloutLogger
from rollout_server.workflows import Workflow


@dataclass(frozen=True, slots=True)
class ServerContext:
    """`name` is this server's, unique in the run; it holds leases and claims."""

    config: RunConfig
    name: str
    engine: Engine
    buffer: ReplayBuffer
    board: RunBoard
    pool: RewardPool
    workflow: Workflow
    source: TaskSource
    logger: RolloutLogger

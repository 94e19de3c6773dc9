"""What the parts of one rollout server share, and what an evaluation needs of it."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.data.base import TaskSource
from async_grpo.rewards.pool import RewardPool
from buffer.base import ReplayBuffer, RunBoard
from buffer.holders import holder_name
from rollout_server.engines.base import Engine, Sampler
from rollout_server.engines.proof import LogprobProof
from rollout_server.run_logger import RolloutLogger
from rollout_server.workflows import Workflow


@dataclass(frozen=True, slots=True)
class EvalContext:
    """What `EvalRunner` needs; `async-grpo eval` builds one without a server.

    The engine is a `Sampler` only: it may also be the servers of a live run behind HTTP.
    """

    config: RunConfig
    name: str
    engine: Sampler
    pool: RewardPool
    workflow: Workflow
    source: TaskSource


@dataclass(frozen=True, slots=True)
class ServerContext(EvalContext):
    """The parts of a rollout server. `name` is unique in the run: claims are held under it."""

    engine: Engine
    buffer: ReplayBuffer
    board: RunBoard
    logger: RolloutLogger
    proof: LogprobProof | None = None
    """How the engine's log-probabilities were checked; None: it does not sample."""
    vocabulary: int | None = None
    """Token ids of the model are below it; None: unknown."""
    life: int = 0
    """Unix time in milliseconds of the server's start, which tells it from an earlier one of its name."""

    @property
    def holder(self) -> str:
        """The holder of this server's leases."""
        return holder_name(self.name, self.life)

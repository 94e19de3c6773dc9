"""Parts of a rollout server, as they are passed to each other, and the subset that an evaluation needs."""

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
    """Parts for `EvalRunner`; `async-grpo eval` builds one without a server.

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
    """Parts of a rollout server. `name` is unique in the run, and identifies the owner of a claim."""

    engine: Engine
    buffer: ReplayBuffer
    board: RunBoard
    logger: RolloutLogger
    proof: LogprobProof | None = None
    """Result of the check of the engine's log-probabilities; None if the engine does not sample."""
    vocabulary: int | None = None
    """Size of the model's vocabulary: token ids are below it. None if unknown."""
    life: int = 0
    """Start of the server in Unix milliseconds; distinguishes it from an earlier server with its name."""

    @property
    def holder(self) -> str:
        """Name under which the buffer stores this server's leases."""
        return holder_name(self.name, self.life)

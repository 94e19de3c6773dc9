"""Settings of a crash run, and the locations of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from async_grpo.config.buffer import RedisConfig
from async_grpo.staleness import ReplayPolicy
from buffer import RedisBuffer, connect

RUN = "crashes"
PRODUCERS = tuple(f"producer-{number}" for number in range(4))
TRAINERS = ("trainer-0", "trainer-1")
WATCHER = "watcher"

LEASE_S = 0.5
MAX_ATTEMPTS = 5
SERVER_TIMEOUT_S = 20.0
"""Seconds for which a call is repeated while the server is down."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a crash run.

    `server_kills`: includes the last one, when all workers are killed too. `pause_s`: minimum and maximum time between
    two kills. `retune`: policies to set live, in turn, at every tenth kill. `cut_bytes`: number of bytes that the
    server's file loses at each of its deaths, as after a power failure.
    """

    folder: Path
    policy: ReplayPolicy
    seed: int
    kills: int
    server_kills: int
    fsync: Literal["always", "everysec"] = "always"
    pause_s: tuple[float, float] = (0.3, 1.0)
    retune: Sequence[ReplayPolicy] = ()
    cut_bytes: int = 0

    @property
    def journals(self) -> Path:
        """Folder with one file per process."""
        return self.folder / "journals"

    @property
    def checkpoints(self) -> Path:
        """Folder with one file per checkpoint, named by its version."""
        return self.folder / "checkpoints"

    @property
    def server(self) -> Path:
        """Folder of the embedded server."""
        return self.folder / "server"

    @property
    def policies(self) -> list[ReplayPolicy]:
        """All policies of the run."""
        return [self.policy, *self.retune]


async def join_run(plan: Plan, url: str) -> RedisBuffer:
    """Connect to the run."""
    redis = RedisConfig(url=url, timeout_s=SERVER_TIMEOUT_S)
    return await connect(redis, RUN, policy=plan.policy, lease_s=LEASE_S, max_attempts=MAX_ATTEMPTS)

"""What a crash run is to do, and where its files are."""

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
"""How long a call is repeated while the server is away."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`server_kills`: the last of them is when everybody is killed at once. `pause_s`: shortest and longest
    time between two kills. `retune`: policies that are set live, in turn, at every tenth kill. `cut_bytes`:
    the server's file loses this many bytes at each of its deaths, as if the machine had lost power."""

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
        """A file a process."""
        return self.folder / "journals"

    @property
    def checkpoints(self) -> Path:
        """A file a checkpoint, whose name is the version."""
        return self.folder / "checkpoints"

    @property
    def server(self) -> Path:
        """The folder of the embedded server."""
        return self.folder / "server"

    @property
    def policies(self) -> list[ReplayPolicy]:
        """Every policy that may be effective at some moment."""
        return [self.policy, *self.retune]


async def join(plan: Plan, url: str) -> RedisBuffer:
    """The run, as every process of it reaches it."""
    redis = RedisConfig(url=url, timeout_s=SERVER_TIMEOUT_S)
    return await connect(redis, RUN, policy=plan.policy, lease_s=LEASE_S, max_attempts=MAX_ATTEMPTS)

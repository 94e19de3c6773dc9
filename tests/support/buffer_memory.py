"""Whether the server's memory and its file stay flat while many groups go through the buffer.

    producers --admit, insert--> server --take, release, commit_checkpoint--> trainer
    when a round is through and its answers have expired: look at memory, keys, file

All in one process, on an embedded server of its own with a run's defaults. Every look is at the same
state: nothing waits, nothing is in flight, every step is committed, every producer has hung up. What may still
grow is bounded: the newest 4,096 endings (reached in the first round), and counters by reason and by
power of two.

    python -m tests.support.buffer_memory --groups 50000 --large-groups 2000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import WaitTimeout
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.wire import Group, Sample, Task, Ticket, VersionSpan, tokens_to_bytes
from buffer import EmbeddedServer, ReplayBuffer, connect, make_client

S = 2
P = 16
LANES = 8
AT_ONCE = 4
LEASE_S = 1.0
"""Answers to `admit_groups` are kept for as long, too."""
CHECKPOINT_EVERY = 10
WAIT_S = 60.0
SMALL = (1, 500)
LARGE = (8, 4300)
"""Samples of a group, and tokens of a sample: 4 KB and 276 KB."""
MB = 1e6


@dataclass(frozen=True, slots=True)
class Look:
    """The server when it has nothing to do. `rss_mb` is what the allocator holds of the machine."""

    groups: int
    group_kb: float
    used_mb: float
    rss_mb: float
    keys: int
    file_mb: float
    most_file_mb: float
    """The largest since the look before, and so is the next."""
    most_used_mb: float
    groups_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.groups:>8,} {self.group_kb:>8.0f} {self.used_mb:>9.3f} {self.most_used_mb:>9.1f} "
            f"{self.rss_mb:>8.1f} {self.keys:>5} {self.file_mb:>8.1f} {self.most_file_mb:>8.1f} "
            f"{self.groups_per_s:>9.0f}"
        )


HEADER = "  groups KB/group   used MB  (peak MB)   rss MB  keys  file MB (peak MB) groups/s"


class MemoryRun:
    """One run of the buffer, round by round, each over connections of its own."""

    def __init__(self, redis: RedisConfig, client: Any, folder: Path) -> None:
        self._redis = redis
        self._client = client
        self._folder = folder
        self._done = self._version = 0
        self._most_file = self._most_used = 0

    async def round(self, groups: int, shape: tuple[int, int]) -> Look:
        """So many groups (a multiple of P) from their tasks to their checkpoint, and the look afterwards."""
        began_s = time.monotonic()
        maker = Maker(shape)
        self._most_file = self._most_used = 0
        left = [AT_ONCE] * (groups // AT_ONCE)
        policy = ReplayPolicy(StalenessWindow(max_staleness=S, groups_per_step=P, horizon=1 << 40))
        buffer = await connect(self._redis, "memory", policy=policy, lease_s=LEASE_S, max_attempts=3)
        async with asyncio.TaskGroup() as working:
            working.create_task(self._feed(buffer, groups))
            for _ in range(LANES):
                working.create_task(self._produce(buffer, left, maker))
            working.create_task(self._train(buffer, groups // P))
        await buffer.aclose()
        self._done += groups
        took_s = time.monotonic() - began_s
        await self._wait_for_rest()
        await self._client.slowlog_reset()  # of the server's own: up to 128 commands, which a busy machine fills
        memory = await self._client.info("memory")
        return Look(
            groups=self._done,
            group_kb=shape[0] * shape[1] * 8 / 1e3,
            used_mb=memory["used_memory"] / MB,
            rss_mb=memory["used_memory_rss"] / MB,
            keys=await self._count_keys(),
            file_mb=self._file_bytes() / MB,
            most_file_mb=self._most_file / MB,
            most_used_mb=self._most_used / MB,
            groups_per_s=groups / took_s,
        )

    async def _feed(self, buffer: ReplayBuffer, groups: int) -> None:
        for first in range(self._done, self._done + groups, P):
            await buffer.put_tasks([_task(index) for index in range(first, first + P)])

    async def _produce(self, buffer: ReplayBuffer, left: list[int], maker: Maker) -> None:
        while left:
            room = left.pop()
            while room:
                tickets = await buffer.admit_groups(room, holder="producer", timeout_s=WAIT_S)
                await asyncio.gather(*(buffer.insert_group(ticket, maker.group(ticket)) for ticket in tickets))
                room -= len(tickets)

    async def _train(self, buffer: ReplayBuffer, steps: int) -> None:
        epoch = (await buffer.rollback(self._version)).epoch
        for step in range(steps):
            batch = await buffer.take_batch(epoch=epoch, version=self._version, timeout_s=WAIT_S)
            self._version += 1
            await buffer.publish_version(epoch=epoch, version=self._version)
            await buffer.release_batch(batch)
            if self._version % CHECKPOINT_EVERY == 0 or step == steps - 1:
                self._most_file = max(self._most_file, self._file_bytes())
                self._most_used = max(self._most_used, (await self._client.info("memory"))["used_memory"])
                await buffer.commit_checkpoint(epoch=epoch, version=self._version)

    async def _wait_for_rest(self) -> None:
        """The answers of admit have expired, and no rewrite of the file is running."""
        async with _bounded("the server to come to rest"):
            while [name async for name in self._client.scan_iter(match="*:grant:*", count=1000)] or (
                await self._client.info("persistence")
            )["aof_rewrite_in_progress"]:
                await asyncio.sleep(0.1)

    async def _count_keys(self) -> int:
        """Number of keys, without the remembered answers of `rollback`: one per start of a trainer, for an hour."""
        answers = [name async for name in self._client.scan_iter(match="*:rollback:*", count=1000)]
        return int(await self._client.dbsize()) - len(answers)

    def _file_bytes(self) -> int:
        total = 0
        for path in self._folder.rglob("*.aof"):
            with contextlib.suppress(FileNotFoundError):  # a rewrite has just replaced it
                total += path.stat().st_size
        return total


class Maker:
    """Groups of one size: always the same random bytes, for what is measured is the server."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._samples, self._tokens = shape
        self._bytes = random.Random(0).randbytes(4 * self._tokens)

    def group(self, ticket: Ticket) -> Group:
        """Finished, with tokens of the ticket's version."""
        spans = [VersionSpan(ticket.version, 0, self._tokens)]
        sample = Sample(tokens=self._bytes, logprobs=self._bytes, spans=spans, reward=1.0)
        return Group(seq=ticket.seq, attempt=ticket.attempt, task=ticket.task, samples=[sample] * self._samples)


async def measure(folder: Path, url: str, rounds: Sequence[tuple[int, tuple[int, int]]]) -> AsyncIterator[Look]:
    """A look after every round of (groups, shape)."""
    redis = RedisConfig(url=url)
    client = make_client(redis)
    run = MemoryRun(redis, client, folder)
    try:
        for groups, shape in rounds:
            yield await run.round(groups, shape)
    finally:
        await client.aclose()


def run_rounds(rounds: Sequence[tuple[int, tuple[int, int]]]) -> list[Look]:
    """All looks, printed as they are made."""
    looks: list[Look] = []

    async def work(folder: Path, url: str) -> None:
        async for look in measure(folder, url, rounds):
            print(look, flush=True)
            looks.append(look)

    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        server = EmbeddedServer(Path(name) / "server", RedisConfig())
        try:
            uvloop.run(work(Path(name), server.start()))
        finally:
            server.stop()
    print("groups -> used MB: " + ", ".join(f"{look.groups / 1000:g}k {look.used_mb:.2f}" for look in looks))
    return looks


@contextlib.asynccontextmanager
async def _bounded(waited_for: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WAIT_S):
            yield
    except TimeoutError:
        raise WaitTimeout(waited_for, WAIT_S) from None


def _task(index: int) -> Task:
    return Task(index=index, prompt="?", prompt_tokens=tokens_to_bytes([1]), answer="!")


def rounds_of(groups: int, large_groups: int, looks: int) -> list[tuple[int, tuple[int, int]]]:
    """`looks` rounds of small groups, two of large ones, and one of small ones again."""
    small = groups // looks // P * P
    large = large_groups // 2 // P * P
    return [(small, SMALL)] * looks + [(large, LARGE)] * 2 + [(small, SMALL)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="buffer_memory", description=__doc__)
    parser.add_argument("--groups", type=int, default=50_000)
    parser.add_argument("--large-groups", type=int, default=2_000)
    options = parser.parse_args()
    run_rounds(rounds_of(options.groups, options.large_groups, looks=10))
    return 0


if __name__ == "__main__":
    sys.exit(main())

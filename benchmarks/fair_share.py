"""`python -m benchmarks.fair_share`: groups/s of 1, 2 and 4 rollout servers that could each fill the staleness window.

    trainer --take, publish, release--> buffer (real Valkey) <--admit, insert-- servers (asyncio tasks)

A server imitates an engine whose steps get slower with every running group: `STEP_S + GROUP_S * groups` seconds per
piece of a completion. So one server with the whole window is slower than several that share it. The baseline is greedy
admission, where the first server to request groups gets the whole window: the same code, but it ignores the other
waiting servers. Both rules alternate on the same Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import RunEnded, WaitTimeout
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.wire import Group, Sample, Task, Ticket, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from buffer import EmbeddedServer, RedisBuffer, connect
from buffer.base import ReplayBuffer

GROUPS_PER_STEP = 8
MAX_STALENESS = 1
SLOTS = (MAX_STALENESS + 1) * GROUPS_PER_STEP
"""Groups that one server can generate concurrently: the whole window."""
STEP_S = 0.03
GROUP_S = 0.02
MIN_PIECES = 2
MAX_PIECES = 6
WARMUP_STEPS = 4


class GenerationServer:
    """Generates up to SLOTS groups concurrently. The time of a piece grows with the number of groups."""

    def __init__(self, name: str, buffer: ReplayBuffer, seed: int) -> None:
        self.name = name
        self._buffer = buffer
        self._random = random.Random(seed)
        self._running = 0
        self._slot_freed = asyncio.Event()

    async def run(self) -> None:
        """Generate until the run ends."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                while self._running >= SLOTS:
                    self._slot_freed.clear()
                    await self._slot_freed.wait()
                try:
                    tickets = await self._buffer.admit_groups(
                        SLOTS - self._running, holder=self.name, timeout_s=1.0, slots=SLOTS
                    )
                except WaitTimeout:
                    continue
                except RunEnded:
                    return
                for ticket in tickets:
                    self._running += 1
                    tasks.create_task(self._generate_group(ticket))

    async def _generate_group(self, ticket: Ticket) -> None:
        for _ in range(self._random.randint(MIN_PIECES, MAX_PIECES)):
            await asyncio.sleep(STEP_S + GROUP_S * self._running)
        await self._buffer.insert_group(ticket, make_group(ticket, self.name))
        self._running -= 1
        self._slot_freed.set()


def make_group(ticket: Ticket, server: str) -> Group:
    """Make a group of two samples of one token."""
    sample = Sample(
        tokens=tokens_to_bytes([7]),
        logprobs=logprobs_to_bytes([-0.5]),
        spans=[VersionSpan(ticket.version, 0, 1)],
        finish_reason="stop",
    )
    return Group(seq=ticket.seq, attempt=ticket.attempt, task=ticket.task, samples=[sample, sample], server=server)


def admit_without_others(buffer: RedisBuffer) -> None:
    """Make `buffer` request groups as if no other server were waiting: the greedy rule."""
    admit_fairly = buffer._try_to_admit

    async def admit_greedily(request):  # type: ignore[no-untyped-def]
        # Room is reserved only for servers that have sent a request after this value of the buffer's request counter,
        # which no run reaches.
        request.reserved_since = 2**52
        request.reserved_s = 1.0
        return await admit_fairly(request)

    buffer._try_to_admit = admit_greedily  # type: ignore[method-assign]


async def measure(url: str, servers: int, *, fair: bool, steps: int, seed: int) -> tuple[float, list[int]]:
    """Train `steps` steps. Returns groups/s after the warm-up, and the number of groups per server."""
    policy = ReplayPolicy(StalenessWindow(MAX_STALENESS, GROUPS_PER_STEP, steps * GROUPS_PER_STEP))
    run = uuid.uuid4().hex

    async def open_buffer() -> RedisBuffer:
        return await connect(RedisConfig(url=url), run, policy=policy, lease_s=60.0, max_attempts=3)

    trainer = await open_buffer()
    await trainer.rollback(0)
    prompt = tokens_to_bytes([1, 2])
    count = steps * GROUPS_PER_STEP
    await trainer.put_tasks([Task(index=index, prompt="?", prompt_tokens=prompt, answer="") for index in range(count)])

    buffers = [trainer]
    server_tasks = []
    for index in range(servers):
        buffer = await open_buffer()
        buffers.append(buffer)
        if not fair:
            admit_without_others(buffer)
        server = GenerationServer(f"server-{index}", buffer, seed + index)
        server_tasks.append(asyncio.create_task(server.run()))

    groups_by_server = Counter[str]()
    started_s = time.monotonic()
    for version in range(steps):
        if version == WARMUP_STEPS:
            groups_by_server.clear()
            started_s = time.monotonic()
        batch = await trainer.take_batch(epoch=1, version=version, timeout_s=60.0)
        groups_by_server.update(group.server for group in batch.groups)
        await trainer.publish_version(epoch=1, version=version + 1)
        await trainer.release_batch(batch)
        await trainer.commit_checkpoint(epoch=1, version=version + 1)
    groups_per_s = groups_by_server.total() / (time.monotonic() - started_s)

    for task in server_tasks:
        task.cancel()
    await asyncio.gather(*server_tasks, return_exceptions=True)
    for buffer in buffers:
        await buffer.aclose()
    return groups_per_s, [groups_by_server[f"server-{index}"] for index in range(servers)]


async def compare(*, steps: int, rounds: int) -> Table:
    """Measure both rules alternately, with every number of servers."""
    table = Table(title=f"Window of {SLOTS} groups, {SLOTS} slots per server, median of {rounds} rounds")
    for heading in ("servers", "greedy groups/s", "fair groups/s", "ratio", "groups by server (fair)"):
        table.add_column(heading, justify="right")

    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder) / "server", RedisConfig(fsync="everysec"))
        url = server.start()
        try:
            for servers in (1, 2, 4):
                greedy_speeds: list[float] = []
                fair_speeds: list[float] = []
                for seed in range(rounds):
                    speed, _ = await measure(url, servers, fair=False, steps=steps, seed=seed)
                    greedy_speeds.append(speed)
                    speed, groups = await measure(url, servers, fair=True, steps=steps, seed=seed)
                    fair_speeds.append(speed)
                greedy = statistics.median(greedy_speeds)
                fair = statistics.median(fair_speeds)
                groups_by_server = " ".join(map(str, groups))
                table.add_row(str(servers), f"{greedy:.1f}", f"{fair:.1f}", f"{fair / greedy:.2f}", groups_by_server)
        finally:
            server.stop()
    return table


def main() -> None:
    """Compare both rules and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    Console(width=100).print(uvloop.run(compare(steps=options.steps, rounds=options.rounds)))


if __name__ == "__main__":
    main()

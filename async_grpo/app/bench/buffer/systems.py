"""The two systems that are compared, each as a producer and a consumer, and the jobs that run them.

    BufferLoop   admit -> insert     |  take -> publish_version -> release -> commit_checkpoint
    PlainLoop    SET + RPUSH         |  BLMPOP -> MGET -> UNLINK

Both producers work like a rollout server: one loop starts the groups, a task of its own finishes each group, at most
AT_ONCE at a time, and they send the same bytes. Both encode and decode the same records with the same codec, over
clients made by the same function.

The plain loop is what one would write without a buffer, and as fast as this client can do it. SET of the payload and
RPUSH of its key go out at once, in one round trip and no transaction, by the same functions that send a transition of
the buffer. Its consumer takes as many keys as a batch has with one BLMPOP, all payloads with one MGET, and deletes them
with one UNLINK. It has no admission, no bound, no lease, no fencing, no order by ticket, no replay after a crash, and a
consumer that dies between BLMPOP and UNLINK loses its groups.

The bench and its worker processes exchange one JSON line a message:

    bench --BenchJob--> worker: connects, prepares --READY--> bench --GO--> worker: works --WorkerReport--> bench

The clock is the machine's monotonic one, which all processes share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from async_grpo.app.bench.buffer.groups import GroupMaker, task
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import WaitTimeout
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.wire import Group, Ticket, decode, encode
from buffer import RedisBuffer, connect, make_client
from buffer.redis.connection import exchange, one_connection
from buffer.redis.scripts import RunKeys

LEASE_S = 60.0
MAX_ATTEMPTS = 3
READY, GO = b"ready\n", b"go\n"
WAIT_S = 120.0
"""Longest wait of a worker: a bench that takes longer is broken."""
AT_ONCE = 8
"""Groups that one producer finishes at a time."""
System = Literal["buffer", "plain"]
Role = Literal["producer", "consumer"]


class BenchJob(msgspec.Struct, frozen=True):
    """One worker's part of one loop of the run `run`: to make or to take `groups` groups."""

    url: str
    run: str
    system: System
    role: Role
    worker: int
    """Producers count from 0; each makes its own groups."""
    groups: int
    window: StalenessWindow
    interval_s: float = 0.0
    """Seconds between two groups of a paced producer; 0: as fast as it can."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has seen. `latencies_s`: of every group, from just before its insert until the consumer had it
    decoded."""

    started_s: float = 0.0
    ended_s: float = 0.0
    latencies_s: list[float] = []
    error: str = ""


async def attach(redis: RedisConfig, run: str, window: StalenessWindow) -> RedisBuffer:
    """Begin the run or join it: every process of a loop gives the same window."""
    policy = ReplayPolicy(window=window)
    return await connect(redis, run, policy=policy, lease_s=LEASE_S, max_attempts=MAX_ATTEMPTS)


class BufferLoop:
    """One worker's end of the buffer, called as the rollout server and the trainer call it."""

    def __init__(self, buffer: RedisBuffer, job: BenchJob) -> None:
        self._buffer = buffer
        self._holder = f"producer-{job.worker}"
        self._batch = job.window.groups_per_step
        self._epoch = 0

    async def take_over(self) -> None:
        """Begin an epoch, as a trainer does when it starts."""
        self._epoch = (await self._buffer.rollback(0)).epoch

    async def tickets(self, limit: int) -> list[Ticket]:
        """The right to make 1..limit groups."""
        return await self._buffer.admit(limit, holder=self._holder, timeout_s=WAIT_S)

    async def push(self, ticket: Ticket, group: Group) -> None:
        """Hand over a finished group."""
        await self._buffer.insert(ticket, group)

    async def batches(self, groups: int) -> AsyncIterator[list[Group]]:
        """Batches until so many groups were delivered, decoded; each is settled before the next is asked for."""
        for version in range(groups // self._batch):
            batch = await self._buffer.take(epoch=self._epoch, version=version, timeout_s=WAIT_S)
            yield batch.groups
            await self._buffer.publish_version(epoch=self._epoch, version=version + 1)
            await self._buffer.release(batch)
            await self._buffer.commit_checkpoint(epoch=self._epoch, version=version + 1)

    async def aclose(self) -> None:
        """Close connections."""
        await self._buffer.aclose()


class PlainLoop:
    """One worker's end of the plain loop: a list of keys, and the payloads beside it."""

    def __init__(self, client: Any, job: BenchJob) -> None:
        self._client = client
        self._keys = RunKeys(job.run)
        self._list = self._keys.of("plain:list")
        self._holder = f"producer-{job.worker}"
        self._batch = job.window.groups_per_step
        self._made = 0
        self._task = task(0)

    async def tickets(self, limit: int) -> list[Ticket]:
        first, self._made = self._made, self._made + limit
        return [
            Ticket(seq=seq, task=self._task, version=0, epoch=1, attempt=1, holder=self._holder, lease_s=LEASE_S)
            for seq in range(first, first + limit)
        ]

    async def push(self, ticket: Ticket, group: Group) -> None:
        key = self._keys.of(f"plain:{self._holder}:{ticket.seq}")
        async with one_connection(self._client) as connection:
            await exchange(connection, ("SET", key, encode(group)), ("RPUSH", self._list, key))

    async def batches(self, groups: int) -> AsyncIterator[list[Group]]:
        left = groups
        while left:
            popped = await self._client.blmpop(WAIT_S, 1, self._list, direction="LEFT", count=self._batch)
            if popped is None:
                raise WaitTimeout("the producers", WAIT_S)
            keys = popped[1]
            left -= len(keys)
            yield [decode(payload, Group) for payload in await self._client.mget(keys)]
            await self._client.unlink(*keys)

    async def aclose(self) -> None:
        await self._client.aclose()


Loop = BufferLoop | PlainLoop


async def open_loop(job: BenchJob) -> Loop:
    """A connected loop with nothing left to prepare."""
    redis = RedisConfig(url=job.url, durable=False)
    if job.system == "plain":
        return PlainLoop(make_client(redis), job)
    loop = BufferLoop(await attach(redis, job.run, job.window), job)
    if job.role == "consumer":
        await loop.take_over()
    return loop


async def produce(loop: Loop, job: BenchJob, maker: GroupMaker) -> None:
    """Make the job's groups, and return when the last one is stored."""
    slots, left = asyncio.Semaphore(AT_ONCE), job.groups

    async def finish(ticket: Ticket) -> None:
        await loop.push(ticket, maker.group(ticket))
        slots.release()

    async with asyncio.TaskGroup() as finishing:
        while left:
            await slots.acquire()
            claimed = 1
            while claimed < left and not slots.locked():
                await slots.acquire()
                claimed += 1
            tickets = await loop.tickets(claimed)
            left -= len(tickets)
            for _ in range(claimed - len(tickets)):
                slots.release()
            for ticket in tickets:
                finishing.create_task(finish(ticket))


async def produce_paced(loop: Loop, job: BenchJob, maker: GroupMaker) -> None:
    """Make one group every interval_s. Its ticket is admitted before the group is due."""
    begin_s = time.monotonic()
    for number in range(job.groups):
        (ticket,) = await loop.tickets(1)
        group = maker.group(ticket)
        await asyncio.sleep(begin_s + number * job.interval_s - time.monotonic())
        # Stamped at the last moment: the latency contains the encoding, but not the making.
        await loop.push(ticket, msgspec.structs.replace(group, finished_s=time.monotonic()))


async def consume(loop: Loop, job: BenchJob) -> list[float]:
    """Take and settle the job's groups; returns the latency of each, in seconds."""
    latencies_s: list[float] = []
    async for groups in loop.batches(job.groups):
        now_s = time.monotonic()
        latencies_s += [now_s - group.finished_s for group in groups]
    return latencies_s

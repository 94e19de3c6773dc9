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

Groups are as large as real ones: 8 samples, about 276 KB, token ids and log-probabilities as raw bytes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import numpy as np

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import WaitTimeout
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.wire import Group, Sample, Task, Ticket, VersionSpan, decode, encode, logprobs_to_bytes, tokens_to_bytes
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
SAMPLES = 8
MEAN_TOKENS = 2610
"""A sample: 8 bytes a token in the arrays and about 5 of text; with headers, 276 KB a group."""
LENGTH_SPREAD = 0.5
"""Standard deviation of the logarithm of a completion's length."""
VOCABULARY = 151_936
PROMPT_TOKENS = 200
TEMPLATES = 16


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
        return await self._buffer.admit_groups(limit, holder=self._holder, timeout_s=WAIT_S)

    async def push(self, ticket: Ticket, group: Group) -> None:
        """Hand over a finished group."""
        await self._buffer.insert_group(ticket, group)

    async def batches(self, groups: int) -> AsyncIterator[list[Group]]:
        """Batches until so many groups were delivered, decoded; each is settled before the next is asked for."""
        for version in range(groups // self._batch):
            batch = await self._buffer.take_batch(epoch=self._epoch, version=version, timeout_s=WAIT_S)
            yield batch.groups
            await self._buffer.publish_version(epoch=self._epoch, version=version + 1)
            await self._buffer.release_batch(batch)
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


def task(index: int) -> Task:
    """A prompt of 200 tokens."""
    rng = np.random.default_rng(index)
    ids = rng.integers(0, VOCABULARY, PROMPT_TOKENS)
    return Task(index=index, prompt=_text(rng, PROMPT_TOKENS), prompt_tokens=tokens_to_bytes(ids), answer=str(index))


def tiny_task(index: int) -> Task:
    """A prompt of one token."""
    return Task(index=index, prompt="?", prompt_tokens=tokens_to_bytes([index % VOCABULARY]), answer="!")


class GroupMaker:
    """Finished groups for tickets; the samples were made before, so that a loop spends its time on the buffer."""

    def __init__(self, seed: int = 0, *, templates: int = TEMPLATES) -> None:
        rng = np.random.default_rng(seed)
        self._pick = random.Random(seed)
        self._templates = [[_sample(rng) for _ in range(SAMPLES)] for _ in range(templates)]

    def group(self, ticket: Ticket, *, finished_s: float = 0.0) -> Group:
        """8 samples whose tokens are all of the ticket's version."""
        samples = [_written_by(sample, ticket.version) for sample in self._pick.choice(self._templates)]
        return _finished(ticket, samples, finished_s)


def tiny_group(ticket: Ticket) -> Group:
    """One sample of one token."""
    sample = Sample(tokens=tokens_to_bytes([1]), logprobs=logprobs_to_bytes([-0.5]), spans=[])
    return _finished(ticket, [_written_by(sample, ticket.version)], 0.0)


def _finished(ticket: Ticket, samples: list[Sample], finished_s: float) -> Group:
    return Group(
        seq=ticket.seq,
        attempt=ticket.attempt,
        task=ticket.task,
        samples=samples,
        server=ticket.holder,
        admitted_version=ticket.version,
        finished_s=finished_s,
    )


def _sample(rng: np.random.Generator) -> Sample:
    # The mean of a log-normal variable is exp(mu + sigma^2 / 2).
    mu = np.log(MEAN_TOKENS) - LENGTH_SPREAD**2 / 2
    length = max(1, round(float(rng.lognormal(mu, LENGTH_SPREAD))))
    return Sample(
        tokens=tokens_to_bytes(rng.integers(0, VOCABULARY, length)),
        logprobs=logprobs_to_bytes(-rng.exponential(0.5, length)),
        spans=[],
        text=_text(rng, length),
        rewards={"answer_tag": 1.0},
        reward=1.0,
    )


def _written_by(sample: Sample, version: int) -> Sample:
    return msgspec.structs.replace(sample, spans=[VersionSpan(version, 0, len(sample.token_ids()))])


def _text(rng: np.random.Generator, tokens: int) -> str:
    """Words of 1 to 7 letters, one a token."""
    letters = rng.integers(ord("a"), ord("z") + 1, (tokens, 7)).astype(np.uint8).tobytes().decode()
    sizes = rng.integers(1, 8, tokens)
    return " ".join(letters[7 * i : 7 * i + size] for i, size in enumerate(sizes))

"""The two systems to compare, each with a producer and a consumer, and the jobs that run them.

    BufferLoop   admit -> insert     |  take -> publish_version -> release -> commit_checkpoint
    PlainLoop    SET + RPUSH         |  BLMPOP -> MGET -> UNLINK

Both producers work like a rollout server: one loop starts the groups, and a separate task finishes each group, at most
AT_ONCE at a time. Both send the same bytes, encoded and decoded by the same codec, over clients made by the same
function.

The plain loop is what one would write without a buffer, as fast as this client can do it. SET of the payload and RPUSH
of its key are sent together, in one round trip without a transaction, by the same functions that send a transition of
the buffer. Its consumer takes a batch of keys with one BLMPOP, the payloads with one MGET, and deletes them with one
UNLINK. It has no admission, no bound, no leases, no fencing, no order by ticket and no replay after a crash. A consumer
that dies between BLMPOP and UNLINK loses its groups.

The bench and its worker processes send one JSON line per message:

    bench --BenchJob--> worker: connects, prepares --READY--> bench --GO--> worker: runs --WorkerReport--> bench

All processes use the machine's monotonic clock, so times of different processes can be compared.

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
from async_grpo.lab.bench.sampling_masks import add_sampling_mask
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.wire import Group, Sample, Task, Ticket, VersionSpan, decode, encode, logprobs_to_bytes, tokens_to_bytes
from buffer import RedisBuffer, connect, make_client
from buffer.redis.connection import send_commands, use_connection
from buffer.redis.scripts import RunKeys

LEASE_S = 60.0
MAX_ATTEMPTS = 3
READY = b"ready\n"
GO = b"go\n"
WAIT_S = 120.0
"""Timeout of a worker: a bench that takes longer is broken."""
AT_ONCE = 8
"""Groups that one producer finishes in parallel."""
System = Literal["buffer", "plain"]
Role = Literal["producer", "consumer"]
SAMPLES = 8
MEAN_TOKENS = 2610
"""Mean tokens per sample. With 8 bytes per token in the arrays and about 5 of text, a group has 276 KB."""
LENGTH_SPREAD = 0.5
"""Standard deviation of the logarithm of a completion's length."""
VOCABULARY = 151_936
PROMPT_TOKENS = 200
TEMPLATES = 16


class BenchJob(msgspec.Struct, frozen=True):
    """One worker's part of a loop: make or take `groups` groups of run `run`."""

    url: str
    run: str
    system: System
    role: Role
    worker: int
    """Number of the worker, from 0. Seeds the groups that a producer makes."""
    groups: int
    window: StalenessWindow
    interval_s: float = 0.0
    """Seconds between two groups of a paced producer; 0: as fast as possible."""
    truncated: bool = False
    """True if samples have sampling masks."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a worker's job."""

    started_s: float = 0.0
    ended_s: float = 0.0
    latencies_s: list[float] = []
    """Seconds per group from just before its insert until the consumer has decoded it."""
    error: str = ""


async def attach(redis: RedisConfig, run: str, window: StalenessWindow) -> RedisBuffer:
    """Create the run or join it. Every process of a loop uses the same window."""
    policy = ReplayPolicy(window=window)
    return await connect(redis, run, policy=policy, lease_s=LEASE_S, max_attempts=MAX_ATTEMPTS)


class BufferLoop:
    """One worker's use of the buffer, with the calls of a rollout server and a trainer."""

    def __init__(self, buffer: RedisBuffer, job: BenchJob) -> None:
        self._buffer = buffer
        self._holder = f"producer-{job.worker}"
        self._batch = job.window.groups_per_step
        self._epoch = 0

    async def start_epoch(self) -> None:
        """Start an epoch, as a trainer does at its start."""
        start = await self._buffer.rollback(0)
        self._epoch = start.epoch

    async def admit_groups(self, limit: int) -> list[Ticket]:
        """Return 1 to `limit` tickets."""
        return await self._buffer.admit_groups(limit, holder=self._holder, timeout_s=WAIT_S)

    async def insert_group(self, ticket: Ticket, group: Group) -> None:
        """Insert a finished group."""
        await self._buffer.insert_group(ticket, group)

    async def take_batches(self, groups: int) -> AsyncIterator[list[Group]]:
        """Yield decoded batches until `groups` groups were taken. Each batch is released before the next is taken."""
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
    """One worker's use of a plain list of keys, with the payloads under these keys."""

    def __init__(self, client: Any, job: BenchJob) -> None:
        self._client = client
        self._keys = RunKeys(job.run)
        self._list = self._keys.key("plain:list")
        self._holder = f"producer-{job.worker}"
        self._batch = job.window.groups_per_step
        self._next_seq = 0
        self._task = make_task(0)

    async def admit_groups(self, limit: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        for seq in range(self._next_seq, self._next_seq + limit):
            tickets.append(
                Ticket(seq=seq, task=self._task, version=0, epoch=1, attempt=1, holder=self._holder, lease_s=LEASE_S)
            )
        self._next_seq += limit
        return tickets

    async def insert_group(self, ticket: Ticket, group: Group) -> None:
        key = self._keys.key(f"plain:{self._holder}:{ticket.seq}")
        async with use_connection(self._client) as connection:
            await send_commands(connection, ("SET", key, encode(group)), ("RPUSH", self._list, key))

    async def take_batches(self, groups: int) -> AsyncIterator[list[Group]]:
        remaining = groups
        while remaining:
            popped = await self._client.blmpop(WAIT_S, 1, self._list, direction="LEFT", count=self._batch)
            if popped is None:
                raise WaitTimeout("the producers", WAIT_S)
            _, keys = popped
            remaining -= len(keys)
            yield [decode(payload, Group) for payload in await self._client.mget(keys)]
            await self._client.unlink(*keys)

    async def aclose(self) -> None:
        await self._client.aclose()


Loop = BufferLoop | PlainLoop


async def open_loop(job: BenchJob) -> Loop:
    """Connect to the system of `job`, ready to run."""
    redis = RedisConfig(url=job.url, durable=False)
    if job.system == "plain":
        return PlainLoop(make_client(redis), job)
    loop = BufferLoop(await attach(redis, job.run, job.window), job)
    if job.role == "consumer":
        await loop.start_epoch()
    return loop


async def produce(loop: Loop, job: BenchJob, maker: GroupMaker) -> None:
    """Make and insert the job's groups. Returns when the last one is stored."""
    slots = asyncio.Semaphore(AT_ONCE)
    remaining = job.groups

    async def finish_group(ticket: Ticket) -> None:
        await loop.insert_group(ticket, maker.make_group(ticket))
        slots.release()

    async with asyncio.TaskGroup() as unfinished:
        while remaining:
            # Wait for one free slot, then claim all that are free: one call admits as many groups as possible.
            await slots.acquire()
            claimed = 1
            while claimed < remaining and not slots.locked():
                await slots.acquire()
                claimed += 1

            tickets = await loop.admit_groups(claimed)
            remaining -= len(tickets)
            for _ in range(claimed - len(tickets)):
                slots.release()
            for ticket in tickets:
                unfinished.create_task(finish_group(ticket))


async def produce_paced(loop: Loop, job: BenchJob, maker: GroupMaker) -> None:
    """Make and insert one group every `interval_s`. Its ticket is admitted before the group is due."""
    started_s = time.monotonic()
    for number in range(job.groups):
        (ticket,) = await loop.admit_groups(1)
        group = maker.make_group(ticket)
        await asyncio.sleep(started_s + number * job.interval_s - time.monotonic())
        # Take the time last: the latency includes the encoding, but not making the group.
        await loop.insert_group(ticket, msgspec.structs.replace(group, finished_s=time.monotonic()))


async def consume(loop: Loop, job: BenchJob) -> list[float]:
    """Take and release the job's groups. Returns the latency of each in seconds."""
    latencies_s: list[float] = []
    async for groups in loop.take_batches(job.groups):
        now_s = time.monotonic()
        latencies_s += [now_s - group.finished_s for group in groups]
    return latencies_s


def make_task(index: int) -> Task:
    """Return a task with a prompt of 200 tokens."""
    rng = np.random.default_rng(index)
    ids = rng.integers(0, VOCABULARY, PROMPT_TOKENS)
    return Task(index=index, prompt=_text(rng, PROMPT_TOKENS), prompt_tokens=tokens_to_bytes(ids), answer=str(index))


def tiny_task(index: int) -> Task:
    """Return a task with a prompt of one token."""
    return Task(index=index, prompt="?", prompt_tokens=tokens_to_bytes([index % VOCABULARY]), answer="!")


class GroupMaker:
    """Makes finished groups. Samples are drawn in advance, so that a loop spends its time on the buffer."""

    def __init__(self, seed: int = 0, *, templates: int = TEMPLATES, truncated: bool = False) -> None:
        """truncated: samples have sampling masks."""
        rng = np.random.default_rng(seed)
        self._pick = random.Random(seed)
        self._templates = [[_sample(rng) for _ in range(SAMPLES)] for _ in range(templates)]
        if truncated:
            self._templates = [
                [add_sampling_mask(sample, VOCABULARY) for sample in template] for template in self._templates
            ]

    def make_group(self, ticket: Ticket, *, finished_s: float = 0.0) -> Group:
        """Return a group of 8 samples, all generated by the ticket's version."""
        samples = [_with_version(sample, ticket.version) for sample in self._pick.choice(self._templates)]
        return _finished_group(ticket, samples, finished_s)


def sample_groups(*, truncated: bool) -> list[Group]:
    """Return groups as the producers make them."""
    maker = GroupMaker(truncated=truncated)
    ticket = Ticket(seq=0, task=make_task(0), version=0, epoch=1, attempt=1, holder="producer-0", lease_s=LEASE_S)
    return [maker.make_group(ticket) for _ in range(TEMPLATES)]


def tiny_group(ticket: Ticket) -> Group:
    """Return a group of one sample with one token."""
    sample = Sample(tokens=tokens_to_bytes([1]), logprobs=logprobs_to_bytes([-0.5]), spans=[])
    return _finished_group(ticket, [_with_version(sample, ticket.version)], 0.0)


def _finished_group(ticket: Ticket, samples: list[Sample], finished_s: float) -> Group:
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


def _with_version(sample: Sample, version: int) -> Sample:
    return msgspec.structs.replace(sample, spans=[VersionSpan(version, 0, len(sample.token_ids()))])


def _text(rng: np.random.Generator, tokens: int) -> str:
    """Return words of 1 to 7 letters, one per token."""
    letters = rng.integers(ord("a"), ord("z") + 1, (tokens, 7)).astype(np.uint8).tobytes().decode()
    sizes = rng.integers(1, 8, tokens)
    return " ".join(letters[7 * i : 7 * i + size] for i, size in enumerate(sizes))

"""What the tests of the buffer share: small records, and the moves of a rollout server and a trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.wire import Batch, Group, Partial, Sample, Task, Ticket, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from buffer import BufferStats, ReplayBuffer

Open = Callable[..., Awaitable[ReplayBuffer]]
"""Opens a run on the implementation under test; see tests/contract/conftest.py."""

LONG_S = 5.0
"""A wait that must end well before."""
NO_WAIT_S = 0.0


def policy(*, S: int = 1, P: int = 2, steps: int = 100, **options: Any) -> ReplayPolicy:
    """Make a policy: fifo that drops stale groups, unless `options` change that."""
    return ReplayPolicy(StalenessWindow(max_staleness=S, groups_per_step=P, horizon=steps * P), **options)


def tasks(first: int, count: int) -> list[Task]:
    return [
        Task(index=index, prompt=f"task {index}", prompt_tokens=tokens_to_bytes([index]), answer=str(index))
        for index in range(first, first + count)
    ]


def sample(version: int, length: int = 3) -> Sample:
    return Sample(
        tokens=tokens_to_bytes(range(length)),
        logprobs=logprobs_to_bytes([-0.5] * length),
        spans=[VersionSpan(version, 0, length)],
        reward=1.0,
    )


def mixed_sample(oldest: int, newest: int, length: int = 4) -> Sample:
    """Half of the tokens of one version, half of another."""
    half = length // 2
    spans = [VersionSpan(oldest, 0, half), VersionSpan(newest, half, length)]
    return msgspec.structs.replace(sample(oldest, length), spans=spans) if oldest < newest else sample(oldest, length)


def group_of(ticket: Ticket, *, version: int | None = None, newest: int | None = None, length: int = 4) -> Group:
    """A finished group; its oldest tokens are of `version`, or of the ticket's."""
    oldest = ticket.version if version is None else version
    samples = [mixed_sample(oldest, oldest if newest is None else newest, length)]
    return Group(seq=ticket.seq, attempt=ticket.attempt, task=ticket.task, samples=samples)


def partial_of(ticket: Ticket, length: int = 2, *, version: int | None = None) -> Partial:
    first = sample(ticket.version if version is None else version, length)
    return Partial(seq=ticket.seq, attempt=ticket.attempt, samples=[first, None])


async def admit(buffer: ReplayBuffer, limit: int, holder: str = "server-0") -> list[Ticket]:
    return await buffer.admit_groups(limit, holder=holder, timeout_s=LONG_S)


async def finish(buffer: ReplayBuffer, *tickets: Ticket) -> None:
    for ticket in tickets:
        await buffer.insert_group(ticket, group_of(ticket))


async def take(buffer: ReplayBuffer, version: int, epoch: int = 1, timeout_s: float = LONG_S) -> Batch:
    return await buffer.take_batch(epoch=epoch, version=version, timeout_s=timeout_s)


async def publish(buffer: ReplayBuffer, version: int, epoch: int = 1) -> None:
    await buffer.publish_version(epoch=epoch, version=version)


async def train(buffer: ReplayBuffer, version: int, epoch: int = 1) -> Batch:
    """One whole step: take, publish, release."""
    batch = await take(buffer, version, epoch)
    await publish(buffer, version + 1, epoch)
    await buffer.release_batch(batch)
    return batch


async def generate_and_train(buffer: ReplayBuffer, version: int, epoch: int = 1) -> Batch:
    """Admit and finish one batch, and train it."""
    stats = await buffer.stats()
    await finish(buffer, *await admit(buffer, stats.groups_per_step))
    return await train(buffer, version, epoch)


def seqs(batch: Batch) -> list[int]:
    return [group.seq for group in batch.groups]


def released(stats: BufferStats) -> dict[str, int]:
    """Why groups have ended, without the reasons that nobody had."""
    return {reason: count for reason, count in stats.released.items() if count}

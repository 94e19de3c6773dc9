"""What the tests of the buffer share: small records, and the moves of a rollout server and a trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from async_grpo.staleness.window import StalenessWindow
from async_grpo.wire import (
    Batch,
    Group,
    Partial,
    Sample,
    Task,
    Ticket,
    VersionSpan,
    logprobs_to_bytes,
    tokens_to_bytes,
)
from buffer import BufferStats, ReplayBuffer

Open = Callable[..., Awaitable[ReplayBuffer]]
"""Opens a run on the implementation under test; see tests/contract/conftest.py."""

LONG_S = 5.0
"""A wait that must end well before."""
NO_WAIT_S = 0.0


def window(*, S: int = 1, P: int = 2, steps: int = 100) -> StalenessWindow:
    return StalenessWindow(max_staleness=S, groups_per_step=P, horizon=steps * P)


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


def group_of(ticket: Ticket, *, version: int | None = None) -> Group:
    """A finished group; its tokens are of `version`, or of the ticket's."""
    version = ticket.version if version is None else version
    return Group(seq=ticket.seq, attempt=ticket.attempt, task=ticket.task, samples=[sample(version)])


def partial_of(ticket: Ticket, length: int = 2) -> Partial:
    return Partial(seq=ticket.seq, attempt=ticket.attempt, samples=[sample(ticket.version, length), None])


async def admit(buffer: ReplayBuffer, limit: int, holder: str = "server-0") -> list[Ticket]:
    return await buffer.admit(limit, holder=holder, timeout_s=LONG_S)


async def finish(buffer: ReplayBuffer, *tickets: Ticket) -> None:
    for ticket in tickets:
        await buffer.insert(ticket, group_of(ticket))


async def take(buffer: ReplayBuffer, version: int, epoch: int = 1, timeout_s: float = LONG_S) -> Batch:
    return await buffer.take(epoch=epoch, version=version, timeout_s=timeout_s)


async def publish(buffer: ReplayBuffer, version: int, epoch: int = 1) -> None:
    await buffer.publish_version(epoch=epoch, version=version)


async def train(buffer: ReplayBuffer, version: int, epoch: int = 1) -> Batch:
    """One whole step: take, publish, release."""
    batch = await take(buffer, version, epoch)
    await publish(buffer, version + 1, epoch)
    await buffer.release(batch)
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

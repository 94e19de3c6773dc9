"""`ReplayBuffer` on Redis or Valkey: payloads by plain SET and MGET, every transition one Lua script.

A call that may wait asks its script first; only when there is nothing does it sleep in BLPOP on a
wake list, which the transitions of others fill. It looks again at the latest when the next lease
expires or after `_LONGEST_SLEEP_S`, so a wake token lost with its receiver delays and loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, TimeoutError

from async_grpo.config.schema import RedisConfig
from async_grpo.errors import Fenced, LeaseLost, RunEnded, ServerLost, WaitTimeout
from async_grpo.staleness.window import StalenessWindow
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket, decode, encode
from buffer.protocol import BufferStats, Resume
from buffer.redis import scripts
from buffer.redis.client import make_client, where
from buffer.redis.keys import Keys

_LONGEST_SLEEP_S = 2.0


class RedisBuffer:
    """See `buffer.protocol.ReplayBuffer`. Made by `buffer.connect`."""

    def __init__(self, client: Redis, sleeper: Redis, run: str, address: str) -> None:
        """`sleeper` is a client of its own, for the calls that block."""
        self._client: Any = client  # typed by redis-py as bytes | str; these clients never decode, so bytes
        self._sleeper = sleeper
        self._keys = Keys(run)
        self._address = address

    @classmethod
    def over(cls, config: RedisConfig, run: str) -> RedisBuffer:
        """A buffer that is not yet attached to its run; see `attach`."""
        sleeper = make_client(config, blocking_s=_LONGEST_SLEEP_S)
        return cls(make_client(config), sleeper, run, where(config.url))

    async def attach(self, window: StalenessWindow, *, lease_s: float, max_attempts: int) -> None:
        """Open the run, new or old, and state its admission parameters."""
        await self._script("open", *_parameters(window), "lease_ms", int(lease_s * 1000), "max_attempts", max_attempts)

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        if not tasks:
            return (await self.stats()).tasks_put
        first = tasks[0].index
        if [task.index for task in tasks] != list(range(first, first + len(tasks))):
            raise ValueError(f"task indexes must follow each other without a gap, from {first}")
        await self._store({self._keys("task", task.index): encode(task) for task in tasks}, keep=True)
        outcome, put = await self._script("put_tasks", first, len(tasks))
        if outcome == b"GAP":
            raise ValueError(f"tasks from {first} would leave a gap: the stream ends before {put}")
        return int(put)

    async def admit(self, limit: int, *, holder: str, timeout_s: float) -> list[Ticket]:
        deadline = time.monotonic() + timeout_s
        while True:
            outcome, *rest = await self._script("admit", limit)
            if outcome == b"ENDED":
                raise RunEnded("the run is over: no more groups are admitted")
            if outcome == b"OK":
                return await self._tickets(holder, *rest)
            next_lease_s = rest[0] / 1000 if rest[0] >= 0 else _LONGEST_SLEEP_S
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(rest[1].decode(), timeout_s)
            await self._sleep("admit", min(left_s, next_lease_s))

    async def heartbeat(self, tickets: Sequence[Ticket]) -> list[int]:
        pairs = [value for ticket in tickets for value in (ticket.seq, ticket.attempt)]
        return [int(seq) for seq in await self._script("heartbeat", *pairs)]

    async def progress(self, ticket: Ticket, partial: Partial) -> None:
        await self._store({self._keys("partial", ticket.seq, ticket.attempt): encode(partial)})
        if await self._script("progress", ticket.seq, ticket.attempt) == b"LOST":
            raise _lost(ticket)

    async def give_back(self, ticket: Ticket) -> None:
        await self._script("give_back", ticket.seq, ticket.attempt)

    async def insert(self, ticket: Ticket, group: Group) -> None:
        await self._store({self._keys("group", ticket.seq, ticket.attempt): encode(group)})
        if await self._script("insert", ticket.seq, ticket.attempt, group.oldest_version) == b"LOST":
            raise _lost(ticket)

    async def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        if await self._script("discard", ticket.seq, ticket.attempt, reason.value) == b"LOST":
            raise _lost(ticket)

    async def take(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        deadline = time.monotonic() + timeout_s
        while True:
            outcome, *rest = await self._script("take", epoch, version)
            if outcome == b"FENCED":
                raise _fenced(epoch, rest[0])
            if outcome == b"ENDED":
                raise RunEnded("the run is over: no more groups are delivered")
            if outcome == b"OK":
                replayed, *groups = rest
                return Batch(epoch=epoch, version=version, groups=await self._groups(groups), replayed=bool(replayed))
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                ready, wanted = rest
                raise WaitTimeout(
                    f"the {wanted} oldest groups for step {version} ({ready} groups are ready)",
                    timeout_s,
                    "Are the rollout servers running",
                )
            await self._sleep("take", left_s)

    async def release(self, batch: Batch) -> None:
        self._unfenced(batch.epoch, await self._script("release", batch.epoch, batch.version))

    async def publish_version(self, *, epoch: int, version: int) -> None:
        self._unfenced(epoch, await self._script("publish_version", epoch, version))

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        self._unfenced(epoch, await self._script("commit_checkpoint", epoch, version))

    async def rollback(self, version: int) -> Resume:
        epoch, head_version = await self._script("rollback", version)
        return Resume(int(epoch), int(head_version))

    async def update_admission(self, window: StalenessWindow) -> None:
        await self._script("open", *_parameters(window))

    async def end(self) -> None:
        await self._script("end")

    async def stats(self) -> BufferStats:
        flat, (inflight, ready, taken) = await self._script("stats")
        meta = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
        count = {name: int(value) for name, value in meta.items()}
        admitted = count.get("admitted", 0)
        return BufferStats(
            epoch=count.get("epoch", 0),
            version=count.get("version", 0),
            tasks_put=count.get("tasks_put", 0),
            waiting=count.get("tasks_put", 0) - admitted,
            inflight=inflight,
            ready=ready,
            taken=taken,
            admitted=admitted,
            released={reason.value: count.get(f"released:{reason.value}", 0) for reason in ReleaseReason},
            max_staleness=count["max_staleness"],
            groups_per_step=count["groups_per_step"],
            horizon=count["horizon"],
            ended=bool(count.get("ended", 0)),
        )

    async def aclose(self) -> None:
        await self._client.aclose()
        await self._sleeper.aclose()

    async def _tickets(self, holder: str, epoch: int, lease_ms: int, *rows: list[bytes | int]) -> list[Ticket]:
        """Attach tasks and partials, fetched in one go, to what the script decided."""
        numbers = [[int(value) for value in row] for row in rows]
        names = [self._keys("task", seq) for seq, *_ in numbers]
        names += [self._keys("partial", seq, partial) for seq, _, _, partial in numbers if partial >= 0]
        payloads = dict(zip(names, await self._fetch(names), strict=True))
        return [
            Ticket(
                seq=seq,
                task=decode(payloads[self._keys("task", seq)], Task),
                version=version,
                epoch=epoch,
                attempt=attempt,
                holder=holder,
                lease_s=lease_ms / 1000,
                partial=decode(payloads[self._keys("partial", seq, partial)], Partial) if partial >= 0 else None,
            )
            for seq, attempt, version, partial in numbers
        ]

    async def _groups(self, rows: list[list[bytes]]) -> list[Group]:
        names = [self._keys("group", int(seq), int(attempt)) for seq, attempt in rows]
        return [decode(payload, Group) for payload in await self._fetch(names)]

    async def _fetch(self, names: list[str]) -> list[bytes]:
        """All payloads, in order; one that is missing means that somebody deleted keys of the run."""
        try:
            payloads = await self._client.mget(names)
        except (ConnectionError, TimeoutError, OSError) as error:
            raise self._server_lost(error) from error
        missing = [name for name, payload in zip(names, payloads, strict=True) if payload is None]
        if missing:
            raise ServerLost(f"the server at {self._address} no longer has {missing[0]}: was data of the run deleted?")
        return list(payloads)

    async def _store(self, payloads: dict[str, bytes], *, keep: bool = False) -> None:
        """SET all; `keep`: those that are not there yet."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for name, payload in payloads.items():
                    pipe.set(name, payload, nx=keep)
                await pipe.execute()
        except (ConnectionError, TimeoutError, OSError) as error:
            raise self._server_lost(error) from error

    async def _script(self, name: str, *arguments: object) -> Any:
        try:
            return await scripts.call(self._client, name, self._keys("meta"), *arguments)
        except (ConnectionError, TimeoutError, OSError) as error:
            raise self._server_lost(error) from error

    async def _sleep(self, name: str, longest_s: float) -> None:
        """Until a token comes, or for longest_s."""
        try:
            await self._sleeper.blpop([self._keys("wake", name)], timeout=min(longest_s, _LONGEST_SLEEP_S))
        except (ConnectionError, TimeoutError, OSError) as error:
            raise self._server_lost(error) from error

    def _server_lost(self, error: Exception) -> ServerLost:
        return ServerLost(f"the server at {self._address} does not answer: {error}")

    @staticmethod
    def _unfenced(epoch: int, reply: list[Any]) -> None:
        if reply[0] == b"FENCED":
            raise _fenced(epoch, reply[1])


def _parameters(window: StalenessWindow) -> list[object]:
    return [
        *("max_staleness", window.max_staleness),
        *("groups_per_step", window.groups_per_step),
        *("horizon", window.horizon),
    ]


def _lost(ticket: Ticket) -> LeaseLost:
    return LeaseLost(f"group {ticket.seq}: attempt {ticket.attempt} of {ticket.holder} no longer holds the lease")


def _fenced(epoch: int, newest: int) -> Fenced:
    return Fenced(f"epoch {epoch} is over: a newer trainer has taken over in epoch {newest}. This one must end")

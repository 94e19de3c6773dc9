"""The replay buffer on Redis: payloads by SET and MGET, one Lua script per call.

    caller --payload and script in one transaction--> server
    caller --script--> 'wait' --BLPOP wake list--> script again

Every script is idempotent by (sequence, attempt), or for `admit` by its request, and those that the trainer calls are
fenced by epoch. So each call may be repeated after a lost reply. Deadlines are in the server's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from async_grpo.errors import BufferFault
from async_grpo.staleness import ReplayPolicy
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket, decode, encode
from buffer.base import BufferStats, Resume
from buffer.capacity import NO_QUOTA, MemoryQuota
from buffer.errors import (
    checked_reason,
    checked_stream,
    fenced,
    forgotten,
    forgotten_run,
    gap,
    groups_of_step,
    lease_lost,
    run_ended,
    take_too_late,
)
from buffer.fair_share import FAIR_WAIT_S
from buffer.redis.client import RunClient
from buffer.redis.retrying import Payload, RetryingClient, RetryLater
from buffer.redis.scripts import RunKeys, script

_COUNTERS = (
    *("epoch", "version", "tasks_put", "admitted", "inserted", "used"),
    *("max_staleness", "staleness", "groups_per_step", "horizon", "selector_window"),
    *("stored_bytes", "room_bytes", "group_bytes"),
)

FIRST_FAIR_LOOK_S = 0.005
"""Seconds until a server looks again whether room is still kept for others; then twice as long, up to FAIR_WAIT_S."""


@dataclass(slots=True)
class _AdmitRequest:
    """A call of `admit`, which may take several attempts."""

    limit: int
    holder: str
    slots: int
    kept_since: int = 0
    """As in BufferState.admit; 0 unless the last attempt found room that is kept for others."""
    kept_s: float = 0.0
    """Seconds for which that has been so."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def wait_for_others(self, asks: int) -> RetryLater:
        """Look again soon, and not on the wake list: there this call could take the element that is for the others."""
        if self.kept_since == 0 or self.kept_s >= FAIR_WAIT_S:
            self.kept_since, self.kept_s = asks, 0.0
        pause_s = max(FIRST_FAIR_LOOK_S, self.kept_s)
        self.kept_s += pause_s
        return RetryLater(pause_s, listens=False)


class RedisBuffer:
    """The `ReplayBuffer` that all processes of a run share. Made by `open` or `buffer.connect`."""

    def __init__(self, link: RetryingClient, run: str) -> None:
        self._link = link
        self._run_name = run
        self._keys = RunKeys(run)

    @classmethod
    async def open(
        cls,
        client: RunClient,
        run: str,
        *,
        policy: ReplayPolicy,
        lease_s: float,
        max_attempts: int,
        quota: MemoryQuota = NO_QUOTA,
        timeout_s: float = 30.0,
    ) -> RedisBuffer:
        """Begin the run, or attach to what is stored of it. `aclose` closes `client`.

        The policy is written only if it differs from that of the last `open`, so a process that joins with the same
        configuration does not undo a live retuning. Raises BufferFault for a run that another release has stored in
        another format.
        """
        buffer = cls(RetryingClient(client, timeout_s), run)
        status, *formats = await buffer._script(
            "open", *_dials(policy), *astuple(quota), round(1000 * lease_s), max_attempts
        )
        if status == b"format":
            raise BufferFault(
                f"the run {run} is stored in format {formats[0]}, and this release writes format {formats[1]}. "
                "Finish it with the release that began it, or start over with --fresh"
            )
        return buffer

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        checked_stream([task.index for task in tasks])
        known = int(await self._link.call(lambda: self._link.client.hget(self._keys.of("meta"), "tasks_put")) or 0)
        fresh = [task for task in tasks if task.index >= known]
        if not fresh:
            return known
        payloads = [Payload(self._keys.of(f"task:{task.index}"), encode(task), only_new=True) for task in fresh]
        status, following = await self._script("put_tasks", fresh[0].index, len(fresh), payloads=payloads)
        if status == b"gap":
            raise gap(fresh[0].index, following)
        return int(following)

    async def admit(self, limit: int, *, holder: str, timeout_s: float, slots: int | None = None) -> list[Ticket]:
        request = _AdmitRequest(limit, holder, max(limit, slots or 0))
        return await self._link.until(
            self._keys.of("wake:admit"),
            lambda: self._admit_or_give_back(request),
            waited_for="room in the staleness window and a task",
            timeout_s=timeout_s,
        )

    async def heartbeat(self, tickets: Sequence[Ticket]) -> list[int]:
        held = [value for ticket in tickets for value in (ticket.seq, ticket.attempt)]
        return [int(seq) for seq in await self._script("heartbeat", *held)]

    async def progress(self, ticket: Ticket, partial: Partial) -> None:
        staged = [Payload(self._keys.of("stage"), encode(partial))]
        age_and_length = (partial.oldest_version or 0, partial.longest)
        reply = await self._script("progress", ticket.seq, ticket.attempt, *age_and_length, payloads=staged)
        _check_lease(reply, ticket)

    async def give_back(self, ticket: Ticket, *, strike: bool = False) -> None:
        await self._script("give_back", ticket.seq, ticket.attempt, int(strike))

    async def expire_leases(self, name: str, *, life: int) -> None:
        await self._script("expire_leases", name, life)

    async def insert(self, ticket: Ticket, group: Group) -> None:
        stored = [Payload(self._keys.group(ticket.seq, ticket.attempt), encode(group), only_new=True)]
        facts = (group.oldest_version, group.newest_version, group.longest)
        reply = await self._script("insert", ticket.seq, ticket.attempt, *facts, payloads=stored, together=False)
        _check_lease(reply, ticket)

    async def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        reply = await self._script("discard", ticket.seq, ticket.attempt, checked_reason(reason).value)
        _check_lease(reply, ticket)

    async def take(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        return await self._take(epoch, version, 0, "whole", timeout_s)

    async def take_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        return await self._take(epoch, version, have, "part", timeout_s)

    async def release(self, batch: Batch) -> None:
        _check_epoch(await self._script("release", batch.epoch, batch.version), batch.epoch)

    async def publish_version(self, *, epoch: int, version: int) -> None:
        _check_epoch(await self._script("publish_version", epoch, version), epoch)

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        _check_epoch(await self._script("commit_checkpoint", epoch, version), epoch)

    async def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        request = uuid.uuid4().hex
        status, *rest = await self._script("rollback", version, request, "accept_loss" if accept_loss else "")
        if status == b"forgotten":
            raise forgotten(version, rest[0])
        return Resume(epoch=rest[0], head_version=rest[1], lost_steps=rest[2])

    async def update_admission(self, policy: ReplayPolicy) -> None:
        await self._script("update_admission", *_dials(policy))

    async def set_staleness(self, *, epoch: int, staleness: int) -> None:
        _check_epoch(await self._script("set_staleness", epoch, staleness), epoch)

    async def end(self) -> None:
        await self._script("end")

    async def memory(self) -> tuple[int, int]:
        """Bytes that the server uses, and its limit; 0: it has none, or does not say."""
        about = await self._link.call(lambda: self._link.client.info("memory"))
        return int(about.get("used_memory") or 0), int(about.get("maxmemory") or 0)

    async def stats(self) -> BufferStats:
        books = await self._script("stats")
        meta, released, lengths = ({name.decode(): v.decode() for name, v in batched(book, 2)} for book in books[:3])
        if not meta:
            raise forgotten_run(self._run_name)
        inflight, ready, taken, kept = books[3:]
        counters = {name: int(meta.get(name, 0)) for name in _COUNTERS}
        return BufferStats(
            **counters,
            waiting=counters["tasks_put"] - counters["admitted"],
            inflight=inflight,
            ready=ready,
            taken=taken,
            released={reason.value: int(released.get(reason.value, 0)) for reason in ReleaseReason},
            released_by_length={name: int(count) for name, count in lengths.items()},
            selector=meta["selector"],
            ended=meta.get("ended") == "1",
            kept=kept,
        )

    async def aclose(self) -> None:
        await self._link.aclose()

    async def _admit_or_give_back(self, request: _AdmitRequest) -> list[Ticket] | RetryLater:
        """One attempt. The server may have granted tickets to a caller that is cancelled, so the reply is awaited and
        they are given back."""
        asking = asyncio.create_task(self._try_admit(request))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(BufferFault):  # nothing was granted, or the lease expires
                answer = await asking
                for ticket in answer if isinstance(answer, list) else []:
                    await self.give_back(ticket)
            raise

    async def _try_admit(self, request: _AdmitRequest) -> list[Ticket] | RetryLater:
        kept_since = request.kept_since if request.kept_s >= FAIR_WAIT_S else 0
        status, *rest = await self._script(
            "admit", request.limit, request.id, request.holder, request.slots, kept_since
        )
        if status == b"kept":
            return request.wait_for_others(rest[0])
        request.kept_since = 0
        if status != b"ok":
            return _not_yet(status, rest)
        epoch, lease_ms, *leases = rest
        return [
            Ticket(
                seq=seq,
                task=decode(task, Task),
                version=version,
                epoch=epoch,
                attempt=attempt,
                holder=request.holder,
                lease_s=lease_ms / 1000,
                partial=decode(partial, Partial) if partial is not None else None,
                strikes=strikes,
            )
            for seq, attempt, strikes, version, task, partial in batched(leases, 6)
        ]

    async def _take(self, epoch: int, version: int, have: int, extent: str, timeout_s: float) -> Batch:
        return await self._link.until(
            self._keys.of("wake:take"),
            lambda: self._try_take(epoch, version, have, extent),
            waited_for=groups_of_step(version),
            timeout_s=timeout_s,
        )

    async def _try_take(self, epoch: int, version: int, have: int, extent: str) -> Batch | RetryLater:
        status, *rest = reply = await self._script("take", epoch, version, have, extent)
        _check_epoch(reply, epoch)
        if status == b"late":
            raise take_too_late(version, rest[0])
        if status != b"ok":
            return _not_yet(status, rest)
        replayed, mask_below, missing, *chosen = rest
        keys = [self._keys.group(seq, attempt) for seq, attempt in batched(chosen, 2)]
        groups = [decode(payload, Group) for payload in await self._link.fetch(keys) if payload is not None]
        if len(groups) < len(keys):
            if await self._script("take", epoch, version, have, extent) != reply:
                return RetryLater(0.0)  # another trainer took over, or the server came back with less: ask again
            raise BufferFault(
                f"{len(keys) - len(groups)} of the {len(keys)} groups taken for version {version} are no longer "
                f"stored: something else deletes keys of the run {self._run_name}. Give the run a server of its own"
            )
        return Batch(
            epoch=epoch,
            version=version,
            groups=groups,
            replayed=bool(replayed),
            mask_below=mask_below,
            missing=missing,
        )

    async def _script(
        self, name: str, *args: bytes | str | float, payloads: Sequence[Payload] = (), together: bool = True
    ) -> Any:
        """The reply of the script `name`, called with this run's keys."""
        keys = self._keys
        return await self._link.run(
            script(name), keys.state_keys, keys.prefix, *args, payloads=payloads, together=together
        )


def _dials(policy: ReplayPolicy) -> tuple[str | float, ...]:
    """The policy's values in the order of `write_policy` in lua/parts/policy.lua."""
    window, rate = policy.window, policy.rate
    return (
        *(window.max_staleness, window.groups_per_step, window.horizon),
        *(policy.selector, policy.selector_window, policy.on_stale),
        *(rate.min_size, rate.samples_per_insert, rate.min_diff, rate.max_diff),
        *(policy.max_uses, policy.seed % (2**31 - 1), window.in_force),
    )


def batched(values: list[Any], size: int) -> Iterator[list[Any]]:
    """The values of a flat reply, `size` at a time."""
    return (values[start : start + size] for start in range(0, len(values), size))


def _check_lease(reply: list[Any], ticket: Ticket) -> None:
    if reply[0] == b"lost":
        raise lease_lost(ticket)


def _check_epoch(reply: list[Any], epoch: int) -> None:
    if reply[0] == b"fenced":
        raise fenced(epoch, reply[1])


def _not_yet(status: bytes, rest: list[Any]) -> RetryLater:
    """How long to wait at most. Raises RunEnded if the run has ended."""
    if status == b"ended":
        raise run_ended()
    next_lease_ms = rest[0]
    return RetryLater(next_lease_ms / 1000) if next_lease_ms >= 0 else RetryLater()

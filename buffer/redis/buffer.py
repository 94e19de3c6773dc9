"""The replay buffer on Redis: payloads by SET and MGET, one Lua script per call.

    caller --payload, script--> server              in one transaction, or SET first (`insert_group`)
    caller --script--> 'wait' --BLPOP wake list--> script again

Every call may be repeated after a lost reply: the scripts recognise a repetition by (sequence, attempt), and
`admit_groups` and `rollback` by a request id. Those that the trainer calls are fenced by epoch. Deadlines are in the
server's time.
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
    check_consecutive,
    check_discard_reason,
    describe_batch_wait,
    fenced_error,
    lease_lost_error,
    run_ended_error,
    run_vanished_error,
    steps_forgotten_error,
    stream_gap_error,
    take_too_late_error,
)
from buffer.fair_share import FAIR_WAIT_S
from buffer.redis.client import RunClient
from buffer.redis.retrying import Payload, RetryingClient, RetryLater
from buffer.redis.scripts import RunKeys, load_script

_COUNTERS = (
    "epoch",
    "version",
    "tasks_put",
    "admitted",
    "inserted",
    "used",
    "max_staleness",
    "staleness",
    "groups_per_step",
    "horizon",
    "selector_window",
    "stored_bytes",
    "room_bytes",
    "group_bytes",
)
"""Integer fields of `BufferStats` that the server stores under the same names."""

FIRST_FAIR_RETRY_S = 0.005
"""Seconds until the first retry while room is reserved for other servers. Doubles up to FAIR_WAIT_S."""


@dataclass(slots=True)
class _AdmitRequest:
    """A call of `admit_groups`, which may take several attempts."""

    limit: int
    holder: str
    slots: int
    reserved_since: int | None = None
    """Request counter of the server when this call first found room reserved for others; None if it found none."""
    reserved_s: float = 0.0
    """Seconds since then, as the sum of the pauses."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def wait_for_others(self, unserved_requests: int) -> RetryLater:
        """Retry soon, without listening to the wake list: we would take the element that should wake the others."""
        if self.reserved_since is None or self.reserved_s >= FAIR_WAIT_S:
            self.reserved_since = unserved_requests
            self.reserved_s = 0.0
        pause_s = max(FIRST_FAIR_RETRY_S, self.reserved_s)
        self.reserved_s += pause_s
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
        """Start the run, or attach to its stored state. `aclose` closes `client`.

        The policy is written only if it differs from that of the last `open`, so a process that joins with the same
        configuration does not overwrite a live change. Raises BufferFault for a run in the format of another release.
        """
        buffer = cls(RetryingClient(client, timeout_s), run)
        status, *formats = await buffer._run_script(
            "open", *_policy_arguments(policy), *astuple(quota), round(1000 * lease_s), max_attempts
        )
        if status == b"format":
            raise BufferFault(
                f"the run {run} is stored in format {formats[0]}, but this release writes format {formats[1]}. "
                "Finish it with the release that started it, or start over with --fresh"
            )
        return buffer

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        check_consecutive([task.index for task in tasks])

        # Skip the tasks that another feeder has put before, so that their payloads are not sent.
        meta_key = self._keys.key("meta")
        next_index = int(await self._link.call(lambda: self._link.client.hget(meta_key, "tasks_put")) or 0)
        new_tasks = [task for task in tasks if task.index >= next_index]
        if not new_tasks:
            return next_index

        payloads = [Payload(self._keys.key(f"task:{task.index}"), encode(task), only_new=True) for task in new_tasks]
        status, next_index = await self._run_script("put_tasks", new_tasks[0].index, len(new_tasks), payloads=payloads)
        if status == b"gap":
            raise stream_gap_error(new_tasks[0].index, next_index)
        return int(next_index)

    async def admit_groups(
        self, limit: int, *, holder: str, timeout_s: float, slots: int | None = None
    ) -> list[Ticket]:
        request = _AdmitRequest(limit, holder, max(limit, slots or 0))
        return await self._link.retry_until(
            self._keys.key("wake:admit"),
            lambda: self._admit_or_give_back(request),
            waited_for="room in the staleness window and a task",
            timeout_s=timeout_s,
        )

    async def renew_leases(self, tickets: Sequence[Ticket]) -> list[int]:
        arguments: list[int] = []
        for ticket in tickets:
            arguments += (ticket.seq, ticket.attempt)
        return [int(seq) for seq in await self._run_script("renew_leases", *arguments)]

    async def save_partial(self, ticket: Ticket, partial: Partial) -> None:
        # The script moves the staged payload to its place only if the lease is valid: the partial of a lost lease must
        # not replace that of its new holder.
        staged = [Payload(self._keys.key("stage"), encode(partial))]
        reply = await self._run_script(
            "save_partial",
            ticket.seq,
            ticket.attempt,
            partial.oldest_version or 0,
            partial.longest,
            payloads=staged,
        )
        _check_lease(reply, ticket)

    async def give_back(self, ticket: Ticket, *, count_as_expired: bool = False) -> None:
        await self._run_script("give_back", ticket.seq, ticket.attempt, int(count_as_expired))

    async def expire_leases(self, name: str, *, life: int) -> None:
        await self._run_script("expire_leases", name, life)

    async def insert_group(self, ticket: Ticket, group: Group) -> None:
        # No transaction: the key contains the attempt, so a group whose lease is lost overwrites no other.
        payload = Payload(self._keys.group(ticket.seq, ticket.attempt), encode(group), only_new=True)
        reply = await self._run_script(
            "insert_group",
            ticket.seq,
            ticket.attempt,
            group.oldest_version,
            group.newest_version,
            group.longest,
            payloads=[payload],
            together=False,
        )
        _check_lease(reply, ticket)

    async def discard_group(self, ticket: Ticket, reason: ReleaseReason) -> None:
        check_discard_reason(reason)
        reply = await self._run_script("discard_group", ticket.seq, ticket.attempt, reason.value)
        _check_lease(reply, ticket)

    async def take_batch(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        return await self._take(epoch, version, 0, "whole", timeout_s)

    async def take_batch_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        return await self._take(epoch, version, have, "part", timeout_s)

    async def release_batch(self, batch: Batch) -> None:
        _check_epoch(await self._run_script("release_batch", batch.epoch, batch.version), batch.epoch)

    async def publish_version(self, *, epoch: int, version: int) -> None:
        _check_epoch(await self._run_script("publish_version", epoch, version), epoch)

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        _check_epoch(await self._run_script("commit_checkpoint", epoch, version), epoch)

    async def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        request = uuid.uuid4().hex
        status, *values = await self._run_script("rollback", version, request, "accept_loss" if accept_loss else "")
        if status == b"forgotten":
            raise steps_forgotten_error(version, values[0])
        epoch, head_version, lost_steps = values
        return Resume(epoch=epoch, head_version=head_version, lost_steps=lost_steps)

    async def update_policy(self, policy: ReplayPolicy) -> None:
        await self._run_script("update_policy", *_policy_arguments(policy))

    async def set_staleness(self, *, epoch: int, staleness: int) -> None:
        _check_epoch(await self._run_script("set_staleness", epoch, staleness), epoch)

    async def end_run(self) -> None:
        await self._run_script("end_run")

    async def read_memory(self) -> tuple[int, int]:
        """Return the bytes that the server uses and its limit; 0 if it has no limit or does not report it."""
        info = await self._link.call(lambda: self._link.client.info("memory"))
        return int(info.get("used_memory") or 0), int(info.get("maxmemory") or 0)

    async def stats(self) -> BufferStats:
        *hashes, inflight, ready, taken, stored = await self._run_script("stats")
        meta, released, by_length = (_decode_hash(reply) for reply in hashes)
        if not meta:
            raise run_vanished_error(self._run_name)
        counters = {name: int(meta.get(name, 0)) for name in _COUNTERS}
        return BufferStats(
            **counters,
            waiting=counters["tasks_put"] - counters["admitted"],
            inflight=inflight,
            ready=ready,
            taken=taken,
            released={reason.value: int(released.get(reason.value, 0)) for reason in ReleaseReason},
            released_by_length={name: int(count) for name, count in by_length.items()},
            selector=meta["selector"],
            ended=meta.get("ended") == "1",
            kept=stored,
        )

    async def aclose(self) -> None:
        await self._link.aclose()

    async def _admit_or_give_back(self, request: _AdmitRequest) -> list[Ticket] | RetryLater:
        """Make one attempt. If it is cancelled, give back the tickets that the server may have granted meanwhile."""
        attempt = asyncio.create_task(self._try_to_admit(request))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            # The request may be on its way, so wait for the reply: otherwise nobody would generate the granted groups
            # until their leases expire.
            with contextlib.suppress(BufferFault):  # nothing was granted, or the leases have to expire
                result = await attempt
                if isinstance(result, list):
                    for ticket in result:
                        await self.give_back(ticket)
            raise

    async def _try_to_admit(self, request: _AdmitRequest) -> list[Ticket] | RetryLater:
        reserved_since = 0
        if request.reserved_since is not None and request.reserved_s >= FAIR_WAIT_S:
            reserved_since = request.reserved_since
        status, *values = await self._run_script(
            "admit_groups", request.limit, request.id, request.holder, request.slots, reserved_since
        )
        if status == b"kept":
            return request.wait_for_others(values[0])
        request.reserved_since = None
        if status != b"ok":
            return _retry_or_end(status, values)

        epoch, lease_ms, *leases = values
        tickets = []
        for seq, attempt, expired_leases, version, task, partial in split_reply(leases, 6):
            ticket = Ticket(
                seq=seq,
                task=decode(task, Task),
                version=version,
                epoch=epoch,
                attempt=attempt,
                holder=request.holder,
                lease_s=lease_ms / 1000,
                partial=None if partial is None else decode(partial, Partial),
                expired_leases=expired_leases,
            )
            tickets.append(ticket)
        return tickets

    async def _take(self, epoch: int, version: int, have: int, extent: str, timeout_s: float) -> Batch:
        return await self._link.retry_until(
            self._keys.key("wake:take"),
            lambda: self._try_to_take(epoch, version, have, extent),
            waited_for=describe_batch_wait(version),
            timeout_s=timeout_s,
        )

    async def _try_to_take(self, epoch: int, version: int, have: int, extent: str) -> Batch | RetryLater:
        reply = await self._run_script("take_batch", epoch, version, have, extent)
        status, *values = reply
        _check_epoch(reply, epoch)
        if status == b"late":
            raise take_too_late_error(version, values[0])
        if status != b"ok":
            return _retry_or_end(status, values)

        replayed, mask_below, missing, *chosen = values
        keys = [self._keys.group(seq, attempt) for seq, attempt in split_reply(chosen, 2)]
        groups = [decode(payload, Group) for payload in await self._link.fetch_values(keys) if payload is not None]
        if len(groups) < len(keys):
            # Harmless if something has changed between the two calls: another trainer took over, or the server came
            # back with less data. If the script returns the same again, the payloads are really gone.
            if await self._run_script("take_batch", epoch, version, have, extent) != reply:
                return RetryLater(0.0)
            raise BufferFault(
                f"{len(keys) - len(groups)} of the {len(keys)} groups taken for version {version} are no longer "
                f"stored: something else deletes keys of the run {self._run_name}. Give the run its own server"
            )
        return Batch(
            epoch=epoch,
            version=version,
            groups=groups,
            replayed=bool(replayed),
            mask_below=mask_below,
            missing=missing,
        )

    async def _run_script(
        self, name: str, *args: bytes | str | float, payloads: Sequence[Payload] = (), together: bool = True
    ) -> Any:
        """Run the script `name` with this run's keys and return its reply."""
        keys = self._keys
        return await self._link.run_script(
            load_script(name), keys.state_keys, keys.prefix, *args, payloads=payloads, together=together
        )


def _policy_arguments(policy: ReplayPolicy) -> tuple[str | float, ...]:
    """Return the policy's values in the order of `write_policy` in lua/parts/policy.lua."""
    window = policy.window
    rate = policy.rate
    return (
        window.max_staleness,
        window.groups_per_step,
        window.horizon,
        policy.selector,
        policy.selector_window,
        policy.on_stale,
        rate.min_size,
        rate.samples_per_insert,
        rate.min_diff,
        rate.max_diff,
        policy.max_uses,
        policy.seed % (2**31 - 1),
        window.effective_staleness,
    )


def split_reply(values: list[Any], size: int) -> Iterator[list[Any]]:
    """Yield the values of a flat reply, `size` at a time."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _decode_hash(reply: list[bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in split_reply(reply, 2)}


def _check_lease(reply: list[Any], ticket: Ticket) -> None:
    if reply[0] == b"lost":
        raise lease_lost_error(ticket)


def _check_epoch(reply: list[Any], epoch: int) -> None:
    if reply[0] == b"fenced":
        raise fenced_error(epoch, reply[1])


def _retry_or_end(status: bytes, values: list[Any]) -> RetryLater:
    """Return when to retry at the latest: when the next lease expires. Raises RunEnded if the run has ended."""
    if status == b"ended":
        raise run_ended_error()
    next_expiry_ms = values[0]
    if next_expiry_ms < 0:  # no lease is running
        return RetryLater()
    return RetryLater(next_expiry_ms / 1000)

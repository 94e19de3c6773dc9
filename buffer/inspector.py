"""Inspects a run on its server without taking part in it, and stops or resumes its admission.

Reading the state keys (`redis/scripts.py`) and the payloads changes nothing. The inspector never opens the run, because
`open` could write the policy. One script reads all state keys, so that a snapshot is consistent.

`stop_admission` and `resume_admission` change the policy in one script each, so that they cannot undo a change that the
trainer makes in between. With horizon 0 and no limit of the ratio, nothing is admitted. The run's key `drained` stores
the former values until they are restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import msgspec

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import BufferFault
from async_grpo.staleness import ReplayPolicy, age
from buffer.base import BufferStats
from buffer.redis.buffer import RedisBuffer, split_reply
from buffer.redis.client import make_client
from buffer.redis.retrying import RetryingClient
from buffer.redis.scripts import RunKeys, load_script

STATE_FORMAT = 4
"""Format of the state keys that this file can read: FORMAT of lua/parts/policy.lua."""
SIZES_PER_CALL = 512
GROUPS_PER_CALL = 4
"""Maximum number of payloads in memory."""


class GroupState(StrEnum):
    """The state of a group. A WAITING task is not a group yet."""

    INFLIGHT = "inflight"
    READY = "ready"
    TAKEN = "taken"
    KEPT = "kept"
    """Released as trained. Its payload stays until a checkpoint contains the group."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Facts that the server stores about one group. None: not known."""

    seq: int
    state: GroupState
    attempt: int
    """Number of leases so far."""
    expired_leases: int = 0
    """Number of leases that expired, or whose engine died."""
    uses: int = 0
    oldest_version: int | None = None
    """Version of its oldest token; for an INFLIGHT group, a version that no token is older than."""
    newest_version: int | None = None
    step: int | None = None
    """Newest step for which it was taken."""
    longest: int | None = None
    """Tokens of its longest completion reported so far."""
    lease_s: float | None = None
    """Seconds until its lease expires; negative if it has expired, None without a holder."""
    size_bytes: int = 0
    """Size of the stored group, or of the partial of an INFLIGHT group."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Memory of the whole server. `limit_bytes` is 0 if it has no limit."""

    used_bytes: int
    limit_bytes: int
    keys: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a run at one moment."""

    run: str
    stats: BufferStats
    policy: ReplayPolicy
    committed: int
    """Newest version that a checkpoint contains."""
    drained: bool
    """True if an operator has stopped admission."""
    ages: dict[int, int]
    """Number of READY groups by the age of their oldest token, measured from the head version."""
    held: int
    """Number of INFLIGHT groups with a running lease."""
    expired: int
    """Number of INFLIGHT groups whose lease has expired and that no server has taken over."""
    given_back: int
    oldest_lease: GroupFacts | None
    """The INFLIGHT group whose lease expires first or expired longest ago."""
    memory: ServerMemory


class GroupRecord(NamedTuple):
    """The record of a group: RECORD of lua/parts/records.lua."""

    attempt: int
    expired_leases: int
    longest: int
    oldest: int
    newest: int
    uses: int
    references: int


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state keys of a run at one moment."""

    meta: dict[str, str]
    groups: list[GroupFacts]
    """Groups in ticket order, without their sizes."""
    drained: bool

    @property
    def policy(self) -> ReplayPolicy:
        """The policy. `write_policy` of lua/parts/policy.lua writes the fields of it, its window and its rate side by
        side."""
        return msgspec.convert({**self.meta, "window": self.meta, "rate": self.meta}, ReplayPolicy, strict=False)

    @property
    def admission_is_stopped(self) -> bool:
        """True if admission was stopped and the policy was not updated since."""
        return self.drained and self.policy.window.horizon == 0


class Inspector:
    """Reads the state of a run from outside. Made by `attach`; close it with `aclose`."""

    def __init__(self, link: RetryingClient, run: str) -> None:
        self._link = link
        self._run = run
        self._keys = RunKeys(run)
        self._buffer = RedisBuffer(link, run)

    @classmethod
    async def attach(cls, redis: RedisConfig, run: str) -> Inspector:
        """Return an inspector of `run`. Raises ServerLost, ServerRefused, and BufferFault if the server has no such
        run."""
        inspector = cls(RetryingClient(make_client(redis, run), redis.timeout_s), run)
        try:
            await inspector._check_exists()
        except BaseException:
            await inspector.aclose()
            raise
        return inspector

    async def overview(self) -> Overview:
        """Return counters, sizes, ages, leases and memory. Raises BufferFault for a run in another format."""
        snapshot = await self._read_snapshot()
        stats = await self._buffer.stats()
        newest_version = int(snapshot.meta.get("version", 0))

        ages = Counter[int]()
        inflight = 0
        leased = []
        for group in snapshot.groups:
            if group.state is GroupState.READY:
                ages[age(newest_version, group.oldest_version or 0)] += 1
            if group.state is GroupState.INFLIGHT:
                inflight += 1
            if group.lease_s is not None:
                leased.append(group)
        held = sum((group.lease_s or 0) > 0 for group in leased)
        return Overview(
            run=self._run,
            stats=stats,
            policy=snapshot.policy,
            committed=int(snapshot.meta.get("committed", 0)),
            drained=snapshot.admission_is_stopped,
            ages=dict(sorted(ages.items())),
            held=held,
            expired=len(leased) - held,
            given_back=inflight - len(leased),
            oldest_lease=min(leased, key=lambda group: group.lease_s or 0, default=None),
            memory=await self._memory(),
        )

    async def groups(self, states: Iterable[GroupState] = tuple(GroupState)) -> list[GroupFacts]:
        """Return the groups in one of `states`, sorted by sequence. Raises BufferFault for a run in another format."""
        wanted = set(states)
        snapshot = await self._read_snapshot()
        groups = [group for group in snapshot.groups if group.state in wanted]
        sizes = await self._read_sizes(groups)
        return [replace(group, size_bytes=size) for group, size in zip(groups, sizes, strict=True)]

    async def records(self, seq: int) -> dict[str, bytes]:
        """Return the stored records of one group or waiting task, by kind (task, partial, group)."""
        keys = {"task": self._keys.key(f"task:{seq}"), "partial": self._keys.key(f"partial:{seq}")}
        group_key = await self._link.call(lambda: self._find_group_key(seq))
        if group_key is not None:
            keys["group"] = group_key
        payloads = await self._link.fetch_values(list(keys.values()))
        return {kind: payload for kind, payload in zip(keys, payloads, strict=True) if payload is not None}

    async def payloads(self, groups: Sequence[GroupFacts]) -> AsyncIterator[tuple[int, bytes | None]]:
        """Yield (sequence, stored group), with a few in memory at a time. None for a group deleted meanwhile."""
        for start in range(0, len(groups), GROUPS_PER_CALL):
            page = groups[start : start + GROUPS_PER_CALL]
            keys = [self._keys.group(group.seq, group.attempt) for group in page]
            for group, payload in zip(page, await self._link.fetch_values(keys), strict=True):
                yield group.seq, payload

    async def stop_admission(self) -> bool:
        """Admit nothing more until `resume_admission`. False if admission was stopped already."""
        await self._read_snapshot()  # raises BufferFault for a run in another format
        return bool(await self._run_script("stop_admission"))

    async def resume_admission(self) -> bool:
        """Resume admission. False if it was not stopped, or if the policy was updated since."""
        await self._read_snapshot()
        return bool(await self._run_script("resume_admission"))

    async def discard_ready(self) -> int:
        """READY -> RELEASED(stale) for every group. Returns their number."""
        reply = await self._run_script("discard_ready")
        return int(reply[1])

    async def aclose(self) -> None:
        """Close connections; the data stay."""
        await self._link.aclose()

    async def _check_exists(self) -> None:
        if not await self._link.call(lambda: self._link.client.exists(self._keys.key("meta"))):
            raise BufferFault(
                f"the server at {self._link.client.endpoint} holds no run named {self._run}. "
                "Check the name (overrides become part of it), and that the run has started"
            )

    async def _run_script(self, name: str) -> Any:
        return await self._link.run_script(load_script(name), self._keys.state_keys, self._keys.prefix)

    async def _read_snapshot(self) -> _Snapshot:
        reply = await self._run_script("look")
        meta = {name.decode(): value.decode() for name, value in split_reply(reply[0], 2)}
        if int(meta.get("format", 0)) != STATE_FORMAT:
            raise BufferFault(
                f"the run {self._run} is stored in format {meta.get('format')}, but this release reads format "
                f"{STATE_FORMAT}. Inspect it with the release that runs it; single records can be read by their ID"
            )
        return _Snapshot(meta, _group_facts(reply), drained=bool(reply[7]))

    async def _find_group_key(self, seq: int) -> str | None:
        """Return the key of the newest attempt's group.

        It is searched for, because the state keys, which have the attempt, may be in another format.
        """
        names = [name.decode() async for name in self._link.client.scan_iter(match=self._keys.key(f"group:{seq}:*"))]
        return max(names, key=lambda name: int(name.rpartition(":")[2]), default=None)

    async def _read_sizes(self, groups: Sequence[GroupFacts]) -> list[int]:
        keys = []
        for group in groups:
            if group.state is GroupState.INFLIGHT:
                keys.append(self._keys.key(f"partial:{group.seq}"))
            else:
                keys.append(self._keys.group(group.seq, group.attempt))

        sizes: list[int] = []
        for start in range(0, len(keys), SIZES_PER_CALL):
            page = keys[start : start + SIZES_PER_CALL]
            sizes += await self._link.call(partial(self._read_lengths, page))
        return sizes

    async def _read_lengths(self, keys: Sequence[str]) -> list[int]:
        async with self._link.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.strlen(key)
            lengths: list[int] = await pipe.execute()
            return lengths

    async def _memory(self) -> ServerMemory:
        info = await self._link.call(lambda: self._link.client.info("memory"))
        keys = await self._link.call(lambda: self._link.client.dbsize())
        return ServerMemory(int(info["used_memory"]), int(info.get("maxmemory", 0)), int(keys))


def _group_facts(reply: list[Any]) -> list[GroupFacts]:
    """Return the facts of each group in the reply of lua/look.lua."""
    _, leases, begun, ready, taken, records, log, _, (seconds, micros) = reply
    now_ms = 1000 * int(seconds) + int(micros) / 1000
    deadlines_ms = {int(seq): float(deadline) for seq, deadline in split_reply(leases, 2)}
    start_versions = {int(seq): int(version) for seq, version in split_reply(begun, 2)}

    states = {int(seq): GroupState.TAKEN for seq in taken}
    states |= {int(seq): GroupState.READY for seq in ready}
    states |= dict.fromkeys(deadlines_ms, GroupState.INFLIGHT)

    # Entries of the log: version -> epoch|settled|mask_below|size|seq,seq,... In order, so that the newest step
    # remains.
    steps: dict[int, int] = {}
    for version, entry in sorted((int(version), entry) for version, entry in split_reply(log, 2)):
        for seq in entry.decode().rsplit("|", 1)[1].split(","):
            if seq:
                steps[int(seq)] = version

    facts = []
    for seq, text in sorted((int(seq), text) for seq, text in split_reply(records, 2)):
        record = GroupRecord(*map(int, text.split()))
        state = states.get(seq, GroupState.KEPT)
        is_finished = state is not GroupState.INFLIGHT
        deadline_ms = deadlines_ms.get(seq)
        group = GroupFacts(
            seq=seq,
            state=state,
            attempt=record.attempt,
            expired_leases=record.expired_leases,
            uses=record.uses,
            oldest_version=record.oldest if is_finished else start_versions.get(seq),
            newest_version=record.newest if is_finished else None,
            step=steps.get(seq),
            longest=record.longest or None,
            lease_s=(deadline_ms - now_ms) / 1000 if deadline_ms else None,  # deadline 0: given back
        )
        facts.append(group)
    return facts

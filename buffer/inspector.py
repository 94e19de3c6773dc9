"""Look into a run on its server without taking part in it, and stop or resume its admission.

Reading the state keys (`redis/scripts.py`) and the payloads changes nothing. It never opens the run, because `open`
could write the policy. One script reads all state keys, so that a look is consistent.

`stop_admission` and `resume_admission` change the policy in one script each, so that a change by the trainer in between
is not undone: with horizon 0 and no limit of the ratio, nothing is admitted. The run's key `drained` keeps the former
values until they are restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import BufferFault
from async_grpo.staleness import ReplayPolicy, age
from buffer.base import BufferStats
from buffer.redis.buffer import RedisBuffer, split_reply
from buffer.redis.client import make_client
from buffer.redis.retrying import RetryingClient
from buffer.redis.scripts import RunKeys, script

BOOKS_FORMAT = 4
"""Format of the state keys that this file can read: FORMAT of lua/parts/policy.lua."""
SIZES_AT_ONCE = 512
GROUPS_AT_ONCE = 4
"""Payloads held in memory at a time."""


class GroupState(StrEnum):
    """The state of a group. A WAITING task is not a group yet."""

    INFLIGHT = "inflight"
    READY = "ready"
    TAKEN = "taken"
    KEPT = "kept"
    """Released as trained. Its payload stays until a checkpoint contains the group."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the server stores about one group. None means not known."""

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
    """Newest step that it was taken for."""
    longest: int | None = None
    """Tokens of its longest completion reported so far."""
    lease_s: float | None = None
    """Seconds until its lease expires; negative if it has and no server has taken over, None without a holder."""
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
    """Whether an operator has stopped admission."""
    ages: dict[int, int]
    """Number of READY groups by the age of their oldest token, measured from the head version."""
    held: int
    expired: int
    """Number of INFLIGHT groups whose lease has expired and that no server has taken over."""
    given_back: int
    oldest_lease: GroupFacts | None
    """The INFLIGHT group whose lease expires first or expired longest ago."""
    memory: ServerMemory


class GroupRecord(NamedTuple):
    """RECORD of lua/parts/records.lua."""

    attempt: int
    expired_leases: int
    longest: int
    oldest: int
    newest: int
    uses: int
    pins: int


@dataclass(frozen=True, slots=True)
class _Look:
    """The state keys of a run at one moment."""

    meta: dict[str, str]
    groups: list[GroupFacts]
    """Groups in ticket order, without their sizes."""
    drained: bool

    @property
    def policy(self) -> ReplayPolicy:
        """What `write_policy` of lua/parts/policy.lua wrote: the fields of the policy, its window and its rate."""
        return msgspec.convert({**self.meta, "window": self.meta, "rate": self.meta}, ReplayPolicy, strict=False)

    @property
    def stopped(self) -> bool:
        """Whether `stop_admission` is in force, and nobody has retuned the run since."""
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
        """An inspector of `run`. Raises ServerLost, ServerRefused, and BufferFault if the server has no such run."""
        inspector = cls(RetryingClient(make_client(redis, run), redis.timeout_s), run)
        try:
            await inspector._check_known()
        except BaseException:
            await inspector.aclose()
            raise
        return inspector

    async def overview(self) -> Overview:
        """The counters, sizes, ages, leases and memory. Raises BufferFault for a run in another format."""
        look, stats = await self._look(), await self._buffer.stats()
        head = int(look.meta.get("version", 0))
        ages = Counter(age(head, group.oldest_version or 0) for group in look.groups if group.state is GroupState.READY)
        leased = [group for group in look.groups if group.lease_s is not None]
        held = sum((group.lease_s or 0) > 0 for group in leased)
        return Overview(
            run=self._run,
            stats=stats,
            policy=look.policy,
            committed=int(look.meta.get("committed", 0)),
            drained=look.stopped,
            ages=dict(sorted(ages.items())),
            held=held,
            expired=len(leased) - held,
            given_back=sum(group.state is GroupState.INFLIGHT for group in look.groups) - len(leased),
            oldest_lease=min(leased, key=lambda group: group.lease_s or 0, default=None),
            memory=await self._memory(),
        )

    async def groups(self, states: Iterable[GroupState] = tuple(GroupState)) -> list[GroupFacts]:
        """The groups in one of `states`, sorted by sequence. Raises BufferFault for a run in another format."""
        wanted, look = set(states), await self._look()
        found = [facts for facts in look.groups if facts.state in wanted]
        sizes = await self._sizes(found)
        return [replace(facts, size_bytes=size) for facts, size in zip(found, sizes, strict=True)]

    async def records(self, seq: int) -> dict[str, bytes]:
        """The stored records of one group or waiting task, by kind (task, partial, group)."""
        keys = {kind: self._keys.of(f"{kind}:{seq}") for kind in ("task", "partial")}
        if group := await self._link.call(lambda: self._find_group(seq)):
            keys["group"] = group
        found = await self._link.fetch(list(keys.values()))
        return {kind: payload for kind, payload in zip(keys, found, strict=True) if payload is not None}

    async def payloads(self, groups: Sequence[GroupFacts]) -> AsyncIterator[tuple[int, bytes | None]]:
        """Yields (sequence, stored group), with a few in memory at a time. None for a group that is gone meanwhile."""
        for start in range(0, len(groups), GROUPS_AT_ONCE):
            page = groups[start : start + GROUPS_AT_ONCE]
            keys = [self._keys.group(group.seq, group.attempt) for group in page]
            for group, payload in zip(page, await self._link.fetch(keys), strict=True):
                yield group.seq, payload

    async def stop_admission(self) -> bool:
        """Admit nothing more until `resume_admission`. False if admission was stopped already."""
        await self._look()  # raises BufferFault for a run in another format
        return bool(await self._run_script("stop_admission"))

    async def resume_admission(self) -> bool:
        """Restore what `stop_admission` stopped. False if it was not stopped, or the run was retuned since."""
        await self._look()
        return bool(await self._run_script("resume_admission"))

    async def discard_ready(self) -> int:
        """READY -> RELEASED(stale) for every group; returns how many there were."""
        reply = await self._run_script("discard_ready")
        return int(reply[1])

    async def aclose(self) -> None:
        """Close connections; the data stay."""
        await self._link.aclose()

    async def _check_known(self) -> None:
        if not await self._link.call(lambda: self._link.client.exists(self._keys.of("meta"))):
            raise BufferFault(
                f"the server at {self._link.client.endpoint} holds no run named {self._run}. "
                "Check the name (overrides become part of it), or whether the run has begun"
            )

    async def _run_script(self, name: str) -> Any:
        return await self._link.run(script(name), self._keys.state_keys, self._keys.prefix)

    async def _look(self) -> _Look:
        reply = await self._run_script("look")
        meta = {name.decode(): value.decode() for name, value in split_reply(reply[0], 2)}
        if int(meta.get("format", 0)) != BOOKS_FORMAT:
            raise BufferFault(
                f"the run {self._run} keeps its books in format {meta.get('format')}, and this release reads format "
                f"{BOOKS_FORMAT}. Look into it with the release that runs it; single records can be read by their ID"
            )
        return _Look(meta, _group_facts(reply), drained=bool(reply[7]))

    async def _find_group(self, seq: int) -> str | None:
        """Key of the newest attempt's group. It is searched for, because the state keys may have another format."""
        names = [name.decode() async for name in self._link.client.scan_iter(match=self._keys.of(f"group:{seq}:*"))]
        return max(names, key=lambda name: int(name.rpartition(":")[2]), default=None)

    async def _sizes(self, groups: Sequence[GroupFacts]) -> list[int]:
        keys = [
            self._keys.of(f"partial:{group.seq}")
            if group.state is GroupState.INFLIGHT
            else self._keys.group(group.seq, group.attempt)
            for group in groups
        ]
        sizes: list[int] = []
        for start in range(0, len(keys), SIZES_AT_ONCE):
            sizes += await self._link.call(lambda page=keys[start : start + SIZES_AT_ONCE]: self._lengths(page))  # type: ignore[misc]
        return sizes

    async def _lengths(self, keys: Sequence[str]) -> list[int]:
        async with self._link.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.strlen(key)
            lengths: list[int] = await pipe.execute()
            return lengths

    async def _memory(self) -> ServerMemory:
        about = await self._link.call(lambda: self._link.client.info("memory"))
        keys = await self._link.call(lambda: self._link.client.dbsize())
        return ServerMemory(int(about["used_memory"]), int(about.get("maxmemory", 0)), int(keys))


def _group_facts(reply: list[Any]) -> list[GroupFacts]:
    """What the reply of lua/look.lua says of each group."""
    _, leases, begun, ready, taken, records, log, _, (seconds, micros) = reply
    now_ms = 1000 * int(seconds) + int(micros) / 1000
    deadlines_ms = {int(seq): float(deadline) for seq, deadline in split_reply(leases, 2)}
    begun_versions = {int(seq): int(version) for seq, version in split_reply(begun, 2)}
    states = dict.fromkeys(map(int, taken), GroupState.TAKEN) | dict.fromkeys(map(int, ready), GroupState.READY)
    states |= dict.fromkeys(deadlines_ms, GroupState.INFLIGHT)
    steps: dict[int, int] = {}  # of the log: version -> epoch|settled|mask_below|size|seq,seq,...
    for version, entry in sorted((int(version), entry) for version, entry in split_reply(log, 2)):
        steps |= {int(seq): version for seq in entry.decode().rsplit("|", 1)[1].split(",") if seq}
    facts = []
    for seq, text in sorted((int(seq), text) for seq, text in split_reply(records, 2)):
        record, state = GroupRecord(*map(int, text.split())), states.get(seq, GroupState.KEPT)
        finished, deadline_ms = state is not GroupState.INFLIGHT, deadlines_ms.get(seq)
        facts.append(
            GroupFacts(
                seq=seq,
                state=state,
                attempt=record.attempt,
                expired_leases=record.expired_leases,
                uses=record.uses,
                oldest_version=record.oldest if finished else begun_versions.get(seq),
                newest_version=record.newest if finished else None,
                step=steps.get(seq),
                longest=record.longest or None,
                lease_s=(deadline_ms - now_ms) / 1000 if deadline_ms else None,
            )
        )
    return facts

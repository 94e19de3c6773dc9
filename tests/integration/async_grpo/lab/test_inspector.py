"""A run on a real server, seen from outside: nothing of it changes, and an operator can bring it to rest."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import BufferFault, ConfigError, ServerLost, WaitTimeout, WireError
from async_grpo.lab.inspector.export import EXPORTABLE, decode_untyped, export_groups, wait_until_drained
from async_grpo.staleness import RateLimit, ReplayPolicy
from async_grpo.wire import ReleaseReason, encode, logprobs_to_bytes, tokens_to_bytes
from buffer import RedisBuffer, connect, make_client
from buffer.inspector import STATE_FORMAT, GroupState, Inspector, Overview
from buffer.redis.scripts import RunKeys
from tests.support.buffer_cases import (
    admit,
    finish,
    group_of,
    partial_of,
    policy,
    publish,
    released,
    take,
    tasks,
    train,
)

LEASE_S = 30.0


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex


async def open_run(
    config: RedisConfig, run: str, replay_policy: ReplayPolicy, *, lease_s: float = LEASE_S
) -> RedisBuffer:
    buffer = await connect(config, run, policy=replay_policy, lease_s=lease_s, max_attempts=3)
    await buffer.put_tasks(tasks(0, 20))
    return buffer


@asynccontextmanager
async def inspected(
    config: RedisConfig, run: str, replay_policy: ReplayPolicy, *, lease_s: float = LEASE_S
) -> AsyncIterator[tuple[RedisBuffer, Inspector]]:
    buffer = await open_run(config, run, replay_policy, lease_s=lease_s)
    await buffer.rollback(0)
    inspector = await Inspector.attach(config, run)
    yield buffer, inspector
    await inspector.aclose()
    await buffer.aclose()


@pytest.fixture
async def pair(redis_config: RedisConfig, run: str) -> AsyncIterator[tuple[RedisBuffer, Inspector]]:
    async with inspected(redis_config, run, policy(S=3, P=2)) as pair:
        yield pair


@pytest.fixture
def buffer(pair: tuple[RedisBuffer, Inspector]) -> RedisBuffer:
    return pair[0]


@pytest.fixture
def inspector(pair: tuple[RedisBuffer, Inspector]) -> Inspector:
    return pair[1]


async def one_of_each(buffer: RedisBuffer) -> None:
    """Groups 0, 1 KEPT; 2, 3 TAKEN; 4 READY; 5 INFLIGHT with a partial; 6 given back; 7 filtered."""
    tickets = await admit(buffer, 8)
    await finish(buffer, *tickets[:5])
    await train(buffer, 0)
    await take(buffer, 1)
    await buffer.save_partial(tickets[5], partial_of(tickets[5]))
    await buffer.give_back(tickets[6])
    await buffer.discard_group(tickets[7], ReleaseReason.FILTERED)


def unpacked_length(records: dict[str, bytes]) -> int:
    group: Any = decode_untyped(records["group"])
    return max(len(sample["tokens"]) for sample in group["samples"])


async def everything_stored(config: RedisConfig, run: str) -> dict[bytes, Any]:
    client: Any = make_client(config, run)
    names = sorted([name async for name in client.scan_iter(match=RunKeys(run).pattern)])
    content = {name: await client.dump(name) for name in names}
    await client.aclose()
    return content


async def test_every_group_is_listed_with_its_state(buffer: RedisBuffer, inspector: Inspector) -> None:
    await one_of_each(buffer)
    groups = await inspector.groups()
    assert [(group.seq, group.state) for group in groups] == [
        *((seq, GroupState.KEPT) for seq in (0, 1)),
        *((seq, GroupState.TAKEN) for seq in (2, 3)),
        (4, GroupState.READY),
        *((seq, GroupState.INFLIGHT) for seq in (5, 6)),
    ]
    kept, taken, ready, inflight, back = groups[0], groups[2], groups[4], groups[5], groups[6]
    assert (kept.step, taken.step, ready.step) == (0, 1, None)
    assert (taken.uses, ready.uses, ready.attempt, ready.oldest_version) == (1, 0, 1, 0)
    assert ready.longest == unpacked_length(await inspector.records(4))
    assert inflight.lease_s is not None and 0 < inflight.lease_s <= LEASE_S and inflight.longest == 2
    assert back.lease_s is None
    sizes = {group.seq: group.size_bytes for group in groups}
    assert sizes[4] == len((await inspector.records(4))["group"])
    assert sizes[5] == len((await inspector.records(5))["partial"])
    assert sizes[6] == 0


async def test_a_look_counts_windows_ages_and_leases(buffer: RedisBuffer, inspector: Inspector) -> None:
    await one_of_each(buffer)
    overview = await inspector.overview()
    stats = overview.stats
    assert (stats.active, stats.kept, stats.version, overview.committed) == (5, 5, 1, 0)
    assert released(stats) == {"trained": 2, "filtered": 1}
    assert overview.ages == {1: 1}
    assert (overview.held, overview.expired, overview.given_back) == (1, 0, 1)
    assert overview.oldest_lease is not None and overview.oldest_lease.seq == 5
    assert overview.policy == policy(S=3, P=2)
    assert overview.memory.used_bytes > 0 and overview.memory.limit_bytes == 16 << 30
    assert not overview.drained


async def test_an_expired_lease_is_the_oldest(redis_config: RedisConfig, run: str) -> None:
    async with inspected(redis_config, run, policy(S=3, P=2), lease_s=0.05) as (buffer, inspector):
        await admit(buffer, 2)
        async with asyncio.timeout(10):
            while (overview := await inspector.overview()).held:
                await asyncio.sleep(0.01)
        assert (overview.held, overview.expired) == (0, 2)
        assert overview.oldest_lease is not None and (overview.oldest_lease.lease_s or 0) < 0


async def test_looking_changes_nothing(
    buffer: RedisBuffer, inspector: Inspector, redis_config: RedisConfig, run: str, tmp_path: Path
) -> None:
    await one_of_each(buffer)
    await buffer.update_policy(policy(S=2, P=2))
    before = await everything_stored(redis_config, run)
    await inspector.overview()
    await inspector.records(4)
    await export_groups(inspector, await inspector.groups(EXPORTABLE), tmp_path / "all.jsonl", lambda: None)
    assert await everything_stored(redis_config, run) == before


async def test_every_record_of_a_group_can_be_read(buffer: RedisBuffer, inspector: Inspector) -> None:
    tickets = await admit(buffer, 2)
    await buffer.save_partial(tickets[0], partial_of(tickets[0]))
    await finish(buffer, tickets[1])
    records = await inspector.records(0)
    assert list(records) == ["task", "partial"]
    assert [decode_untyped(payload)["kind"] for payload in records.values()] == ["task", "partial"]  # type: ignore[index]
    assert await inspector.records(1) == {"group": encode(group_of(tickets[1]))}
    assert list(await inspector.records(19)) == ["task"]
    assert await inspector.records(20) == {}


async def test_a_run_that_the_server_does_not_know_is_named(redis_config: RedisConfig) -> None:
    with pytest.raises(BufferFault, match="no-such-run"):
        await Inspector.attach(redis_config, "no-such-run")


async def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerLost, match="nobody"):
        await Inspector.attach(RedisConfig(url=f"unix://{tmp_path}/nobody.sock", timeout_s=0.3), "run")


async def test_books_of_another_format_are_refused_but_their_records_are_read(
    buffer: RedisBuffer, inspector: Inspector, redis_config: RedisConfig, run: str
) -> None:
    client: Any = make_client(redis_config, run)
    await client.hset(RunKeys(run).key("meta"), "format", STATE_FORMAT + 1)
    await client.set(RunKeys(run).group(3, 1), msgpack.packb({"kind": "group", "format": 9, "novelty": True}))
    await client.aclose()
    with pytest.raises(BufferFault, match=f"format {STATE_FORMAT + 1}"):
        await inspector.overview()
    assert decode_untyped((await inspector.records(3))["group"]) == {"kind": "group", "format": 9, "novelty": True}


async def admits_nothing(buffer: RedisBuffer) -> bool:
    try:
        await buffer.admit_groups(1, holder="server-0", timeout_s=0.05)
    except WaitTimeout:
        return True
    return False


async def test_draining_stops_admission_whatever_is_released(buffer: RedisBuffer, inspector: Inspector) -> None:
    tickets = await admit(buffer, 4)
    assert await inspector.stop_admission()
    assert await admits_nothing(buffer)
    await buffer.discard_group(tickets[0], ReleaseReason.FILTERED)
    await finish(buffer, *tickets[1:])
    await train(buffer, 0)
    assert await admits_nothing(buffer)
    assert (await inspector.overview()).drained
    assert not await inspector.stop_admission()


async def test_draining_undoes_no_change_that_the_trainer_makes_meanwhile(
    buffer: RedisBuffer, inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = inspector._read_snapshot
    wanted = iter([2, 1])

    async def read_before_a_change() -> Any:
        seen = await look()
        await buffer.set_staleness(epoch=1, staleness=next(wanted))
        return seen

    for change, staleness in ((inspector.stop_admission, 2), (inspector.resume_admission, 1)):
        with monkeypatch.context() as patched:
            patched.setattr(inspector, "_read_snapshot", read_before_a_change)
            assert await change()
        assert (await buffer.stats()).staleness == staleness


async def test_draining_waits_for_what_is_in_flight(buffer: RedisBuffer, inspector: Inspector) -> None:
    tickets = await admit(buffer, 2)
    await inspector.stop_admission()
    seen: list[int] = []

    def show(overview: Overview) -> None:
        seen.append(overview.stats.inflight)

    waiting = asyncio.create_task(wait_until_drained(inspector, 20.0, show))
    while not seen:
        await asyncio.sleep(0.01)
    await finish(buffer, *tickets)
    overview = await waiting
    assert (seen[0], seen[-1], overview.stats.ready) == (2, 0, 2)
    assert (await take(buffer, 0)).groups


async def test_a_group_whose_server_died_goes_on_while_the_run_drains(redis_config: RedisConfig, run: str) -> None:
    async with inspected(redis_config, run, policy(S=3, P=2), lease_s=0.1) as (buffer, inspector):
        await admit(buffer, 1, holder="dies")
        await inspector.stop_admission()
        (again,) = await admit(buffer, 1, holder="lives")
        assert (again.seq, again.attempt) == (0, 2)
        await finish(buffer, again)
        assert (await wait_until_drained(inspector, 5.0, lambda _: None)).stats.ready == 1


async def test_a_drain_that_takes_too_long_says_what_is_left(buffer: RedisBuffer, inspector: Inspector) -> None:
    tickets = await admit(buffer, 3)
    await buffer.give_back(tickets[0])
    await inspector.stop_admission()
    with pytest.raises(WaitTimeout, match=r"3 groups .*\(2 .*, 1 .*--resume"):
        await wait_until_drained(inspector, 0.0, lambda _: None)


@pytest.mark.parametrize(
    "replay_policy",
    [
        policy(S=3, P=2),
        policy(S=3, P=2, rate=RateLimit(min_size=4)),
        policy(S=3, P=2, rate=RateLimit.from_ratio(1.0, min_size=2, error_buffer=4.0)),
    ],
    ids=["window", "min_size", "ratio"],
)
async def test_draining_can_be_undone(redis_config: RedisConfig, run: str, replay_policy: ReplayPolicy) -> None:
    async with inspected(redis_config, run, replay_policy) as (buffer, inspector):
        await inspector.stop_admission()
        assert await admits_nothing(buffer)
        await (await open_run(redis_config, run, replay_policy)).aclose()
        assert await admits_nothing(buffer)
        assert await inspector.resume_admission()
        assert (await inspector.overview()).policy == replay_policy
        assert len(await admit(buffer, 2)) == 2
        assert not await inspector.resume_admission()


async def test_resuming_does_not_undo_a_later_retuning(buffer: RedisBuffer, inspector: Inspector) -> None:
    await inspector.stop_admission()
    await buffer.update_policy(policy(S=1, P=2, steps=7))
    assert not (await inspector.overview()).drained
    assert not await inspector.resume_admission()
    assert (await inspector.overview()).policy == policy(S=1, P=2, steps=7)


async def test_ready_groups_can_be_discarded(buffer: RedisBuffer, inspector: Inspector) -> None:
    await finish(buffer, *await admit(buffer, 3))
    await inspector.stop_admission()
    assert await inspector.discard_ready() == 3
    stats = await buffer.stats()
    assert (released(stats), stats.ready, stats.kept, stats.balanced) == ({"stale": 3}, 0, 0, True)
    assert await inspector.discard_ready() == 0


async def exported(
    inspector: Inspector, file: Path, states: tuple[GroupState, ...] = EXPORTABLE
) -> list[dict[str, Any]]:
    advanced: list[None] = []
    groups = await inspector.groups(states)
    assert await export_groups(inspector, groups, file, lambda: advanced.append(None)) == len(groups) == len(advanced)
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    with file.open("rb") as stream:
        return list(msgpack.Unpacker(stream))


async def test_stored_groups_are_exported_in_order(buffer: RedisBuffer, inspector: Inspector, tmp_path: Path) -> None:
    await one_of_each(buffer)
    lines = await exported(inspector, tmp_path / "groups.jsonl")
    packed = await exported(inspector, tmp_path / "groups.msgpack")
    facts = [(0, "kept", 0), (1, "kept", 0), (2, "taken", 1), (3, "taken", 1), (4, "ready", None)]
    for entries in (lines, packed):
        assert [(entry["seq"], entry["state"], entry["step"]) for entry in entries] == facts
        assert [entry["group"]["seq"] for entry in entries] == [0, 1, 2, 3, 4]
    for line, entry in zip(lines, packed, strict=True):
        (in_line,), (in_pack,) = line["group"]["samples"], entry["group"]["samples"]
        assert in_pack["tokens"] == tokens_to_bytes(in_line["tokens"])
        assert in_pack["logprobs"] == logprobs_to_bytes(in_line["logprobs"])
    assert (await inspector.records(4))["group"] in (tmp_path / "groups.msgpack").read_bytes()
    assert [entry["seq"] for entry in await exported(inspector, tmp_path / "ready.jsonl", (GroupState.READY,))] == [4]


async def test_groups_that_end_before_their_turn_are_counted(
    buffer: RedisBuffer, inspector: Inspector, tmp_path: Path
) -> None:
    await one_of_each(buffer)
    groups = await inspector.groups(EXPORTABLE)
    await buffer.release_batch(await take(buffer, 1))
    await publish(buffer, 2)
    await buffer.commit_checkpoint(epoch=1, version=1)
    assert len(groups) == 5 and await export_groups(inspector, groups, tmp_path / "groups.jsonl", lambda: None) == 3


async def test_an_export_overwrites_nothing_and_leaves_no_half_file(
    buffer: RedisBuffer, inspector: Inspector, redis_config: RedisConfig, run: str, tmp_path: Path
) -> None:
    await finish(buffer, *await admit(buffer, 2))
    groups = await inspector.groups(EXPORTABLE)
    (tmp_path / "mine.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match=r"mine\.jsonl .*overwritten"):
        await export_groups(inspector, groups, tmp_path / "mine.jsonl", lambda: None)
    client: Any = make_client(redis_config, run)
    await client.set(RunKeys(run).group(1, 1), b"\xc1 garbage")
    await client.aclose()
    for name in ("broken.jsonl", "broken.msgpack"):
        with pytest.raises(WireError, match="not valid MessagePack"):
            await export_groups(inspector, groups, tmp_path / name, lambda: None)
    with pytest.raises(ConfigError, match=r"groups\.csv .*\.jsonl"):
        await export_groups(inspector, groups, tmp_path / "groups.csv", lambda: None)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.jsonl"]
    assert (tmp_path / "mine.jsonl").read_text() == "precious"

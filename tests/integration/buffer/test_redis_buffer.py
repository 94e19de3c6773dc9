"""What only the Redis implementation can get wrong: lost replies, lost scripts, full memory, litter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, NoPermissionError

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ServerLost, ServerRefused
from async_grpo.staleness import ReplayPolicy
from async_grpo.wire import ReleaseReason, tokens_to_bytes
from buffer import RedisBuffer, check_server, connect, connect_board, make_client, wipe, wipe_run
from buffer.redis.retrying import RetryingClient, ScriptCall
from tests.support.buffer_cases import (
    admit,
    finish,
    generate_and_train,
    group_of,
    partial_of,
    policy,
    released,
    seqs,
    take,
    tasks,
    train,
)


@pytest.fixture
async def client(redis_config: RedisConfig) -> AsyncIterator[Redis]:
    client = make_client(redis_config)
    yield client
    await client.aclose()


@pytest.fixture
async def buffer(redis_config: RedisConfig, run: str) -> AsyncIterator[RedisBuffer]:
    buffer = await attach(redis_config, run, policy(S=1, P=2))
    await buffer.put_tasks(tasks(0, 20))
    await buffer.rollback(0)
    yield buffer
    await buffer.aclose()


async def attach(config: RedisConfig, run: str, replay_policy: ReplayPolicy) -> RedisBuffer:
    return await connect(config, run, policy=replay_policy, lease_s=30.0, max_attempts=3)


async def keys(client: Redis, run: str) -> dict[str, object]:
    """Name (without the prefix of the run) -> type of every key of the run."""
    names = [name async for name in client.scan_iter(match=f"*{run}*")]
    return {name.decode().split("}:")[1]: await client.type(name) for name in names}


class LosesReplies(RetryingClient):
    """Loses the first reply to every script call. All commands reach the server."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lost_replies: list[ScriptCall] = []

    async def _run_script(self, call: ScriptCall, deadline: float) -> Any:
        reply = await super()._run_script(call, deadline)
        if call not in self.lost_replies:
            self.lost_replies.append(call)
            raise ConnectionError("the reply was lost")
        return reply


async def test_no_lost_reply_changes_anything_twice(redis_config: RedisConfig, run: str) -> None:
    await (await attach(redis_config, run, policy(S=1, P=2))).aclose()
    link = LosesReplies(make_client(redis_config), 5.0)
    buffer = RedisBuffer(link, run)
    await buffer.put_tasks(tasks(0, 20))
    epoch = (await buffer.rollback(0)).epoch
    first, second, third, fourth = await admit(buffer, 4)
    assert (await buffer.stats()).inflight == 4
    await buffer.save_partial(first, partial_of(first))
    await finish(buffer, first, second)
    await buffer.discard_group(third, ReleaseReason.FILTERED)
    await buffer.give_back(fourth)
    assert (await train(buffer, 0, epoch)).groups == [group_of(first), group_of(second)]
    await buffer.commit_checkpoint(epoch=epoch, version=1)
    stats = await buffer.stats()
    assert (released(stats), stats.inflight, stats.active, stats.kept) == ({"trained": 2, "filtered": 1}, 1, 1, 0)
    assert {call.script.name for call in link.lost_replies} >= {"admit_groups", "insert_group", "take_batch"}
    await buffer.aclose()


async def test_scripts_that_the_server_forgot_are_loaded_again(buffer: RedisBuffer, client: Redis) -> None:
    tickets = await admit(buffer, 2)
    await client.script_flush()
    await finish(buffer, *tickets)
    await client.script_flush()
    assert seqs(await take(buffer, 0)) == [0, 1]


async def test_a_finished_run_leaves_no_payloads_behind(buffer: RedisBuffer, client: Redis, run: str) -> None:
    tickets = await admit(buffer, 4)
    for ticket in tickets:
        await buffer.save_partial(ticket, partial_of(ticket))
    await buffer.give_back(tickets[0])
    tickets[:1] = await admit(buffer, 1)
    await buffer.discard_group(tickets[3], ReleaseReason.FAILED)
    await finish(buffer, *tickets[:3])
    await train(buffer, 0)
    for ticket in tickets[:3]:
        await buffer.insert_group(ticket, group_of(ticket))
    await finish(buffer, *await admit(buffer, 1))
    await train(buffer, 1)
    await buffer.put_tasks(tasks(0, 20))
    await buffer.commit_checkpoint(epoch=1, version=2)
    left = {name for name in await keys(client, run) if not name.startswith(("grant:", "rollback:", "wake:"))}
    waiting = {f"task:{index}" for index in range(5, 20)}
    assert left == {"meta", "released", "lengths", "endings", *waiting}


async def test_the_wake_lists_stay_short(buffer: RedisBuffer, client: Redis, run: str) -> None:
    for version in range(4):
        await generate_and_train(buffer, version)
    lists = [name for name, kind in (await keys(client, run)).items() if kind == b"list"]
    assert [await client.llen(f"agrpo:{{{run}}}:{name}") for name in lists] == [1] * len(lists)


async def scripts_run(client: Redis) -> int:
    return int((await client.info("commandstats"))["cmdstat_evalsha"]["calls"])


async def test_waiting_sends_the_server_next_to_nothing(buffer: RedisBuffer, client: Redis) -> None:
    await admit(buffer, 4)
    before = await scripts_run(client)
    waiting = [asyncio.create_task(admit(buffer, 1)), asyncio.create_task(take(buffer, 0))]
    await asyncio.sleep(1.0)
    assert await scripts_run(client) - before <= 6
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_two_processes_share_one_run(buffer: RedisBuffer, redis_config: RedisConfig, run: str) -> None:
    other = await attach(redis_config, run, policy(S=1, P=2))
    waiting = asyncio.create_task(take(buffer, 0))
    await finish(other, *await admit(other, 2))
    async with asyncio.timeout(1):
        assert seqs(await waiting) == [0, 1]
    await other.aclose()


async def test_joining_does_not_undo_a_live_retuning(buffer: RedisBuffer, redis_config: RedisConfig, run: str) -> None:
    await buffer.update_policy(policy(S=4, P=2))
    await (await attach(redis_config, run, policy(S=1, P=2))).aclose()
    assert (await buffer.stats()).max_staleness == 4
    await (await attach(redis_config, run, policy(S=2, P=2))).aclose()
    assert (await buffer.stats()).max_staleness == 2


async def test_an_ended_run_continues_with_more_steps(buffer: RedisBuffer, redis_config: RedisConfig, run: str) -> None:
    await buffer.end_run()
    await (await attach(redis_config, run, policy(S=1, P=2))).aclose()
    assert (await buffer.stats()).ended
    await (await attach(redis_config, run, policy(S=1, P=2, steps=200))).aclose()
    assert not (await buffer.stats()).ended


async def test_every_stored_value_is_plain_messagepack(
    buffer: RedisBuffer, redis_config: RedisConfig, client: Redis, run: str
) -> None:
    first, second = await admit(buffer, 2)
    await finish(buffer, first)
    await buffer.save_partial(second, partial_of(second))
    strings = [name async for name in client.scan_iter(match=f"*{run}*", _type="string")]
    names = [name for name in strings if b"grant:" not in name and b"rollback:" not in name]
    records = [msgpack.unpackb(await client.get(name)) for name in names]
    assert {record["kind"] for record in records} == {"task", "group", "partial"}
    group = next(record for record in records if record["kind"] == "group")
    assert group["samples"][0]["tokens"] == tokens_to_bytes([0, 1, 2, 3])


async def test_wiping_a_run_leaves_its_neighbours_alone(
    buffer: RedisBuffer, redis_config: RedisConfig, client: Redis, run: str
) -> None:
    neighbour = await attach(redis_config, run + "-2", policy())
    assert await wipe_run(redis_config, run) > 20
    assert await wipe(client, run) == 0
    assert (await neighbour.stats()).groups_per_step == 2
    await neighbour.aclose()


async def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    config = RedisConfig(url=f"unix://{tmp_path}/none.sock", timeout_s=0.2)
    with pytest.raises(ServerLost, match=r"none\.sock"):
        await attach(config, "run", policy())
    with pytest.raises(ServerLost):
        await connect_board(config, "run")


class Stub:
    """A server that says of itself what it is told to."""

    endpoint, discovery, durable = "/stub.sock", None, True

    def __init__(self, server: dict[str, str], policy: str = "noeviction") -> None:
        persistence = {"aof_enabled": "1"}
        self._answers = {"server": server, "memory": {"maxmemory_policy": policy}, "persistence": persistence}

    async def info(self, section: str) -> dict[str, str]:
        return self._answers[section]

    async def config_get(self, _name: str) -> dict[str, str]:
        raise NoPermissionError("this user has no permissions to run the 'config|get' command")


@pytest.mark.parametrize("about", [{"redis_version": "7.0.15"}, {"redis_version": "7.2.4", "valkey_version": "9.1.2"}])
async def test_a_server_whose_configuration_is_forbidden_is_judged_by_its_info(about: dict[str, str]) -> None:
    await check_server(Stub(about))  # type: ignore[arg-type]
    with pytest.raises(ServerRefused, match="allkeys-lru"):
        await check_server(Stub(about, policy="allkeys-lru"))  # type: ignore[arg-type]


async def test_a_server_that_is_too_old_is_refused() -> None:
    with pytest.raises(ServerRefused, match=r"version 6\.2\.14"):
        await check_server(Stub({"redis_version": "6.2.14"}))  # type: ignore[arg-type]


async def test_a_cancelled_task_ends_wherever_its_call_is(buffer: RedisBuffer) -> None:
    """Every loop of a server is stopped by cancelling it: a call that swallowed that would keep it alive."""

    async def beat_for_ever() -> None:
        while True:
            await buffer.renew_leases([])

    for attempt in range(400):
        task = asyncio.create_task(beat_for_ever())
        for _ in range(attempt % 40):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=1.0)
        assert done, f"attempt {attempt}: the cancellation was swallowed"

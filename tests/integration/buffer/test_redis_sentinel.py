"""A run on a primary that Sentinel watches, and what its replicas are worth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ReplicasBehind, ServerLost, ServerRefused
from tests.support.buffer_cases import admit, finish, seqs, take
from tests.support.redis_life import attach, begin, live_through
from tests.support.redis_topologies import Sentinels, Server, replica_of, running, wait_for_replicas


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A primary and its replica."""
    primary = Server(tmp_path / "primary")
    replica = replica_of(tmp_path / "replica", primary)
    with running(primary, replica):
        wait_for_replicas(primary, 1)
        yield primary, replica


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    with Sentinels(tmp_path_factory.mktemp("sentinels")).running() as sentinels:
        yield sentinels


def config_of(primary: Server, timeout_s: float) -> RedisConfig:
    return RedisConfig(url=primary.url, replicas_to_wait_for=1, timeout_s=timeout_s)


async def test_writers_survive_a_failover_and_confirmed_writes_persist(sentinels: Sentinels, run: str) -> None:
    """It leaves no replica."""
    await live_through(RedisConfig(url=sentinels.url, replicas_to_wait_for=1), run)
    buffer = await begin(RedisConfig(url=sentinels.url, replicas_to_wait_for=1), run)
    tickets = await admit(buffer, 4)
    await finish(buffer, tickets[0])
    await buffer.aclose()
    buffer = await attach(RedisConfig(url=sentinels.url), run)  # no replica will be left
    waiting = asyncio.create_task(take(buffer, 0, timeout_s=30.0))
    await asyncio.sleep(0.1)
    sentinels.primary.kill()
    insert = asyncio.create_task(finish(buffer, tickets[1]))
    await asyncio.sleep(0.3)
    assert not insert.done()
    await insert
    assert seqs(await waiting) == [0, 1]
    assert sentinels.replica.admin.info("replication")["role"] == "master"
    stats = await buffer.stats()
    assert (stats.taken, stats.inflight, stats.admitted) == (2, 2, 4)
    await buffer.aclose()


async def test_an_unknown_service_is_named_and_a_sentinel_that_hangs_is_passed_over(
    sentinels: Sentinels, run: str
) -> None:
    """The last test of these sentinels: two of them hang."""
    with pytest.raises(ServerLost, match="no service other"):
        await attach(RedisConfig(url=sentinels.url.replace("/main", "/other"), timeout_s=1.0), run)
    with pytest.raises(ServerRefused, match=r"redis\+sentinel://"):
        await attach(RedisConfig(url=sentinels.sentinels[0].url), run)
    for sentinel in sentinels.sentinels[:2]:
        sentinel.pause()
    buffer = await attach(RedisConfig(url=sentinels.url, timeout_s=4.0), run)  # the third one answers
    assert (await buffer.stats()).groups_per_step == 2
    await buffer.aclose()


async def test_a_replica_alone_is_named(pair: tuple[Server, Server], run: str) -> None:
    with pytest.raises(ServerLost, match="read-only replica"):
        await attach(RedisConfig(url=pair[1].url, timeout_s=0.5), run)


async def test_a_change_counts_once_the_replica_has_it(pair: tuple[Server, Server], run: str) -> None:
    primary, replica = pair
    buffer = await begin(config_of(primary, 20.0), run)
    tickets = await admit(buffer, 2)
    replica.pause()
    inserts = asyncio.create_task(finish(buffer, *tickets))
    await asyncio.sleep(0.5)
    assert not inserts.done()
    replica.resume()
    await inserts
    primary.kill()
    replica.admin.replicaof("NO", "ONE")
    survivor = await attach(RedisConfig(url=replica.url), run)
    assert seqs(await take(survivor, 0)) == [0, 1]
    await asyncio.gather(buffer.aclose(), survivor.aclose())


@pytest.mark.slow
async def test_a_silent_replica_is_named_and_a_repeated_call_is_not_taken_for_confirmed(
    pair: tuple[Server, Server], run: str
) -> None:
    """A repetition finds the change made and writes nothing: WAIT on a connection without writes confirms anything."""
    primary, replica = pair
    buffer = await begin(config_of(primary, 2.0), run)
    (ticket,) = await admit(buffer, 1)
    replica.pause()
    for _ in range(2):
        with pytest.raises(ReplicasBehind, match="0 of 1 replicas"):
            await finish(buffer, ticket)
    assert (await buffer.stats()).ready == 1
    replica.resume()
    await finish(buffer, ticket)
    stats = await buffer.stats()
    assert (stats.ready, stats.inflight) == (1, 0)
    await buffer.aclose()


async def test_a_confirmation_survives_lost_scripts_and_a_full_server(pair: tuple[Server, Server], run: str) -> None:
    primary, _ = pair
    buffer = await begin(config_of(primary, 5.0), run)
    tickets = await admit(buffer, 2)
    await finish(buffer, *tickets)
    primary.admin.script_flush()
    primary.admin.config_set("maxmemory", 1)
    assert seqs(await take(buffer, 0)) == [0, 1]
    await buffer.aclose()


async def test_a_change_that_a_failover_would_undo_is_not_confirmed(pair: tuple[Server, Server], run: str) -> None:
    primary, replica = pair
    buffer = await begin(config_of(primary, 2.0), run)
    (ticket,) = await admit(buffer, 1)
    replica.admin.replicaof("NO", "ONE")  # cut off from the primary, it is promoted
    with pytest.raises(ReplicasBehind):
        await finish(buffer, ticket)
    survivor = await attach(RedisConfig(url=replica.url), run)
    assert (await survivor.stats()).inflight == 1
    await finish(survivor, ticket)
    assert (await survivor.stats()).ready == 1
    await asyncio.gather(buffer.aclose(), survivor.aclose())

"""A run on a Redis Cluster: on one node of it, wherever that is by now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ConfigError, ServerLost, ServerRefused
from buffer import make_client, wipe_run
from tests.support.buffer_cases import admit, finish, seqs, take
from tests.support.redis_life import attach, begin, live_through
from tests.support.redis_topologies import Cluster, Server, SlotMove, running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")).running() as cluster:
        yield cluster


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_run_is_stored_on_the_node_of_its_slot_with_any_seed(cluster: Cluster, index: int) -> None:
    seed = cluster.primaries[(index + 1) % 3]
    await live_through(RedisConfig(url=cluster.url(seed)), cluster.run_on(index))


async def test_all_keys_of_a_run_are_on_one_node(cluster: Cluster) -> None:
    run = cluster.run_on(1)
    buffer = await begin(RedisConfig(url=cluster.url()), run)
    counts = [len(list(node.admin.scan_iter(match=f"*{run}*"))) for node in cluster.primaries]
    assert counts[0] == counts[2] == 0 < counts[1]
    await buffer.aclose()


async def test_a_wiped_run_leaves_no_key_and_takes_no_other(cluster: Cluster) -> None:
    config, run = RedisConfig(url=cluster.url(cluster.primaries[0])), cluster.run_on(1)
    for buffer in (await begin(config, run), await begin(config, f"{run}-other")):
        await buffer.aclose()
    assert await wipe_run(config, run) > 0
    keys = {key for node in cluster.primaries for key in node.admin.scan_iter(match=f"*{run}*")}
    assert keys
    assert all(f"{{{run}-other}}" in str(key) for key in keys)


async def test_calls_wait_while_the_slot_moves_and_go_on_at_its_new_node(cluster: Cluster) -> None:
    run = cluster.run_on(0)
    buffer = await begin(RedisConfig(url=cluster.url()), run)
    tickets = await admit(buffer, 2)
    waiting = asyncio.create_task(take(buffer, 0, timeout_s=30.0))
    move = SlotMove(cluster, run, cluster.primaries[0], cluster.primaries[1])
    move.begin()
    move.move(5)
    inserts = asyncio.create_task(finish(buffer, *tickets))
    await asyncio.sleep(0.3)
    assert not inserts.done()
    move.finish()
    await inserts
    assert seqs(await waiting) == [0, 1]
    assert (await buffer.stats()).taken == 2
    await buffer.aclose()


async def test_a_seed_that_is_gone_is_passed_over(cluster: Cluster, tmp_path: Path) -> None:
    gone = Server(tmp_path)
    config = RedisConfig(url=cluster.url(gone, cluster.primaries[2]), timeout_s=5.0)
    await live_through(config, cluster.run_on(0))


@pytest.mark.faults
async def test_calls_go_on_at_the_replica_once_it_is_promoted(tmp_path: Path) -> None:
    with Cluster(tmp_path, replica=True).running() as cluster:
        run = cluster.run_on(0)
        buffer = await begin(RedisConfig(url=cluster.url(), replicas_to_wait_for=1, timeout_s=30.0), run)
        tickets = await admit(buffer, 2)
        await buffer.aclose()
        buffer = await attach(RedisConfig(url=cluster.url(), timeout_s=30.0), run)  # no replica will be left
        waiting = asyncio.create_task(take(buffer, 0, timeout_s=30.0))
        await asyncio.sleep(0.1)
        cluster.primaries[0].kill()
        await finish(buffer, *tickets)
        assert seqs(await waiting) == [0, 1]
        assert (await buffer.stats()).taken == 2
        await buffer.aclose()


async def test_a_node_that_is_down_is_named(tmp_path: Path) -> None:
    with Cluster(tmp_path).running() as cluster:
        buffer = await begin(RedisConfig(url=cluster.url(), timeout_s=2.0), cluster.run_on(2))
        cluster.primaries[2].kill()
        with pytest.raises(ServerLost, match=f"cluster of 127.0.0.1:{cluster.primaries[0].port}"):
            await buffer.stats()
        await buffer.aclose()


@pytest.mark.faults
async def test_a_cluster_that_is_down_is_reported(tmp_path: Path) -> None:
    with Cluster(tmp_path).running() as cluster:
        buffer = await begin(RedisConfig(url=cluster.url(), timeout_s=6.0), cluster.run_on(0))
        cluster.primaries[1].kill()
        cluster.primaries[2].kill()  # the node of the run lives, but without a majority it serves nobody
        with pytest.raises(ServerLost, match=r"cluster_state:ok"):
            while True:
                await buffer.stats()
        await buffer.aclose()


async def test_one_node_alone_is_refused_with_the_url_to_use(cluster: Cluster) -> None:
    with pytest.raises(ServerRefused, match=r"redis\+cluster://"):
        await attach(RedisConfig(url=cluster.primaries[0].url), "run")


async def test_a_server_that_is_no_cluster_is_refused_with_the_url_to_use(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with running(server), pytest.raises(ServerRefused, match=f"redis://.*:{server.port}"):
        await attach(RedisConfig(url=f"redis+cluster://127.0.0.1:{server.port}"), "run")


async def test_another_database_than_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"database 0.*3"):
        make_client(RedisConfig(url="redis+cluster://127.0.0.1:7000/3"))

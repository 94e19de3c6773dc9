"""What can go wrong with one server: a call outlives it, or ends in time with an error that says how to mend it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import BufferFault, ServerFull, ServerLost
from async_grpo.wire import Group, ReleaseReason, Sample, Task, Ticket, logprobs_to_bytes, tokens_to_bytes
from async_grpo.wire.records import VersionSpan
from buffer import EmbeddedServer, RedisBuffer, make_client
from buffer.redis import retrying
from buffer.redis.client import KEEPALIVE_IDLE_S
from buffer.redis.retrying import RetryingClient
from rollout_server.dispatch.admission import TaskFeeder
from tests.support.buffer_cases import admit, finish, group_of, publish, released, seqs, take, tasks
from tests.support.ports import free_port
from tests.support.redis_life import attach, begin, live_through
from tests.support.redis_proxies import Proxy
from tests.support.redis_topologies import Server, replica_of, running, wait_for_replicas
from tests.support.waiting import wait_until

BULK_TOKENS = 100_000
"""Of a group of 0.8 MB."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server", "--enable-debug-command", "yes")
    with running(server):
        yield server


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.port).running() as proxy:
        yield proxy


def bulky(ticket: Ticket, tokens: int = BULK_TOKENS) -> Group:
    sample = Sample(
        tokens=tokens_to_bytes(range(tokens)),
        logprobs=logprobs_to_bytes([0.0] * tokens),
        spans=[VersionSpan(ticket.version, 0, tokens)],
    )
    return Group(seq=ticket.seq, attempt=ticket.attempt, task=ticket.task, samples=[sample])


def payloads(server: Server, run: str) -> set[str]:
    """Groups, partials and staged values that the server stores."""
    names = [name.decode().split("}:")[1] for name in server.admin.scan_iter(match=f"*{run}*")]
    return {name for name in names if name.startswith(("group:", "partial:", "stage"))}


async def fill(buffer: RedisBuffer, server: Server) -> list[Ticket]:
    """Two groups are in, the memory of the server is used up, and two tickets are left."""
    tickets = await admit(buffer, 4)
    for ticket in tickets[:2]:
        await buffer.insert_group(ticket, bulky(ticket, 4 * BULK_TOKENS))
    server.admin.config_set("maxmemory", settled_memory(server) - 8 * BULK_TOKENS)
    return tickets[2:]


def settled_memory(server: Server) -> int:
    """What has come in is counted twice until its connection's buffer is freed, which the server does by and by."""
    readings: list[int] = []

    def steady() -> bool:
        readings.append(server.admin.info("memory")["used_memory"])
        time.sleep(0.2)
        return len(readings) > 8 and max(readings[-8:]) - min(readings[-8:]) < BULK_TOKENS

    wait_until(steady, "the buffers are freed")
    return readings[-1]


async def test_a_full_server_fails_writers_by_name_and_keeps_nothing_of_theirs(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=0.5), run)
    third, fourth = await fill(buffer, server)
    before = await buffer.stats()
    with pytest.raises(ServerFull, match=r"0\.5 s.*maxmemory"):
        await buffer.insert_group(third, bulky(third))
    with pytest.raises(ServerFull):
        await buffer.put_tasks(tasks(20, 5))
    assert await buffer.stats() == before
    assert before.ready == 2 == len(payloads(server, run))
    await buffer.give_back(third)
    await buffer.discard_group(fourth, ReleaseReason.FILTERED)
    stats = await buffer.stats()
    assert (released(stats), stats.inflight, stats.active) == ({"filtered": 1}, 1, 3)
    await buffer.aclose()


async def test_a_full_server_can_be_drained_and_writers_go_on(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=30.0), run)
    third, fourth = await fill(buffer, server)
    writer = asyncio.create_task(buffer.insert_group(third, bulky(third)))
    server.admin.script_flush()  # scripts can be loaded without memory, too
    assert await buffer.renew_leases([third, fourth]) == []
    await buffer.discard_group(fourth, ReleaseReason.FILTERED)
    batch = await take(buffer, 0)
    await publish(buffer, 1)
    await buffer.release_batch(batch)
    assert not writer.done()
    await buffer.commit_checkpoint(epoch=1, version=1)
    await writer
    assert (await buffer.stats()).ready == 1 == len(payloads(server, run))
    await buffer.aclose()


@pytest.mark.parametrize("request_bytes", [b"EVALSHA", b"NX", b"MGET", b"BLPOP"])
async def test_a_connection_that_is_cut_before_the_reply_changes_nothing_twice(
    proxy: Proxy, run: str, request_bytes: bytes
) -> None:
    buffer = await begin(RedisConfig(url=f"redis://127.0.0.1:{proxy.port}", timeout_s=20.0), run)
    tickets = await admit(buffer, 2)
    proxy.swallow_next_reply_to(request_bytes)
    waiting = asyncio.create_task(take(buffer, 0, timeout_s=30.0))
    await asyncio.sleep(0.05)
    await finish(buffer, *tickets)
    batch = await waiting
    assert batch.groups == [group_of(ticket) for ticket in tickets]
    proxy.swallow_next_reply_to(b"EVALSHA")
    await publish(buffer, 1)
    await buffer.release_batch(batch)
    assert await admit(buffer, 2)
    stats = await buffer.stats()
    assert (stats.released["trained"], stats.inflight, stats.active) == (2, 2, 2)
    assert proxy.swallowed == 2
    await buffer.aclose()


async def test_nothing_that_was_answered_is_lost_by_a_kill(tmp_path: Path, run: str) -> None:
    server = EmbeddedServer(tmp_path / "server", RedisConfig(fsync="always"))
    config = RedisConfig(url=server.start(), timeout_s=30.0)
    buffer = await begin(config, run)
    answered: list[int] = []

    async def write() -> None:
        for ticket in await admit(buffer, 4):
            await buffer.insert_group(ticket, bulky(ticket))
            answered.append(ticket.seq)

    writer = asyncio.create_task(write())
    while not answered:
        await asyncio.sleep(0)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    count = len(answered)
    while server.alive():
        await asyncio.sleep(0.01)
    server.start()
    survivor = await attach(config, run)
    assert (await survivor.stats()).ready >= count
    await writer
    assert answered == [0, 1, 2, 3]
    stats = await survivor.stats()
    assert (stats.ready, stats.inflight) == (4, 0)
    assert [len(group.samples[0].tokens) for group in (await take(survivor, 0)).groups] == [4 * BULK_TOKENS] * 2
    await asyncio.gather(buffer.aclose(), survivor.aclose())
    server.stop()


async def test_a_feeder_puts_tasks_again_that_a_failover_lost(
    tmp_path: Path, server: Server, proxy: Proxy, run: str
) -> None:
    replica = replica_of(tmp_path / "replica", server)
    with running(replica):
        wait_for_replicas(server, 1)
        buffer = await begin(RedisConfig(url=f"redis://127.0.0.1:{proxy.port}", timeout_s=20.0), run, count=20)
        wait_until(lambda: replica.admin.keys(f"*{run}*task:19"), "the replica has the first 20 tasks")
        replica.admin.replicaof("NO", "ONE")
        await buffer.put_tasks(tasks(20, 20))
        asked: list[int] = []

        class Source:
            def task(self, index: int) -> Task:
                if not asked:  # it has looked, and has not appended yet
                    proxy.lead_to(replica.port)
                    server.kill()
                asked.append(index)
                return tasks(index, 1)[0]

        await TaskFeeder(buffer, Source(), target=100).top_up_buffer()  # type: ignore[arg-type]
        assert (asked[0], asked[-1]) == (40, 99)
        assert asked.count(20) == 1
        assert (await buffer.stats()).tasks_put == 100
        await buffer.aclose()


async def test_an_opening_that_fails_leaves_no_connection(server: Server, run: str) -> None:
    await (await begin(RedisConfig(url=server.url), run)).aclose()
    server.admin.hset(f"agrpo:{{{run}}}:meta", "format", 99)
    before = server.admin.info("clients")["connected_clients"]
    failures = []  # with the frames that they came through: nothing is closed by the collection of garbage
    for _ in range(5):
        with pytest.raises(BufferFault, match="format 99") as failure:
            await attach(RedisConfig(url=server.url), run)
        failures.append(failure)
    wait_until(lambda: server.admin.info("clients")["connected_clients"] <= before + 1, "all are closed", 5.0)


async def test_a_run_that_its_server_has_forgotten_is_named(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url), run)
    server.admin.flushall()
    with pytest.raises(BufferFault, match=f"no data of run {run}"):
        await buffer.stats()
    await buffer.aclose()


async def test_a_call_made_while_an_error_is_handled_does_not_take_it_for_its_own(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=1.0), run)
    server.kill()
    try:
        raise BufferFault("of something else")
    except BufferFault:
        with pytest.raises(ServerLost, match="1 s: Error"):
            await buffer.stats()
    await buffer.aclose()


async def test_a_server_that_is_silent_for_a_while_is_waited_for(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=30.0), run)
    tickets = await admit(buffer, 2)
    waiting = asyncio.create_task(take(buffer, 0, timeout_s=30.0))
    server.pause()
    inserts = asyncio.create_task(finish(buffer, *tickets))
    await asyncio.sleep(0.5)
    assert not inserts.done()
    server.resume()
    await inserts
    assert seqs(await waiting) == [0, 1]
    await buffer.aclose()


async def test_a_server_that_stays_silent_is_named_in_time(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=1.0), run)
    (ticket,) = await admit(buffer, 1)
    waiting = asyncio.create_task(take(buffer, 0, timeout_s=1.0))
    await asyncio.sleep(0.05)
    server.pause()
    started = time.monotonic()
    calls = (buffer.stats(), finish(buffer, ticket), waiting)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, ServerLost)
        assert re.search(rf"127\.0\.0\.1:{server.port} .*1 s: no reply", str(error))
    assert time.monotonic() - started < 10
    server.resume()
    await finish(buffer, ticket)
    assert (await buffer.stats()).ready == 1
    await buffer.aclose()


async def test_connections_that_fall_silent_are_replaced_in_time(
    proxy: Proxy, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "RECHECK_S", 0.5)
    monkeypatch.setattr(retrying, "LATE_WAKE_S", 0.5)
    buffer = await begin(RedisConfig(url=f"redis://127.0.0.1:{proxy.port}", timeout_s=9.0), run)
    small, large = await admit(buffer, 2)
    waiting = asyncio.create_task(take(buffer, 0, timeout_s=60.0))
    await asyncio.gather(*(buffer.stats() for _ in range(20)))  # many connections, each of which will be silent
    proxy.fall_silent()
    started = time.monotonic()
    inserts = [buffer.insert_group(small, group_of(small)), buffer.insert_group(large, bulky(large, 20 * BULK_TOKENS))]
    await asyncio.gather(buffer.stats(), *inserts)
    assert time.monotonic() - started < 9.0
    assert seqs(await waiting) == [0, 1]
    await buffer.aclose()


async def test_idle_connections_are_probed_by_the_kernel(server: Server) -> None:
    link = RetryingClient(make_client(RedisConfig(url=server.url)), 5.0)
    await link.call(link.client.ping)
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    timers = [each[5] for each in sockets if each[2].endswith(f":{server.port:04X}") and each[3] == "01"]
    due_s = [int(timer[3:], 16) / os.sysconf("SC_CLK_TCK") for timer in timers if timer.startswith("02:")]
    assert min(due_s) <= KEEPALIVE_IDLE_S
    await link.aclose()


async def test_a_server_that_is_busy_is_waited_for(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=30.0), run)
    busy = asyncio.create_task(asyncio.to_thread(server.admin.execute_command, "DEBUG SLEEP", 0.5))
    await asyncio.sleep(0.1)
    assert (await buffer.stats()).tasks_put == 20
    await busy
    await buffer.aclose()


@pytest.mark.faults
async def test_a_server_that_reads_its_file_is_waited_for_or_named(tmp_path: Path, run: str) -> None:
    with running(server := Server(tmp_path, "--appendonly", "yes")):
        await (await begin(RedisConfig(url=server.url), run)).aclose()
        with server.admin.pipeline(transaction=False) as pipe:
            for index in range(30_000):
                pipe.set(f"other:{index}", index)
            pipe.execute()
    slow = Server(tmp_path, "--appendonly", "yes", "--key-load-delay", "50")
    slow.launch()
    try:
        with pytest.raises(ServerLost, match=r"loading its file .* 1 s"):
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", slow.port)).close()
                    await attach(RedisConfig(url=slow.url, timeout_s=1.0), run)
                await asyncio.sleep(0.01)
        buffer = await attach(RedisConfig(url=slow.url, timeout_s=120.0), run)
        assert (await buffer.stats()).tasks_put == 20
        await buffer.aclose()
    finally:
        slow.kill()


@pytest.mark.parametrize(("host", "timeout_s"), [("nowhere.invalid", 3.0), ("127.0.0.1", 0.3)])
async def test_a_host_that_does_not_exist_and_a_port_where_nobody_listens_are_named(
    host: str, timeout_s: float
) -> None:
    where = f"{host}:{free_port()}"
    with pytest.raises(ServerLost, match=rf"{where} .* {timeout_s:g} s: .*connect.* {where}"):
        await attach(RedisConfig(url=f"redis://{where}", timeout_s=timeout_s), "run")


async def test_a_server_that_wants_more_replicas_than_it_has_is_named(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=0.5), run)
    server.admin.config_set("min-replicas-to-write", 1)
    with pytest.raises(ServerLost, match="min-replicas-to-write"):
        await buffer.end_run()
    await buffer.aclose()


async def test_a_cancelled_call_never_leaves_its_reply_to_the_next_one(server: Server, run: str) -> None:
    link = RetryingClient(make_client(RedisConfig(url=server.url)), 5.0)
    names = [f"agrpo:{{{run}}}:{index}" for index in range(64)]
    await link.client.mset({name: name.encode() * 200 for name in names})
    for attempt in range(400):
        cut = asyncio.create_task(link.fetch_values(names[: attempt % 64 + 1]))
        for _ in range(attempt % 23):
            await asyncio.sleep(0)
        cut.cancel()
        (found,) = await link.fetch_values([names[attempt % 64]])
        assert found == names[attempt % 64].encode() * 200
        await asyncio.gather(cut, return_exceptions=True)
    await link.aclose()


async def test_a_cancelled_transition_has_happened_as_a_whole_or_not_at_all(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url), run, count=200)
    for attempt in range(60):
        (ticket,) = await admit(buffer, 1)
        insert = asyncio.create_task(buffer.insert_group(ticket, group_of(ticket)))
        for _ in range(attempt % 12):
            await asyncio.sleep(0)
        insert.cancel()
        await asyncio.gather(insert, return_exceptions=True)
        await buffer.insert_group(ticket, group_of(ticket))
        stats = await buffer.stats()
        assert (stats.inflight, stats.ready) == (0, 1 + attempt % 2)
        if attempt % 2:
            batch = await take(buffer, attempt // 2)
            await publish(buffer, attempt // 2 + 1)
            await buffer.release_batch(batch)
    await buffer.aclose()


async def test_many_calls_at_once_share_few_connections(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=30.0), run)
    await asyncio.gather(*(buffer.stats() for _ in range(500)))
    assert server.admin.info("clients")["connected_clients"] < 60
    await buffer.aclose()


async def test_closing_a_lost_connection_raises_nothing(server: Server, run: str) -> None:
    buffer = await begin(RedisConfig(url=server.url, timeout_s=1.0), run)
    server.pause()
    with pytest.raises(BufferFault):
        await buffer.stats()
    await buffer.aclose()


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
async def test_a_run_lives_on_the_servers_of_this_machine(tmp_path: Path, run: str, name: str) -> None:
    if (binary := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed on this machine; the bundled server is tested instead")
    with running(server := Server(tmp_path, binary=binary)):
        await live_through(RedisConfig(url=server.url), run)


async def test_a_rollback_whose_reply_is_lost_starts_one_epoch(proxy: Proxy, run: str) -> None:
    buffer = await begin(RedisConfig(url=f"redis://127.0.0.1:{proxy.port}", timeout_s=20.0), run)
    epoch = (await buffer.stats()).epoch
    proxy.swallow_next_reply_to(b"EVALSHA")
    assert (await buffer.rollback(0)).epoch == epoch + 1
    assert proxy.swallowed == 1
    assert (await buffer.rollback(0)).epoch == epoch + 2
    await buffer.aclose()


async def test_calls_that_fail_while_another_waits_leave_no_connection_behind(server: Server) -> None:
    client, admin = make_client(RedisConfig(url=server.url, timeout_s=20.0)), server.admin
    link = RetryingClient(client, 20.0)
    connected = []
    for _ in range(20):
        await fail_while_another_waits(link, admin)
        connected.append(len(admin.client_list()))
    assert connected == connected[:1] * 20
    assert not client.connection_pool._in_use_connections
    await link.aclose()


async def fail_while_another_waits(link: RetryingClient, admin: Any) -> None:
    """A call is refused, and repeated, while another one waits for an element of a list."""
    answers: list[str | retrying.RetryLater] = [retrying.RetryLater(), "woken"]

    async def look() -> str | retrying.RetryLater:
        return answers.pop(0)

    waiting = asyncio.create_task(link.retry_until("wake", look, waited_for="an element", timeout_s=20.0))
    await happens(lambda: bool(admin.info("clients")["blocked_clients"] == 1))
    refused = count_refusals(admin)
    admin.config_set("maxmemory", 1)
    failing = asyncio.create_task(link.call(lambda: link.client.set("key", "value")))
    await happens(lambda: count_refusals(admin) > refused)
    admin.config_set("maxmemory", 0)
    await failing
    admin.rpush("wake", 1)
    assert await waiting == "woken"


def count_refusals(admin: Any) -> int:
    """Number of commands that the server has refused because its memory was full."""
    return int(admin.info("errorstats").get("errorstat_OOM", {"count": 0})["count"])


async def happens(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not true():
            await asyncio.sleep(0.01)

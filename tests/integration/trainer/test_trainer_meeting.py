"""Nodes of a trainer meet over real connections: who is refused, who is missed, and how a loss is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from async_grpo.config.trainer import RendezvousConfig
from async_grpo.errors import ConfigError, NodeLost, WaitTimeout, WireError
from async_grpo.utils.frames import pack_frame
from trainer.ranks.peers import Ended, Hello, PeerConnection, Peers, Start, Stop
from trainer.ranks.rendezvous import Host, Invitation, host_rendezvous, join_rendezvous

HERE = "127.0.0.2"
PATIENCE_S = 60.0


def invitation(rank: int, port: int, *, nodes: int = 2, timeout_s: float = 30.0, **said: Any) -> Invitation:
    hello = {"id": "run", "rank": rank, "nodes": nodes, "processes": 8, **said}
    where = RendezvousConfig(address=HERE, port=port, timeout_s=timeout_s)
    return Invitation(where, HERE, Hello(**hello))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        found: int = probe.getsockname()[1]
        return found


@asynccontextmanager
async def met(port: int, silence_s: float = 30.0) -> AsyncIterator[tuple[Host, PeerConnection, Peers]]:
    """Two nodes after `Start`; what the second has is its connection, what the first has its peers."""
    async with asyncio.timeout(PATIENCE_S):
        joining = asyncio.create_task(join_rendezvous(invitation(1, port)))
        async with host_rendezvous(invitation(0, port)) as host:
            peers = Peers(host.connections.values(), silence_s)
            peers.broadcast(Start())
            connection = await joining
            async with peers.exchange_heartbeats():
                yield host, connection, peers
            await connection.close()


@asynccontextmanager
async def hosting(port: int) -> AsyncIterator[None]:
    """Node 0 waits for another as long as the block lasts."""

    async def lead() -> None:
        async with host_rendezvous(invitation(0, port)):
            raise AssertionError("they have met")

    leading = asyncio.create_task(lead())
    await asyncio.sleep(0)  # it listens
    try:
        yield
    finally:
        leading.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConfigError):
            await leading


async def refusal(port: int, **said: Any) -> str:
    """What a node is told that says this of itself, when node 0 goes on waiting for another."""
    second = invitation(said.pop("rank", 1), port, **said)
    async with hosting(port), asyncio.timeout(PATIENCE_S):
        with pytest.raises(ConfigError) as caught:
            await join_rendezvous(second)
    return str(caught.value)


async def test_nodes_that_agree_meet_at_the_address_of_node_0_and_nowhere_else(port: int) -> None:
    async with met(port) as (host, connection, _):
        assert list(host.connections) == [1]
        assert connection.own_address.startswith("127.")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_a_node_that_never_comes_is_named_to_all_who_have(port: int) -> None:
    waiting = asyncio.create_task(join_rendezvous(invitation(1, port, nodes=3)))
    with pytest.raises(WaitTimeout, match="node 2"):
        async with host_rendezvous(invitation(0, port, nodes=3, timeout_s=2.0)):
            raise AssertionError("they have met")
    with pytest.raises(NodeLost, match=r"node 0 .* 2 s .*node 2"):
        await waiting


async def test_a_node_0_that_waits_in_vain_says_whom_it_has_turned_away(port: int) -> None:
    joining = asyncio.create_task(join_rendezvous(invitation(1, port, processes=4)))
    with structlog.testing.capture_logs() as logs, pytest.raises(WaitTimeout) as caught:
        async with host_rendezvous(invitation(0, port, timeout_s=2.0)):
            raise AssertionError("they have met")
    assert re.search(r"node 1 .*trainer\.nodes 2", str(caught.value))
    (warned,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warned["node"] == "node 1 (127.0.0.1)"
    assert warned["reason"].startswith("node 1 has trainer.nodes 2 and trainer.processes 4")
    with pytest.raises(ConfigError):
        await joining


async def test_a_caller_that_speaks_otherwise_is_hung_up_on_and_logged(port: int) -> None:
    async with hosting(port):
        reader, writer = await asyncio.open_connection(HERE, port)
        with structlog.testing.capture_logs() as logs:
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == b""
        writer.close()
    (warned,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "a caller at 127.0.0.1: a frame claims" in warned["reason"]


async def test_a_node_0_of_another_release_leaves_no_connection_behind(port: int) -> None:
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_frame(b"???", 3))
        await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(answer, HERE, port), asyncio.timeout(PATIENCE_S):
        with pytest.raises(WireError, match="release"):
            await join_rendezvous(invitation(1, port))
        await ended.wait()


async def test_a_node_0_that_never_comes_is_named(port: int) -> None:
    with pytest.raises(WaitTimeout, match=r"node 0 .*not answer"):
        await join_rendezvous(invitation(1, port, timeout_s=1.0))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"processes": 4}, "node 1 has trainer.nodes 2 and trainer.processes 4, and node 0 2 and 8"),
        ({"id": "other run"}, "trains 'run', and this node 'other run'"),
        ({"rank": 2}, "node 2 connected to node 0, but trainer.nodes is 2"),
    ],
)
async def test_a_node_that_would_train_something_else_is_turned_away(
    port: int, said: dict[str, Any], reason: str
) -> None:
    assert reason in await refusal(port, **said)


async def test_the_end_of_a_connection_is_the_loss_of_its_node(port: int) -> None:
    async with met(port) as (_, connection, peers):
        await connection.close()
        with pytest.raises(NodeLost, match=r"node 1 .*gone"):
            await peers.wait_for_success()


async def test_silence_is_the_loss_of_a_node_though_its_connection_stands(port: int) -> None:
    async with met(port, silence_s=2.0) as (_, _line, peers):
        with pytest.raises(NodeLost, match="sent nothing for 2 s"):
            await peers.wait_for_success()


async def test_beats_keep_both_from_being_taken_for_lost(port: int) -> None:
    async with met(port, silence_s=3.0) as (_, connection, peers):
        others = Peers([connection], 3.0)
        async with others.exchange_heartbeats():
            watching = [asyncio.create_task(peers.wait_for_success()), asyncio.create_task(others.wait_for_success())]
            done, _ = await asyncio.wait(watching, timeout=4.0)
            assert not done
            peers.broadcast(Ended(reason=""))
            others.broadcast(Ended(reason=""))
            await asyncio.gather(*watching)


async def test_a_node_whose_ranks_still_work_is_heard_after_the_end_of_the_other(port: int) -> None:
    async with met(port, silence_s=2.0) as (_, connection, peers):
        others = Peers([connection], 2.0)
        async with others.exchange_heartbeats():
            peers.broadcast(Ended(reason=""))
            await others.wait_for_success()
            await peers.wait_until_gone(3.0)
            others.broadcast(Ended(reason=""))
            await peers.wait_for_success()


async def test_the_loss_of_one_node_does_not_end_the_wait_for_another(port: int) -> None:
    joining = [asyncio.create_task(join_rendezvous(invitation(rank, port, nodes=3))) for rank in (1, 2)]
    async with asyncio.timeout(PATIENCE_S), host_rendezvous(invitation(0, port, nodes=3)) as host:
        peers = Peers(host.connections.values(), 30.0)
        peers.broadcast(Start())
        lost, healthy = await asyncio.gather(*joining)
        async with peers.exchange_heartbeats():
            await lost.close()
            with pytest.raises(NodeLost, match=r"node 1 .*gone"):
                await peers.wait_for_success()
            waiting = asyncio.create_task(peers.wait_until_gone(PATIENCE_S))
            done, _ = await asyncio.wait({waiting}, timeout=0.5)
            assert not done
            healthy.send(Ended(reason=""))
            await waiting
        await healthy.close()


async def test_what_a_node_says_of_its_end_is_passed_on(port: int) -> None:
    async with met(port) as (_, connection, peers):
        connection.send(Stop())
        connection.send(Ended(reason="rank 3 was killed by SIGKILL"))
        with pytest.raises(NodeLost, match=r"node 1 .*rank 3 .*SIGKILL"):
            await peers.wait_for_success()
        assert peers.stop_asked.is_set()


async def test_a_fault_of_the_configuration_there_is_one_here_so_that_nobody_starts_again(port: int) -> None:
    async with met(port) as (_, connection, peers):
        connection.send(Ended(reason="rank 1 ended with exit code 78", config_fault=True))
        with pytest.raises(ConfigError, match=r"node 1 .*rank 1 .*code 78"):
            await peers.wait_for_success()


async def test_a_node_that_is_started_again_is_put_off_and_node_0_is_told(port: int) -> None:
    async with met(port) as (host, _, _):
        newcomer = asyncio.create_task(join_rendezvous(invitation(1, port)))
        async with asyncio.timeout(PATIENCE_S):
            await host.node_restarted.wait()
        assert host.restarted_peer.startswith("node 1 ")
        assert not newcomer.done()
        newcomer.cancel()
        await asyncio.gather(newcomer, return_exceptions=True)

"""One receiver process a machine: shared, restarted by whoever is left, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from async_grpo.errors import ConfigError, WeightsError
from async_grpo.utils.child_process import MARK_VARIABLE
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.shared_memory import store_path
from async_grpo.weights.store import WeightStore
from async_grpo.weights.zmq.sender import ZmqWeightSender
from tests.support.weight_plane import (
    CONFIG,
    LAYOUT,
    RUN,
    Board,
    assert_holds,
    proxy_to,
    publish,
    receiving,
    until,
    with_,
)


def receiver_processes() -> list[psutil.Process]:
    """Those of this test's run, whoever their parent is."""
    folder = str(store_path(RUN, "node").parent)
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(folder in argument for argument in process.info["cmdline"] or [])
        and "async_grpo.weights.zmq.receiver" in (process.info["cmdline"] or [])
    ]


async def test_servers_of_one_machine_share_one_process_which_outlives_the_one_that_started_it(
    publisher: ZmqWeightSender, board: Board
) -> None:
    async with receiving(board, name="b") as second:
        async with receiving(board, name="a") as first:
            publish(publisher, 0)
            for receiver in (first, second):
                assert_holds(receiver.store_path, await receiver.wait_for_newer_version(None, 30))
            (process,) = receiver_processes()
            assert publisher.fetch_stats().served_bytes == LAYOUT.total_bytes
            async with first.hold_newest() as mine, second.hold_newest() as theirs:
                assert mine.identity == theirs.identity == (0, 0)
        publish(publisher, 1)
        assert await second.wait_for_newer_version((0, 0), 30) == (0, 1)
        assert [found.pid for found in receiver_processes()] == [process.pid]
        assert second.restarts == 0
    await until(lambda: not receiver_processes())


async def test_a_server_that_holds_does_not_keep_the_others_from_what_is_there(
    publisher: ZmqWeightSender, board: Board
) -> None:
    async with receiving(board) as slow, receiving(board) as fast:
        publish(publisher, 0)
        await slow.wait_for_newer_version(None, 30)
        async with slow.hold_newest() as held:
            publish(publisher, 1)
            assert await fast.wait_for_newer_version(held.identity, 30) == (0, 1)
            async with fast.hold_newest() as newer:
                assert newer.identity == (0, 1)
                assert_holds(fast.store_path, newer.identity)
            assert_holds(slow.store_path, held.identity)


async def test_a_process_killed_amid_a_transfer_is_started_again_and_servers_keep_their_weights(
    publisher: ZmqWeightSender, board: Board
) -> None:
    async with proxy_to(publisher, board) as proxy, receiving(board) as first, receiving(board) as second:
        publish(publisher, 0)
        seen = await first.wait_for_newer_version(None, 30)
        await second.wait_for_newer_version(None, 30)
        async with second.hold_newest() as held:
            snapshot = WeightStore.open(second.store_path).snapshot(held.identity)
            proxy.pause_s, before = 0.02, proxy.chunks
            publish(publisher, 1)
            await until(lambda: proxy.chunks > before + 5)
            receiver_processes()[0].kill()
            proxy.pause_s = 0.0
            assert await first.wait_for_newer_version(seen, 30) == (0, 1)
            snapshot.verify()
        assert await second.wait_for_newer_version(seen, 30) == (0, 1)
        assert_holds(second.store_path, await second.wait_for_newer_version(seen, 1))
        assert len(receiver_processes()) == 1
        assert first.restarts >= 1


async def test_what_a_killed_process_had_whole_is_the_base_of_the_next_delta(board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, CONFIG) as publisher:
        board.address = publisher.address
        async with receiving(board) as receiver:
            publish(publisher, 0)
            await receiver.wait_for_newer_version(None, 30)
            async with receiver.hold_newest():
                pass
            receiver_processes()[0].kill()
            await until(lambda: receiver.restarts >= 1 and len(receiver_processes()) == 1)
            publish(publisher, 1)
            assert await receiver.wait_for_newer_version((0, 0), 30) == (0, 1)
            assert_holds(receiver.store_path, await receiver.wait_for_newer_version((0, 0), 1))
            assert receiver.stats.unchanged_chunks > 0  # the frozen tensor was not fetched again


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.support.weight_plane import Board, CONFIG
from async_grpo.weights.node.receiver import SharedWeightReceiver
async def main():
    receiver = SharedWeightReceiver(Board().publisher_address, Path(sys.argv[1]), CONFIG)
    while receiver._writer is None:
        await asyncio.sleep(0.01)
    print("connected", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_when_the_last_server_is_killed_the_process_ends_and_leaves_nothing(tmp_path: Path) -> None:
    path = store_path(RUN, "node")
    environment = {**os.environ, MARK_VARIABLE: "7/run/rollout-0"}
    server = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", SERVER, str(path)], stdout=subprocess.PIPE, env=environment, cwd=Path.cwd()
    )
    assert server.stdout is not None
    assert await asyncio.to_thread(server.stdout.readline) == b"connected\n"
    (process,) = receiver_processes()
    assert process.environ()[MARK_VARIABLE] == "7/run/"  # of the run: it outlives the role
    server.send_signal(signal.SIGKILL)
    server.wait()
    await until(lambda: not receiver_processes())
    assert not path.parent.exists()


async def test_the_store_of_a_killed_process_is_removed_by_the_last_server_that_leaves(
    publisher: ZmqWeightSender, board: Board
) -> None:
    receiver = SharedWeightReceiver(board.publisher_address, store_path(RUN, "node"), CONFIG)
    publish(publisher, 0)
    await receiver.wait_for_newer_version(None, 30)
    (process,) = receiver_processes()
    process.suspend()  # it cannot do anything about the end of its only server, and is killed then
    leaving = asyncio.create_task(receiver.close())
    await asyncio.sleep(0.1)
    process.kill()
    await leaving
    assert [path.name for path in store_path(RUN, "node").parent.iterdir() if path.name.startswith("node")] == []


async def test_a_folder_that_another_user_may_have_made_is_not_used(board: Board) -> None:
    folder = store_path(RUN, "node").parent
    folder.mkdir()
    folder.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(folder / "node.sock"))
        impostor.listen()
        receiver = SharedWeightReceiver(board.publisher_address, store_path(RUN, "node"), CONFIG)
        with pytest.raises(ConfigError, match=f"{folder} has mode 777"):
            await receiver.wait_for_newer_version(None, 5)
        await receiver.close()


async def test_a_process_that_cannot_start_is_an_error(board: Board) -> None:
    taken = with_(relay_bind="tcp://203.0.113.1:0")  # an address that this machine does not have
    receiver = SharedWeightReceiver(board.publisher_address, store_path(RUN, "node"), taken)
    with pytest.raises(WeightsError, match="ended with code 1 before it was ready"):
        await receiver.wait_for_newer_version(None, 30)
    await receiver.close()


async def test_a_missing_secret_is_said_before_anything_is_started(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASYNC_GRPO_WEIGHTS_SECRET", raising=False)
    with pytest.raises(ConfigError, match=r"weights.encrypt is 'all', but ASYNC_GRPO_WEIGHTS_SECRET has 0 characters"):
        SharedWeightReceiver(board.publisher_address, store_path(RUN, "node"), with_(encrypt="all"))
    with pytest.raises(ConfigError, match="ASYNC_GRPO_WEIGHTS_SECRET"):
        ZmqWeightSender(LAYOUT, RUN, 0, with_(encrypt="control"))

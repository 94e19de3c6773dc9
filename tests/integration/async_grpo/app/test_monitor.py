"""The supervisor's monitor beside a real server: one that is away for a while, one that starts slowly, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from async_grpo.app.launch.monitor import LocalProgress, Monitor
from async_grpo.app.launch.role_process import RoleSpec, supervise_processes
from async_grpo.app.launch.state_plane import StatePlane
from async_grpo.app.report.live_state import LiveState, RoleState, warn_as_text
from async_grpo.config import RunConfig, validate
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import RoleFailed, ServerLost
from async_grpo.telemetry.jsonl import JsonLines
from async_grpo.wire.board import PublisherAddress, ReplayProgress, ServerBeat
from buffer import EmbeddedServer, connect_board, open_run
from buffer import server as server_module
from tests.support.redis_topologies import Server, running
from tests.support.small_disk import leave_free, small_disk

TIMEOUT_S = 1.0
MB = 1 << 20


def config_of(folder: Path, url: str | None, timeout_s: float = TIMEOUT_S) -> RunConfig:
    redis_config = {"url": url, "timeout_s": timeout_s}
    facts = {"name": "watched", "runs_dir": str(folder), "model": {"random": {}}, "redis": redis_config}
    return validate(facts, "test")


class Watched:
    """A monitor of a run without roles, what it showed and what it said."""

    def __init__(self, plane: StatePlane) -> None:
        self.shown: list[LiveState] = []
        self.said: list[str] = []
        report_progress, warn = self.said.append, warn_as_text(self.said.append)
        no_roles = supervise_processes("watched", [], restarts={}, warn=warn, stop_timeout_s=1.0)
        self.monitor = Monitor(
            plane,
            no_roles,
            LocalProgress(plane, report_progress),
            show=self.shown.append,
            report_progress=report_progress,
            warn=warn,
        )

    async def until(self, true: Callable[[], object], what: str) -> None:
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.02)
        assert true(), what


@asynccontextmanager
async def watching(config: RunConfig, server: EmbeddedServer | None = None) -> AsyncIterator[Watched]:
    buffer = await open_run(config)
    board = await connect_board(config.redis, config.name)
    try:
        yield Watched(StatePlane(config, buffer, board, server))
    finally:
        await asyncio.gather(buffer.aclose(), board.aclose())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 48) as folder:
        yield folder


def fill_up(url: str) -> None:
    """Write until the server is gone, or refuses."""
    client = redis.Redis.from_url(url, retry=None)
    with contextlib.suppress(redis.RedisError, OSError):
        while True:
            client.set(uuid.uuid4().hex, os.urandom(MB))


async def test_a_server_that_is_away_for_longer_than_a_call_waits_ends_no_run(tmp_path: Path) -> None:
    with running(server := Server(tmp_path / "server")):
        async with watching(config_of(tmp_path, server.url)) as watched:
            watch = asyncio.create_task(watched.monitor.watch())
            await watched.until(lambda: watched.shown, "the first look")
            server.pause()
            await watched.until(lambda: watched.said or watch.done(), "a look that failed")
            assert not watch.done()
            server.resume()
            seen = len(watched.shown)
            await watched.until(lambda: len(watched.shown) > seen or watch.done(), "a look after the outage")
            assert not watch.done()
            watch.cancel()
    assert len(watched.said) == 1
    assert f"waiting for the server: the server at 127.0.0.1:{server.port} has not answered" in watched.said[0]


async def test_a_server_that_cannot_be_ready_during_a_replay_has_its_time_again_whenever_that_advances(
    tmp_path: Path, redis_config: RedisConfig
) -> None:
    config = config_of(tmp_path, redis_config.url, timeout_s=30.0)
    launch = config.launch.model_copy(update={"ready_timeout_s": 0.4})
    config = config.model_copy(update={"name": uuid.uuid4().hex, "launch": launch})
    board = await connect_board(config.redis, config.name)
    async with watching(config) as watched:
        watched.monitor._supervisor.states["rollout-0"] = RoleState("rollout-0", "starting", 0)
        for version in range(4):
            await board.report_replay(ReplayProgress(epoch=2, version=version, target=9))
            await watched.monitor.poll()
            await asyncio.sleep(0.25)
        await asyncio.sleep(0.25)
        with pytest.raises(RoleFailed, match=r"rollout-0 .*0\.4 s"):
            await watched.monitor.poll()
    await board.aclose()


async def test_new_warnings_of_the_trainer_are_shown_once(tmp_path: Path) -> None:
    with running(server := Server(tmp_path / "server")):
        config = config_of(tmp_path, server.url, timeout_s=30.0)
        rows = JsonLines(config.run_dir / "metrics.jsonl")
        rows.write({"kind": "warning", "step": 0, "time_s": time.time() - 60, "message": "of an earlier invocation"})
        async with watching(config) as watched:
            rows.write({"kind": "warning", "step": 0, "time_s": time.time(), "message": "cannot listen"})
            await watched.monitor.poll()
            await watched.monitor.poll()
        rows.close()
    assert watched.said == ["trainer: cannot listen"]


async def test_a_server_that_is_not_ready_in_time_leaves_the_run_to_the_others(tmp_path: Path) -> None:
    limit_s, said = 2.0, list[str]()
    with running(server := Server(tmp_path / "server")):
        config = config_of(tmp_path, server.url, timeout_s=30.0)
        config = config.model_copy(update={"launch": config.launch.model_copy(update={"ready_timeout_s": limit_s})})
        sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
        specs = [RoleSpec(name, sleeps, tmp_path / f"{name}.log", 0) for name in ("trainer", "rollout-0", "rollout-1")]
        warn = warn_as_text(said.append)
        roles = supervise_processes("watched", specs, restarts={}, warn=warn, stop_timeout_s=5.0)
        keeping = asyncio.create_task(roles.watch())
        async with watching(config) as watched:
            board = await connect_board(config.redis, config.name)
            await board.set_publisher(PublisherAddress(epoch=1, announce="a", requests="b"))
            plane = StatePlane(config, await open_run(config), board, None)
            progress = LocalProgress(plane, said.append)
            monitor = Monitor(plane, roles, progress, show=watched.shown.append, report_progress=said.append, warn=warn)
            watch = asyncio.create_task(monitor.watch())
            try:
                async with asyncio.timeout(30):
                    while roles.states["rollout-1"].state != "failed" and not watch.done():
                        await board.announce_server(ServerBeat(name="rollout-0", pid=1, version=0), ttl_s=1.0)
                        await asyncio.sleep(0.1)
                    assert not watch.done(), watch.exception()
                    assert list(roles.given_up) == ["rollout-1"] and "rollout-1" in said[-1]
                    with pytest.raises(RoleFailed, match="rollout-0 was not ready within"):
                        await watch  # the last one
            finally:
                watch.cancel()
                await roles.stop()
                await asyncio.gather(keeping, board.aclose(), plane.buffer.aclose(), return_exceptions=True)


async def test_a_trainer_that_leaves_just_after_its_last_step_is_not_started_again(
    tmp_path: Path, redis_config: RedisConfig
) -> None:
    config = config_of(tmp_path, redis_config.url).model_copy(update={"name": uuid.uuid4().hex, "steps": 1})
    specs = [RoleSpec("trainer", [sys.executable, "-c", ""], tmp_path / "trainer.log", 1)]
    buffer, board = await open_run(config), await connect_board(config.redis, config.name)
    progress = LocalProgress(StatePlane(config, buffer, board, None), print)
    roles = supervise_processes(
        "watched", specs, restarts={}, warn=warn_as_text(print), stop_timeout_s=5.0, progress=progress
    )

    progress.stats = await buffer.stats()  # the monitor's last look
    await buffer.publish_version(epoch=(await buffer.rollback(0)).epoch, version=1)
    await roles.watch()
    assert roles.restarts == {"trainer": 0}
    await asyncio.gather(buffer.aclose(), board.aclose())


async def test_the_loop_goes_on_while_a_server_that_died_starts_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedServer(tmp_path / "server", RedisConfig(timeout_s=30.0))
    real = server_module.find_server()
    try:
        async with watching(config_of(tmp_path, server.start(), timeout_s=30.0), server) as watched:
            slow = tmp_path / "slow-server"
            slow.write_text(f'#!/bin/sh\nsleep 2\nexec {real} "$@"\n')
            slow.chmod(0o700)
            monkeypatch.setattr(server_module, "find_server", lambda: str(slow))
            assert server.pid is not None
            first = server.pid
            os.kill(first, signal.SIGKILL)
            keeping, longest_s, last_s = asyncio.create_task(watched.monitor.keep_server_alive()), 0.0, time.monotonic()
            while server.pid == first or not answers(server):
                await asyncio.sleep(0.01)
                longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
            keeping.cancel()
    finally:
        server.stop()
    assert longest_s < 1.5, "Ctrl-C would have waited"


async def test_a_full_disk_is_named_and_the_server_goes_on_when_there_is_space(disk: Path) -> None:
    server = EmbeddedServer(disk / "server", RedisConfig(timeout_s=30.0))
    try:
        async with watching(config_of(disk, server.start(), timeout_s=30.0), server) as watched:
            filler = leave_free(disk, 6)
            await asyncio.to_thread(fill_up, server.url)
            keeping = asyncio.create_task(watched.monitor.keep_server_alive())
            await watched.until(lambda: watched.said or keeping.done(), "what is wrong")
            assert f"disk full at {disk / 'server'}, " in watched.said[0]
            assert " MB free; the run waits 30 s for space" in watched.said[0]
            await asyncio.sleep(1.2)  # two more looks: it is not started without space, and not named again
            assert len(watched.said) == 1 and not server.alive()
            filler.unlink()
            await watched.until(server.alive, "the server is back")
            buffer = await open_run(config_of(disk, server.url, timeout_s=30.0))
            assert (await buffer.stats()).admitted == 0
            await buffer.aclose()
            assert not keeping.done()
            keeping.cancel()
    finally:
        server.stop()


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_a_disk_that_stays_full_ends_the_run_by_name(disk: Path, fsync: str) -> None:
    server = EmbeddedServer(disk / "server", RedisConfig(timeout_s=5.0, fsync=fsync))
    try:
        async with watching(config_of(disk, server.start()), server) as watched:
            leave_free(disk, 6)
            await asyncio.to_thread(fill_up, server.url)
            await watched.until(server.disk_full, "the server has logged it")
            assert fsync == "always" or server.alive()
            with pytest.raises(ServerLost, match=rf"disk full at {disk}/server, \d\.\d MB free, for 1 s.* resumes"):
                async with asyncio.timeout(60):
                    await watched.monitor.keep_server_alive()
    finally:
        server.stop()


async def test_a_server_that_cannot_begin_on_a_full_disk_says_so(disk: Path) -> None:
    leave_free(disk, 0)
    with pytest.raises(ServerLost, match=rf"exit code 1: disk full at {disk}/server, 0\.0 MB free"):
        EmbeddedServer(disk / "server", RedisConfig()).start()


def answers(server: EmbeddedServer) -> bool:
    with contextlib.suppress(redis.RedisError, OSError):
        return bool(redis.Redis.from_url(server.url, retry=None).ping())
    return False

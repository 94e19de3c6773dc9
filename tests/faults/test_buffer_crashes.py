"""kill -9 of any process, at any moment: no finished group is lost, none is trained twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import Fenced
from buffer import EmbeddedServer, connect
from tests.support.buffer_cases import admit, finish, policy, take, tasks, train
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
NOTHING = {"lost": 0, "duplicated": 0, "unbalanced": 0, "inconsistent": 0}

Crash = Callable[..., dict[str, Any]]


@pytest.fixture
def crash(tmp_path: Path) -> Crash:
    """Runs `python -m tests.support.buffer_crashes`, shows what it prints, and returns its figures."""

    def run(*options: str, timeout_s: float) -> dict[str, Any]:
        figures = tmp_path / "figures.json"
        command = [sys.executable, "-m", "tests.support.buffer_crashes", *options, "--json", str(figures)]
        subprocess.run(command, cwd=ROOT, timeout=timeout_s, check=False)
        assert figures.exists(), "the crash run itself has failed; its error stands above"
        found: dict[str, Any] = json.loads(figures.read_text())
        return found

    return run


def faults(figures: dict[str, Any]) -> dict[str, int]:
    """How many, by kind."""
    return {kind: figures[kind] for kind in NOTHING}


def test_a_dozen_kills_and_two_of_the_server_lose_and_duplicate_nothing(crash: Crash) -> None:
    figures = crash("--kills", "12", "--server-kills", "2", "--pause-s", "0.3", timeout_s=120)
    assert faults(figures) == NOTHING, figures["faults"]
    assert (figures["killed"], figures["server_killed"]) == (12, 2)
    assert figures["acknowledged"] > 100
    assert figures["looks"] > 0


@pytest.mark.faults
def test_two_hundred_kills_and_ten_of_the_server_lose_and_duplicate_nothing(crash: Crash) -> None:
    figures = crash("--kills", "200", "--server-kills", "10", timeout_s=540)
    assert faults(figures) == NOTHING, figures["faults"]
    assert (figures["killed"], figures["server_killed"]) == (200, 10)
    assert figures["killed_in_a_call"] > 50
    assert min(figures["again"], figures["replayed"], figures["took_over"], figures["fenced"]) > 0


@pytest.mark.faults
@pytest.mark.parametrize("options", [["--policy", "freshest"], ["--policy", "uniform"], ["--retune"]], ids=str)
def test_every_policy_keeps_what_is_finished(crash: Crash, options: list[str]) -> None:
    figures = crash("--kills", "40", "--server-kills", "4", "--pause-s", "0.4", *options, timeout_s=240)
    assert faults(figures) == NOTHING, figures["faults"]


@pytest.mark.faults
def test_with_everysec_only_the_last_seconds_before_the_servers_own_death_are_at_risk(crash: Crash) -> None:
    figures = crash("--kills", "60", "--server-kills", "10", "--fsync", "everysec", timeout_s=300)
    assert faults(figures) == NOTHING or figures["explained"], figures["faults"]


@pytest.mark.faults
def test_a_file_that_lost_its_end_is_noticed_and_costs_no_more_than_that_end(crash: Crash) -> None:
    """As after a loss of power with everysec; and it shows that these tests can fail."""
    cut = ("--fsync", "everysec", "--cut-bytes", "100000")
    figures = crash("--kills", "8", "--server-kills", "3", "--pause-s", "0.4", *cut, timeout_s=120)
    assert figures["lost"] > 0
    assert figures["inconsistent"] == 0
    assert figures["explained"]


async def test_a_trainer_that_is_overtaken_between_a_take_and_its_payloads_is_fenced(
    redis_config: RedisConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path.name
    slow, fast = [await connect(redis_config, run, policy=policy(), lease_s=30.0, max_attempts=3) for _ in range(2)]
    await slow.put_tasks(tasks(0, 10))
    await slow.rollback(0)
    await finish(slow, *await admit(slow, 2))
    fetch = slow._link.fetch_values

    async def fetch_late(keys: list[str]) -> list[bytes | None]:
        monkeypatch.undo()
        await fast.rollback(0)
        await train(fast, 0, epoch=2)
        await fast.commit_checkpoint(epoch=2, version=1)
        return await fetch(keys)

    monkeypatch.setattr(slow._link, "fetch_values", fetch_late)
    with pytest.raises(Fenced):
        await take(slow, 0)
    for buffer in (slow, fast):
        await buffer.aclose()


def test_what_a_rewrite_left_behind_is_gone_when_the_server_starts_again(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server", RedisConfig())
    client = redis.Redis.from_url(server.start())
    try:
        client.mset({f"key {number}": b"value" for number in range(100)})
        client.config_set("rdb-key-save-delay", 100_000)  # us a key: it is killed in the middle
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "no rewrite is under way")
        client.bgrewriteaof()
        wait_until(lambda: list((tmp_path / "server").glob("temp-*.aof")), "a rewrite is under way")
        assert server.pid is not None
        [writer] = psutil.Process(server.pid).children()
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.alive(), "the server is dead")
        writer.kill()
        server.start()
        assert not list((tmp_path / "server").glob("temp-*.aof"))
        assert client.dbsize() == 100
    finally:
        server.stop()

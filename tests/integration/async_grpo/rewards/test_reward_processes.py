"""The processes of the reward pool: how many, what they see, and that nothing of them is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from async_grpo.errors import ConfigError
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.pool import RewardPool
from async_grpo.utils import process_tree
from async_grpo.utils.landlock import can_hide_folders
from tests.support.reward_pools import hanging_item, pool_of
from tests.support.waiting import until

TRICKY = "tricky_rewards:tricky"
PATIENCE_S = 30.0

pytestmark = pytest.mark.usefixtures("verifiers_can_be_imported")

DOOMED_SERVER = f"""
import asyncio
from pathlib import Path
from async_grpo.config.rewards import RewardConfig, RewardsConfig
from async_grpo.utils import process_tree
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.pool import RewardPool

async def main():
    folder = Path({{folder!r}})
    async with RewardPool(RewardsConfig(functions=[RewardConfig(name={TRICKY!r})], workers=3)) as pool:
        for deed in ("fork", "daemon"):
            await pool.judge([RewardInput(deed, "a", "", {{{{"file": str(folder / deed)}}}})])
        files = [folder / "first", folder / "second"]
        hangs = [RewardInput("announce and hang", "a", "", {{{{"file": str(file)}}}}) for file in files]
        hanging = asyncio.create_task(pool.judge(hangs))
        while not all(file.exists() for file in files):
            await asyncio.sleep(0.01)
        family = process_tree.descendants(pool.supervisor.pid, process_tree.parents())
        (folder / "family.part").write_text(" ".join(map(str, [pool.supervisor.pid, *family])))
        (folder / "family.part").rename(folder / "family")
        await hanging

asyncio.run(main())
"""


def family_of(pool: RewardPool) -> list[int]:
    """Workers, and whatever lives below them."""
    return process_tree.descendants(pool.supervisor.pid, process_tree.parents())


async def gone(pids: Iterable[int]) -> None:
    """Wait until none of them lives (a zombie lives no more)."""
    async with asyncio.timeout(PATIENCE_S):
        while any(_lives(pid) for pid in pids):
            await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


async def test_children_of_a_verifier_are_killed_with_its_worker(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with pool_of(TRICKY, items_per_worker=2) as pool:
        await pool.judge([RewardInput("fork", "a", "", {"file": str(file)})])  # the trial was the first item
        await pool.judge([RewardInput("a", "a")])  # the second worker starts once nothing of the first is left
        assert not _lives(int(file.read_text()))


async def test_a_daemon_of_a_verifier_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with pool_of(TRICKY) as pool:
        (verdict,) = await pool.judge([RewardInput("daemon", "a", "", {"file": str(file)})])
        assert verdict.reward == 0.0
        await gone([int(file.read_text())])
        assert len([pid for pid in family_of(pool) if _lives(pid)]) == 1


async def test_a_forked_verifier_sends_only_one_reply() -> None:
    async with pool_of(TRICKY) as pool:
        verdicts = await pool.judge([RewardInput(deed, "a") for deed in ("fork and come back", "a", "b", "a")])
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.0, 1.0]


async def test_the_memory_limit_includes_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    item = RewardInput("family that eats memory", "a", "", {"file": str(file)})
    async with pool_of(TRICKY, memory_bytes=128 << 20) as pool:
        (verdict,) = await pool.judge([item])
        assert verdict.failure == "memory"
        assert not _lives(int(file.read_text()))


async def test_a_worker_that_dies_while_idle_loses_no_item() -> None:
    async with pool_of(TRICKY) as pool:
        (worker,) = family_of(pool)
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while family_of(pool):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # the supervisor has reaped it and reported it
        (verdict,) = await pool.judge([RewardInput("a", "a")])
    assert (verdict.reward, pool.failures) == (1.0, {})


async def test_a_worker_is_replaced_after_items_per_worker() -> None:
    async with pool_of("tricky_rewards:counting", items_per_worker=3) as pool:
        counts = [verdict.reward for verdict in await pool.judge([RewardInput("", "")] * 8)]
    assert counts == [2, 3, 1, 2, 3, 1, 2, 3]  # the trial at the start was the first


async def test_there_are_never_more_workers_than_slots() -> None:
    deeds = ["crash", "hang", "a", "raise", "segfault", "thread"] * 3
    async with pool_of(TRICKY, workers=2, deadline_s=1.5, items_per_worker=3) as pool:
        judging, most = asyncio.create_task(pool.judge([RewardInput(deed, "a") for deed in deeds])), 0
        while not judging.done():
            most = max(most, len(family_of(pool)))
            await asyncio.sleep(0.003)
        kinds = ["crashed", "timeout", "", "raised", "crashed", ""]
        assert [verdict.failure for verdict in judging.result()] == kinds * 3
    assert most == 2


async def test_closing_the_pool_ends_all_processes_without_zombies(tmp_path: Path) -> None:
    before = {pid for pid, parent in process_tree.parents().items() if parent == os.getpid()}
    async with pool_of(TRICKY, workers=2) as pool:
        await pool.judge([RewardInput("fork", "a", "", {"file": str(tmp_path / "pid")}), RewardInput("thread", "a")])
        hanging = asyncio.create_task(pool.judge([hanging_item(tmp_path / "hangs")]))
        await until((tmp_path / "hangs").exists)
        hanging.cancel()
        family = [pool.supervisor.pid or 0, *family_of(pool)]
    assert not [pid for pid in family if _lives(pid)]
    assert {pid for pid, parent in process_tree.parents().items() if parent == os.getpid()} <= before


async def test_killing_the_server_ends_all_processes(tmp_path: Path) -> None:
    program = DOOMED_SERVER.format(folder=str(tmp_path))
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    async with asyncio.timeout(PATIENCE_S):
        while not (tmp_path / "family").exists() and server.returncode is None:
            await asyncio.sleep(0.02)
    family = [int(pid) for pid in (tmp_path / "family").read_text().split()]
    assert len(family) >= 4 and all(map(_lives, family[:4]))
    server.kill()
    await server.wait()
    await gone(family)


async def test_a_killed_supervisor_loses_items_in_flight_and_is_replaced(tmp_path: Path) -> None:
    async with pool_of(TRICKY) as pool:
        first = pool.supervisor.pid or 0
        family = family_of(pool)
        judging = asyncio.create_task(pool.judge([hanging_item(tmp_path / "hangs")]))
        await until((tmp_path / "hangs").exists)
        os.kill(first, signal.SIGKILL)
        (lost,) = await judging
        assert (lost.failure, lost.reason) == ("crashed", f"{TRICKY}: its process ended with its supervisor")
        await gone(family)
        (verdict,) = await pool.judge([RewardInput("a", "a")])
        assert verdict.reward == 1.0
        assert pool.supervisor.pid != first


async def test_a_verifier_gets_only_basic_and_named_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THE_TOKEN", "secret")
    items = [RewardInput(name, "") for name in ("THE_TOKEN", "PATH", "HOME", "PYTHONPATH", "PYTEST_CURRENT_TEST")]
    async with pool_of("tricky_rewards:sees") as pool:
        assert [verdict.reward for verdict in await pool.judge(items)] == [0, 1, 1, 1, 0]
    async with pool_of("tricky_rewards:sees", environment=["THE_TOKEN"]) as pool:
        assert [verdict.reward for verdict in await pool.judge(items)] == [1, 1, 1, 1, 0]


@pytest.mark.skipif(not can_hide_folders(), reason="the kernel has no Landlock")
async def test_a_verifier_reads_no_secret_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret, data = tmp_path / "secrets" / "ASYNC_GRPO_HTTP_KEY", tmp_path / "data"
    secret.parent.mkdir()
    secret.write_text("secret")
    data.write_text("data")
    monkeypatch.setattr("async_grpo.rewards.workers.client.SECRETS", secret.parent)
    items = [RewardInput(str(path), "") for path in (secret, data)]
    async with pool_of("tricky_rewards:reads") as pool:
        assert [verdict.reward for verdict in await pool.judge(items)] == [0, 1]


def test_a_named_variable_that_is_not_set_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.environment.*NO_SUCH_VARIABLE"):
        pool_of("answer_tag", environment=["NO_SUCH_VARIABLE"])

"""What the supervisor does about the groups of a rollout server that has died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from async_grpo.app.launch.role_process import RoleSpec, supervise_processes
from async_grpo.app.launch.supervisor import RunProgress
from async_grpo.app.report.live_state import warn_as_text
from async_grpo.config.buffer import RedisConfig
from buffer import RedisBuffer, connect
from tests.support.buffer_cases import policy, tasks

HOLDER = """
import asyncio, time
from async_grpo.config.buffer import RedisConfig
from buffer.connect import attach
from buffer.holders import holder_name

async def hold() -> None:
    life = round(1000 * time.time())
    buffer = attach(RedisConfig(url={url!r}), {run!r})
    tickets = await buffer.admit_groups(2, holder=holder_name("rollout-0", life), timeout_s=60)
    print([ticket.attempt for ticket in tickets], flush=True)
    await asyncio.sleep(3600)

asyncio.run(hold())
"""


async def test_a_killed_server_is_restarted_and_its_groups_are_free_at_once(
    redis_config: RedisConfig, tmp_path: Path
) -> None:
    run = uuid.uuid4().hex
    buffer = await connect(redis_config, run, policy=policy(S=0, P=2), lease_s=3600.0, max_attempts=3)
    await buffer.put_tasks(tasks(0, 10))
    log = tmp_path / "rollout-0.log"
    program = HOLDER.format(url=redis_config.url, run=run)
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
    specs = [
        RoleSpec("trainer", sleeper, tmp_path / "trainer.log", max_restarts=0),
        RoleSpec("rollout-0", [sys.executable, "-c", program], log, max_restarts=1),
    ]
    keeper = supervise_processes(
        run, specs, restarts={}, warn=warn_as_text(print), stop_timeout_s=5.0, progress=ExpiringProgress(buffer)
    )
    watching = asyncio.create_task(keeper.watch())
    await printed(log, 1)
    pid = keeper.pid("rollout-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await printed(log, 2) == ["[1, 1]", "[2, 2]"]
    await keeper.stop()
    await watching
    await buffer.aclose()


class ExpiringProgress(RunProgress):
    def __init__(self, buffer: RedisBuffer) -> None:
        self._buffer = buffer

    async def expire_leases(self, server: str) -> None:
        await self._buffer.expire_leases(server, life=round(1000 * time.time()))


async def printed(log: Path, lines: int) -> list[str]:
    """The lines of the log, once there are so many."""
    async with asyncio.timeout(60):
        while not log.exists() or len(log.read_text().splitlines()) < lines:
            await asyncio.sleep(0.05)
    return log.read_text().splitlines()

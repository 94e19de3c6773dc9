"""Trainer and engines of a machine take turns on its devices, and nobody waits for a process that has died."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from async_grpo.errors import WaitTimeout
from async_grpo.utils.files import DeviceTurn

TRAINER = """
import sys, time
from pathlib import Path
from async_grpo.utils.files import DeviceTurn
DeviceTurn(Path(sys.argv[1])).begin_step(5.0)
print("training", flush=True)
time.sleep(60)
"""


def beginning(folder: Path, timeout_s: float = 5.0) -> tuple[DeviceTurn, asyncio.Task[None]]:
    """A trainer that has asked for a step."""
    trainer = DeviceTurn(folder)
    return trainer, asyncio.create_task(asyncio.to_thread(trainer.begin_step, timeout_s))


async def test_a_step_begins_when_every_engine_sleeps_and_they_wake_when_it_ends(tmp_path: Path) -> None:
    servers = [DeviceTurn(tmp_path), DeviceTurn(tmp_path)]
    for server in servers:
        await server.use()
    trainer, step = beginning(tmp_path)
    for server in servers:
        await asyncio.wait_for(server.wanted(), 1.0)
        assert not step.done()
        server.yield_to_step()
    await asyncio.wait_for(step, 1.0)
    waking = [asyncio.create_task(server.use()) for server in servers]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waking)
    trainer.end_step()
    await asyncio.wait_for(asyncio.gather(*waking), 1.0)


async def test_an_engine_that_starts_in_a_step_waits_for_its_end_and_keeps_no_step_waiting(tmp_path: Path) -> None:
    trainer, late = DeviceTurn(tmp_path), DeviceTurn(tmp_path)
    trainer.begin_step(1.0)
    starting = asyncio.create_task(late.use())
    await asyncio.sleep(0.05)
    assert not starting.done()
    trainer.end_step()
    await asyncio.wait_for(starting, 1.0)
    late.close()
    trainer.begin_step(1.0)


async def test_an_engine_that_does_not_sleep_is_named_and_the_trainer_asks_no_longer(tmp_path: Path) -> None:
    server = DeviceTurn(tmp_path)
    await server.use()
    _, step = beginning(tmp_path, timeout_s=0.05)
    with pytest.raises(WaitTimeout, match=r"0\.05 s .*engines.* sleep"):
        await step
    await asyncio.wait_for(server.use(), 1.0)


async def test_engines_wake_when_the_trainer_is_killed_in_a_step(tmp_path: Path) -> None:
    words = (sys.executable, "-c", TRAINER, str(tmp_path))
    trainer = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert trainer.stdout is not None and await trainer.stdout.readline() == b"training\n"
        waking = asyncio.create_task(DeviceTurn(tmp_path).use())
        await asyncio.sleep(0.05)
        assert not waking.done()
    finally:
        trainer.kill()
    await asyncio.wait_for(waking, 2.0)
    await trainer.wait()

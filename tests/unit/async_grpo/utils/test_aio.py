"""Races, tasks that are ended, and signals."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from async_grpo.utils.aio import Overtaken, cancel_and_wait, race, stop_signals


async def value(after_s: float, result: int = 1) -> int:
    await asyncio.sleep(after_s)
    return result


async def failure() -> None:
    raise OSError("the rival failed")


async def test_the_result_of_the_work_if_it_is_first() -> None:
    assert await race(value(0), asyncio.Event().wait()) == 1
    assert await race(value(0), value(0)) == 1


async def test_work_that_is_overtaken_has_ended() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    with pytest.raises(Overtaken):
        await race(work(), value(0))
    assert ended.is_set()


async def test_what_the_rival_raises_is_raised() -> None:
    with pytest.raises(OSError, match="the rival failed"):
        await race(value(60), failure())


async def test_tasks_of_the_caller_go_on() -> None:
    work, rival = asyncio.create_task(value(0.05)), asyncio.create_task(value(0, 2))
    with pytest.raises(Overtaken):
        await race(work, rival)
    assert (await work, await rival) == (1, 2)


async def test_a_cancelled_race_leaves_nothing_behind() -> None:
    racing = asyncio.create_task(race(value(60), value(60)))
    await asyncio.sleep(0)
    await cancel_and_wait(racing)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_signals_call_stop_every_time() -> None:
    stops: list[int] = []
    with stop_signals(lambda: stops.append(1)):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
    assert len(stops) == 2

"""A server that starts while the others finish the run does not wait for weights that nobody will publish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from async_grpo.errors import WaitTimeout
from rollout_server import assembly
from rollout_server.assembly import came_before_the_end


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(assembly, "LOOK_EVERY_S", 0.01)
    yield


async def not_over() -> bool:
    return False


async def test_weights_that_come_are_waited_for() -> None:
    assert await came_before_the_end(asyncio.sleep(0.05), not_over)


async def test_a_run_that_is_over_meanwhile_ends_the_wait() -> None:
    looks = iter([False, False, True])
    cancelled = asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def is_over() -> bool:
        return next(looks)

    assert not await came_before_the_end(never(), is_over)
    assert cancelled.is_set()


async def test_weights_that_do_not_come_in_time_are_named() -> None:
    async def late() -> None:
        raise WaitTimeout("the trainer's first publication of weights", 1.0)

    with pytest.raises(WaitTimeout, match="first publication"):
        await came_before_the_end(late(), not_over)

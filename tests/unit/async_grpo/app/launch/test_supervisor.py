"""The supervisor over runners without processes: roles that move, have no room, or are of another command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from async_grpo.app.launch.supervisor import TRAINER, RoleEnd, Supervisor
from async_grpo.app.report.live_state import warn_as_text
from async_grpo.errors import EXIT_CONFIG, WaitTimeout

OK, FAULT, LOST = RoleEnd(0, "left"), RoleEnd(EXIT_CONFIG, "refused"), RoleEnd(1, "was lost")
MOVED = RoleEnd(0, "its node is drained", is_moved=True)


class ScriptedRunner:
    """A `RoleRunner` whose starts end as `ends` lists; after the last of them it runs until it is stopped."""

    def __init__(self, name: str, *ends: RoleEnd, restarts: int = 0) -> None:
        self.name, self.max_restarts = name, restarts
        self.waits_for_room, self.pid = False, None
        self.starts = 0
        self.stopped = asyncio.Event()
        self._ends = list(ends)

    async def start(self) -> None:
        self.starts += 1

    async def wait(self) -> RoleEnd:
        await asyncio.sleep(0.01)
        if self._ends:
            return self._ends.pop(0)
        await self.stopped.wait()
        return OK

    def stop(self) -> None:
        self.stopped.set()

    def kill(self) -> None:
        self.stopped.set()

    def stage(self) -> str:
        return ""


class WithoutRoom(ScriptedRunner):
    """A role that a cluster has no room for; `wait_s` is how long it waits."""

    def __init__(self, name: str, wait_s: float) -> None:
        super().__init__(name)
        self._wait_s = wait_s

    async def start(self) -> None:
        self.waits_for_room = True
        try:
            await asyncio.wait_for(self.stopped.wait(), self._wait_s)
        except TimeoutError:
            raise WaitTimeout(f"room for {self.name}", self._wait_s, "Add nodes") from None
        finally:
            self.waits_for_room = False


def supervisor(runners: Sequence[ScriptedRunner], said: list[str]) -> Supervisor:
    return Supervisor(runners, restarts={}, warn=warn_as_text(said.append), stop_timeout_s=5.0, sees_whole_run=False)


async def test_a_role_that_moves_is_started_elsewhere_and_costs_no_restart() -> None:
    said: list[str] = []
    trainer = ScriptedRunner(TRAINER, MOVED, LOST, MOVED, OK, restarts=1)
    keeper = supervisor([trainer], said)
    await asyncio.wait_for(keeper.watch(), 5)
    assert trainer.starts == 4
    assert keeper.restarts == {TRAINER: 1}
    assert [line.partition(";")[2].strip() for line in said] == [
        "it is started elsewhere",
        "restart 1 of 1",
        "it is started elsewhere",
    ]


async def test_a_role_that_moves_while_all_are_stopped_is_not_started_again() -> None:
    class Moves(ScriptedRunner):
        async def wait(self) -> RoleEnd:
            await self.stopped.wait()
            return MOVED

    trainer = Moves(TRAINER)
    keeper = supervisor([trainer], [])
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(5):
        while not trainer.starts:
            await asyncio.sleep(0)
    await asyncio.wait_for(keeper.stop(), 5)
    await asyncio.wait_for(watching, 5)
    assert trainer.starts == 1


async def test_a_server_without_room_is_given_up_and_the_run_continues() -> None:
    server = ScriptedRunner("rollout-0")
    keeper = supervisor([ScriptedRunner(TRAINER), server, WithoutRoom("rollout-1", 0.02)], [])
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(5):
        while not keeper.given_up:
            await asyncio.sleep(0.01)
    assert list(keeper.given_up) == ["rollout-1"] and not watching.done()
    await keeper.stop()
    await asyncio.wait_for(watching, 5)


async def test_a_trainer_without_room_ends_the_run_with_its_own_error() -> None:
    keeper = supervisor([WithoutRoom(TRAINER, 0.02), ScriptedRunner("rollout-0")], [])
    with pytest.raises(WaitTimeout, match="room for trainer"):
        await asyncio.wait_for(keeper.watch(), 5)
    await asyncio.wait_for(keeper.stop(), 5)


async def test_servers_that_wait_for_room_end_when_the_trainer_is_done() -> None:
    waiting = WithoutRoom("rollout-0", 60)
    keeper = supervisor([ScriptedRunner(TRAINER, OK), waiting], [])
    await asyncio.wait_for(keeper.watch(), 5)
    assert {state.state for state in keeper.states.values()} == {"finished"}


async def test_the_last_server_of_a_command_may_leave_because_others_have_more() -> None:
    server = ScriptedRunner("rollout-0", OK, restarts=3)
    trainer = ScriptedRunner(TRAINER)
    keeper = supervisor([trainer, server], [])
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(5):
        while keeper.is_active("rollout-0"):
            await asyncio.sleep(0.01)
    assert server.starts == 1 and not watching.done()
    trainer.stop()
    await asyncio.wait_for(watching, 5)


async def test_a_faulty_configuration_of_one_server_leaves_the_others_that_nobody_has_marked_ready() -> None:
    trainer = ScriptedRunner(TRAINER)
    keeper = supervisor([trainer, ScriptedRunner("rollout-0", FAULT, restarts=3), ScriptedRunner("rollout-1")], [])
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(5):
        while not keeper.given_up:
            await asyncio.sleep(0.01)
    assert list(keeper.given_up) == ["rollout-0"] and not watching.done()
    await keeper.stop()
    await asyncio.wait_for(watching, 5)

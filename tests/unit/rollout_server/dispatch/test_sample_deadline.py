"""A workflow that does not return costs its group, not the run, and the log says which and where."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from async_grpo.errors import RoleFailed, WaitTimeout
from async_grpo.utils import aio
from async_grpo.utils.aio import root_cause, watched_loop
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire import Sample, Task
from rollout_server.evaluation.milestones import MilestoneEvaluator, longest_completion_s
from rollout_server.workflows import SingleTurn
from rollout_server.workflows.sample_rollout import SampleDeadline, SampleMaker
from rollout_server.workflows.session import SampleSession
from tests.support.rollout_fakes import (
    FakeEngine,
    FakeReceiver,
    buffer_of,
    config_of,
    context_of,
    dispatching,
    until_buffer,
    watcher_of,
)
from tests.support.tokenizers import Bytes
from tests.support.waiting import until

NAMED = {"max_concurrency": 8, "workflow": "my:Workflow"}


class Hangs(SingleTurn):
    """Waits for an answer that never comes, in the tasks that it is told; `stubborn`: also when it is cancelled."""

    def __init__(self, tasks: set[int] | None = None, *, stubborn: bool = False) -> None:
        super().__init__(Bytes())
        self.tasks = tasks
        self.stubborn = stubborn
        self.freed = asyncio.Event()

    async def run(self, task: Task, session: SampleSession) -> Sample:
        if self.tasks is None or task.index in self.tasks:
            await self.ask_the_environment()
        return await super().run(task, session)

    async def ask_the_environment(self) -> None:
        try:
            await self.freed.wait()
        except asyncio.CancelledError:
            if not self.stubborn:
                raise
            await self.freed.wait()


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_workflow_that_never_returns_fails_its_group_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.setattr("rollout_server.workflows.sample_rollout.END_S", 0.01)
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.2, "lease_s": 0.3}, redis={"timeout_s": 0.3})
    buffer, workflow = buffer_of(config), Hangs({1}, stubborn=stubborn)
    context = replace(context_of(tmp_path, config, FakeEngine(), buffer), workflow=workflow)

    with structlog.testing.capture_logs() as logs:
        async with dispatching(context) as (dispatcher, _):
            await until_buffer(buffer, lambda stats: stats.released["failed"] == 1 and stats.ready >= 3)
            held = [group.ticket.seq for group in dispatcher.groups]
        workflow.freed.set()
    (entry,) = [entry for entry in logs if entry["event"] == "group discarded"]
    assert (entry["seq"], entry["reason"], 1 in held) == (1, "failed", False)
    assert "waited 0.2 s for sample 0 of task 1, workflow my:Workflow" in entry["why"]
    assert "in Hangs.ask_the_environment < " in entry["why"]
    left_behind = [entry for entry in logs if "left behind" in entry["event"]]
    assert bool(left_behind) == stubborn


class AsksForEver(SingleTurn):
    """Does not look whether the completion is full."""

    async def run(self, task: Task, session: SampleSession) -> Sample:
        while True:
            await session.turn()


async def test_a_workflow_that_asks_for_ever_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.1})
    buffer = buffer_of(config)
    context = replace(context_of(tmp_path, config, FakeEngine(), buffer), workflow=AsksForEver(Bytes()))

    async with dispatching(context):
        await until_buffer(buffer, lambda stats: stats.released["failed"] > 0)


async def test_when_every_sample_hangs_the_server_gives_up_before_the_trainer_does(tmp_path: Path) -> None:
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.05})
    context = replace(context_of(tmp_path, config, FakeEngine()), workflow=Hangs())
    async with dispatching(context) as (_, running), asyncio.timeout(5):
        (raised,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(raised, ExceptionGroup)
    cause = root_cause(raised)
    assert isinstance(cause, RoleFailed)
    assert re.search("4 groups .*failed", str(cause))
    assert "workflow my:Workflow" in str(cause)


async def test_a_workflow_that_hangs_in_an_evaluation_is_named_and_the_rest_is_graded(tmp_path: Path) -> None:
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.1}, eval={"prompts": 4, "samples": 2})
    context = replace(context_of(tmp_path, config, FakeEngine()), workflow=Hangs({2}))
    watcher = watcher_of(context, FakeReceiver(WeightVersion(1, 0)))
    await watcher.first(1.0)
    with structlog.testing.capture_logs() as logs:
        await MilestoneEvaluator(context, watcher).first()
    (found,) = await context.board.evaluations()
    assert (found.figures.completions, found.figures.failed) == (3 * 2, 3)
    failed = [entry for entry in logs if entry["event"] == "a held-out completion failed"]
    assert {entry["task"] for entry in failed} == {2}
    assert all("in Hangs.ask_the_environment < " in entry["why"] for entry in failed)
    assert longest_completion_s(config_of(eval={"timeout_s": 100})) == 90  # so that the rest can still be graded


async def test_time_in_which_the_engine_sleeps_does_not_count() -> None:
    clock_s = [0.0]
    task, session = cast(Any, SimpleNamespace(index=3)), cast(Any, SimpleNamespace(index=0, is_cut_short=False))
    maker = SampleMaker(Hangs(), "my:Workflow", SampleDeadline(0.01), clock_s=lambda: clock_s[0])
    making = asyncio.create_task(maker.make(task, session))
    await asyncio.wait([making], timeout=0.12)
    assert not making.done()
    clock_s[0] = 1.0
    with pytest.raises(WaitTimeout, match="sample 0 of task 3"):
        await making


def test_the_deadline_follows_from_lengths_and_speed_unless_it_is_given() -> None:
    config = config_of(sampling={"max_tokens": 200}, rollout={"vllm": {"max_model_len": 256}})
    deadline = SampleDeadline.for_training(config)
    assert deadline.deadline_s == config.trainer.take_timeout_s / 2
    deadline.record(10.0, 1000)
    assert deadline.deadline_s == 120
    deadline.record(90.0, 1000)  # 0.05 s a token, 200 tokens, ten times
    assert deadline.deadline_s == pytest.approx(120)
    deadline.record(100.0, 0)  # 0.1 s a token
    assert deadline.deadline_s == pytest.approx(200)
    deadline.record(1000.0, 0)
    assert deadline.deadline_s == config.trainer.take_timeout_s / 2
    assert SampleDeadline.for_training(config_of(rollout={"sample_deadline_s": 7})).deadline_s == 7


async def test_a_workflow_that_blocks_the_event_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "LOOK_EVERY_S", 0.02)

    async def waits_for_a_page_without_await() -> None:
        time.sleep(0.5)  # noqa: ASYNC251  (which is the mistake that is to be seen)

    given_up: list[str] = []
    with (
        structlog.testing.capture_logs() as logs,
        watched_loop(limit_s=0.2, on_limit=given_up.append, warn_s=0.1),
    ):
        await asyncio.create_task(waits_for_a_page_without_await(), name="sample 3 of task 7, workflow my:Workflow")
        await until(lambda: len(given_up) == 1)
    for said in (logs[0]["by"], given_up[0]):
        assert said.startswith("sample 3 of task 7, workflow my:Workflow: ")
        assert "waits_for_a_page_without_await" in said
    assert logs[0]["event"] == "the event loop is blocked"
    assert len(logs) == 1

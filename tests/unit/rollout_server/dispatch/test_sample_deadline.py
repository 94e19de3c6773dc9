"""A workflow that does not return fails its group only, and the log names it and the place where it waits."""

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
from rollout_server.evaluation.milestones import MilestoneEvaluator, completion_timeout_s
from rollout_server.workflows import SingleTurn
from rollout_server.workflows.sample_rollout import SampleDeadline, WorkflowRunner
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
    """Hangs in the given tasks (None: all); with `stubborn` it ignores cancellation."""

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
async def test_a_hanging_workflow_fails_its_group_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.setattr("rollout_server.workflows.sample_rollout.CANCEL_TIMEOUT_S", 0.01)
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.2, "lease_s": 0.3}, redis={"timeout_s": 0.3})
    buffer, workflow = buffer_of(config), Hangs({1}, stubborn=stubborn)
    context = replace(context_of(tmp_path, config, FakeEngine(), buffer), workflow=workflow)

    with structlog.testing.capture_logs() as logs:
        async with dispatching(context) as (dispatcher, _):
            await until_buffer(buffer, lambda stats: stats.released["failed"] == 1 and stats.ready >= 3)
            in_progress = [group.ticket.seq for group in dispatcher.groups]
        workflow.freed.set()
    (entry,) = [entry for entry in logs if entry["event"] == "group discarded"]
    assert (entry["seq"], entry["reason"], 1 in in_progress) == (1, "failed", False)
    assert "waited 0.2 s for sample 0 of task 1, workflow my:Workflow" in entry["why"]
    assert "in Hangs.ask_the_environment < " in entry["why"]
    abandoned = [entry for entry in logs if "abandoned" in entry["event"]]
    assert bool(abandoned) == stubborn


class RequestsTurnsForever(SingleTurn):
    """Ignores that the completion is full."""

    async def run(self, task: Task, session: SampleSession) -> Sample:
        while True:
            await session.turn()


async def test_endless_turn_requests_do_not_block_the_event_loop(tmp_path: Path) -> None:
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.1})
    buffer = buffer_of(config)
    context = replace(context_of(tmp_path, config, FakeEngine(), buffer), workflow=RequestsTurnsForever(Bytes()))

    async with dispatching(context):
        await until_buffer(buffer, lambda stats: stats.released["failed"] > 0)


async def test_a_server_whose_samples_all_hang_gives_up_before_the_trainer(tmp_path: Path) -> None:
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.05})
    context = replace(context_of(tmp_path, config, FakeEngine()), workflow=Hangs())
    async with dispatching(context) as (_, running), asyncio.timeout(5):
        (raised,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(raised, ExceptionGroup)
    cause = root_cause(raised)
    assert isinstance(cause, RoleFailed)
    assert re.search("16 samples in a row.*deadline", str(cause))
    assert "workflow my:Workflow" in str(cause)


async def test_a_hanging_workflow_in_an_evaluation_is_named_and_the_rest_is_graded(tmp_path: Path) -> None:
    config = config_of(rollout=NAMED | {"sample_deadline_s": 0.1}, eval={"prompts": 4, "samples": 2})
    context = replace(context_of(tmp_path, config, FakeEngine()), workflow=Hangs({2}))
    watcher = watcher_of(context, FakeReceiver(WeightVersion(1, 0)))
    await watcher.wait_for_initial_weights(1.0)
    with structlog.testing.capture_logs() as logs:
        await MilestoneEvaluator(context, watcher).evaluate_initial_version()
    (evaluation,) = await context.board.evaluations()
    assert (evaluation.figures.completions, evaluation.figures.failed) == (3 * 2, 3)
    failed = [entry for entry in logs if entry["event"] == "a held-out completion failed"]
    assert {entry["task"] for entry in failed} == {2}
    assert all("in Hangs.ask_the_environment < " in entry["why"] for entry in failed)
    assert completion_timeout_s(config_of(eval={"timeout_s": 100})) == 90  # so that the rest can still be graded


async def test_sleep_of_the_engine_does_not_count_towards_the_deadline() -> None:
    clock_s = [0.0]
    task, session = cast(Any, SimpleNamespace(index=3)), cast(Any, SimpleNamespace(index=0, is_cut_short=False))
    runner = WorkflowRunner(Hangs(), "my:Workflow", SampleDeadline(0.01), clock_s=lambda: clock_s[0])
    running = asyncio.create_task(runner.generate_sample(task, session))
    await asyncio.wait([running], timeout=0.12)
    assert not running.done()
    clock_s[0] = 1.0
    with pytest.raises(WaitTimeout, match="sample 0 of task 3"):
        await running


def test_the_deadline_is_derived_from_lengths_and_speed_unless_it_is_set() -> None:
    config = config_of(sampling={"max_tokens": 200}, rollout={"vllm": {"max_model_len": 256}})
    deadline = SampleDeadline.for_training(config)
    assert deadline.deadline_s == config.trainer.take_timeout_s / 2
    deadline.record_sample(10.0, 1000)
    assert deadline.deadline_s == 120
    deadline.record_sample(90.0, 1000)  # 0.05 s per token, 200 tokens, ten times
    assert deadline.deadline_s == pytest.approx(120)
    deadline.record_sample(100.0, 0)  # 0.1 s per token
    assert deadline.deadline_s == pytest.approx(200)
    deadline.record_sample(1000.0, 0)
    assert deadline.deadline_s == config.trainer.take_timeout_s / 2
    assert SampleDeadline.for_training(config_of(rollout={"sample_deadline_s": 7})).deadline_s == 7


async def test_a_workflow_that_blocks_the_event_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "PING_EVERY_S", 0.02)

    async def waits_for_a_page_without_await() -> None:
        time.sleep(0.5)  # noqa: ASYNC251  (the mistake under test)

    given_up: list[str] = []
    with (
        structlog.testing.capture_logs() as logs,
        watched_loop(limit_s=0.2, on_limit=given_up.append, warn_s=0.1),
    ):
        await asyncio.create_task(waits_for_a_page_without_await(), name="sample 3 of task 7, workflow my:Workflow")
        await until(lambda: len(given_up) == 1)
    for report in (logs[0]["by"], given_up[0]):
        assert report.startswith("sample 3 of task 7, workflow my:Workflow: ")
        assert "waits_for_a_page_without_await" in report
    assert logs[0]["event"] == "the event loop is blocked"
    assert len(logs) == 1

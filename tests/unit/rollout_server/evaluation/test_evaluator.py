"""The evaluator: evaluated versions, claims, and results on the board."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import EngineError, ServerLost, WaitTimeout
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire import Sample, Task
from async_grpo.wire.board import Evaluation
from buffer import InMemoryBoard
from rollout_server.context import ServerContext
from rollout_server.dispatch.admission import TaskFeeder
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.evaluation.eval_runner import PROBE_GROUPS, PROBE_SAMPLES, EvalPlan, EvalRunner
from rollout_server.evaluation.milestones import MilestoneEvaluator, milestone_of, next_milestone
from rollout_server.heartbeat import Heartbeat
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows import SingleTurn
from rollout_server.workflows.session import SampleSession
from tests.support.rollout_fakes import FakeEngine, FakeReceiver, config_of, context_of, watcher_of
from tests.support.tokenizers import Bytes
from tests.support.waiting import until


async def evaluator_at(context: ServerContext, version: int) -> tuple[MilestoneEvaluator, WeightWatcher, FakeReceiver]:
    receiver = FakeReceiver(WeightVersion(1, version))
    watcher = watcher_of(context, receiver)
    await watcher.wait_for_initial_weights(1.0)
    return MilestoneEvaluator(context, watcher), watcher, receiver


async def versions_on(board: Any) -> list[int]:
    return [item.version for item in await board.evaluations()]


async def test_the_policy_is_evaluated_before_and_after_training(tmp_path: Path) -> None:
    engine = FakeEngine(lambda request: "yes" if request.temperature == 0 or "-0-0-" in request.request_id else "no")
    context = context_of(tmp_path, config_of(), engine)
    evaluator, watcher, receiver = await evaluator_at(context, 0)
    await evaluator.evaluate_initial_version()
    (before,) = await context.board.evaluations()
    assert (before.version, before.prompts, before.samples, before.server) == (0, 4, 2, "rollout-0")
    assert (before.sampled_accuracy, before.greedy_accuracy) == (1 / 8, 1.0)
    assert before.completion_tokens_mean == pytest.approx((3 + 7 * 2) / 8)
    figures = before.figures
    assert figures is not None and figures.mean is not None and figures.majority is not None
    assert (figures.mean.value, figures.pass_at["2"].value) == (before.sampled_accuracy, 1 / 4)
    assert figures.majority.value == 1 / 8  # in the one prompt with a right answer, yes and no have one vote each
    assert figures.mean.low <= figures.mean.value <= figures.mean.high
    assert before.no_majority == ""

    loops = [asyncio.create_task(loop) for loop in (watcher.run_updating(), evaluator.evaluate_milestones())]
    for version in (1, 2, 3, 4):
        await receiver.publish(1, version)
    await asyncio.wait_for(loops[1], 5.0)
    loops[0].cancel()
    assert await versions_on(context.board) == [0, 4]


async def test_the_board_has_the_reason_for_a_missing_majority(tmp_path: Path) -> None:
    context = context_of(tmp_path, config_of(rewards={"functions": [{"name": "format"}]}), FakeEngine())
    evaluator, _, _ = await evaluator_at(context, 0)
    await evaluator.evaluate_initial_version()
    (evaluation,) = await context.board.evaluations()
    assert evaluation.figures is not None and evaluation.figures.majority is None
    assert evaluation.no_majority == "format has none"


async def test_the_board_has_the_number_of_failed_extractions(tmp_path: Path) -> None:
    engine = FakeEngine(lambda request: "!" if "-0-0-" in request.request_id else "yes")
    context = context_of(tmp_path, config_of(), engine)
    evaluator, _, _ = await evaluator_at(context, 0)
    await evaluator.evaluate_initial_version()
    (evaluation,) = await context.board.evaluations()
    assert (
        evaluation.figures is not None and evaluation.figures.unextracted == 1
    )  # answers of greedy completions are not extracted
    assert (evaluation.figures.unjudged, evaluation.no_majority) == (0, "")


async def test_a_workflow_gets_the_index_of_its_sample(tmp_path: Path) -> None:
    calls: Counter[int] = Counter()

    class CountingWorkflow(SingleTurn):
        async def run(self, task: Task, session: SampleSession) -> Sample:
            calls[session.index] += 1
            return await super().run(task, session)

    runner = EvalRunner(replace(context_of(tmp_path, config_of(), FakeEngine()), workflow=CountingWorkflow(Bytes())))
    await runner.grade_prompts(EvalPlan(prompts=4, samples=3))
    assert calls == {0: 4 + 4, 1: 4, 2: 4}  # the greedy completion of a prompt has index 0
    calls.clear()
    await runner.generate_probe(version=0)
    assert calls == dict.fromkeys(range(PROBE_SAMPLES), PROBE_GROUPS)
    assert runner.unfinished == 0


class FailingWorkflow(SingleTurn):
    """Fails for two held-out prompts: raises for 1, takes no turn for 2."""

    async def run(self, task: Task, session: SampleSession) -> Sample:
        if task.index == 1:
            raise ValueError("no such city")
        if task.index == 2:
            return session.sample("")
        return await super().run(task, session)


async def test_failed_held_out_completions_are_counted_and_left_out(tmp_path: Path) -> None:
    context = replace(context_of(tmp_path, config_of(), FakeEngine()), workflow=FailingWorkflow(Bytes()))
    evaluator, _, _ = await evaluator_at(context, 4)
    await evaluator.evaluate_milestones()
    (evaluation,) = await context.board.evaluations()
    assert evaluation.figures is not None
    assert (evaluation.figures.prompts, evaluation.figures.completions, evaluation.figures.failed) == (
        2,
        4,
        2 * (2 + 1),
    )
    assert (evaluation.figures.unjudged, evaluation.sampled_accuracy) == (0, 1.0)
    probe = await context.board.wait_for_probe(4, timeout_s=1.0)
    assert {group.task.index for group in probe.groups} == {0, 3}


async def test_an_engine_error_ends_the_evaluation(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.error = EngineError("the engine died")
    context = context_of(tmp_path, config_of(eval={"prompts": 1, "samples": 1, "greedy": False}), engine)
    evaluator, _, _ = await evaluator_at(context, 0)
    with pytest.raises(EngineError):
        await evaluator.evaluate_initial_version()


async def test_sleep_of_the_engine_does_not_count_towards_eval_timeouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(WeightWatcher, "awake_s", property(lambda watcher: clock_s[0]))
    monkeypatch.setattr("rollout_server.evaluation.milestones.COMPLETION_TIMEOUT_FRACTION", 0.5)
    engine = FakeEngine()
    engine.hold = True
    context = context_of(tmp_path, config_of(eval={"prompts": 1, "timeout_s": 0.2}), engine)
    evaluator, _, _ = await evaluator_at(context, 0)
    evaluating = asyncio.create_task(evaluator.evaluate_initial_version())
    await asyncio.wait([evaluating], timeout=0.4)
    assert not evaluating.done()
    clock_s[0] = 0.15  # too late for a completion, in time for the evaluation
    await asyncio.wait_for(evaluating, 5)
    (evaluation,) = await context.board.evaluations()
    assert evaluation.figures is not None and evaluation.figures.failed == evaluation.samples + 1


class ClaimOnce(InMemoryBoard):
    """A board that fails after the first claim."""

    claims = 0

    async def claim_job(self, job: str, holder: str, *, ttl_s: float) -> bool:
        self.claims += 1
        if self.claims > 1:
            raise ServerLost("gone")
        return await super().claim_job(job, holder, ttl_s=ttl_s)


async def test_an_evaluation_ends_if_its_claim_cannot_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.evaluation.milestones.CLAIM_TTL_S", 0.03)
    engine = FakeEngine()
    engine.hold = True
    evaluator, _, _ = await evaluator_at(context_of(tmp_path, config_of(), engine, board=ClaimOnce()), 0)
    with pytest.raises(ServerLost):
        async with asyncio.timeout(5):
            await evaluator.evaluate_initial_version()
    assert engine.held == {}


async def test_the_final_probe_has_groups_of_the_final_version(tmp_path: Path) -> None:
    context = context_of(tmp_path, config_of(), FakeEngine())
    evaluator, _, _ = await evaluator_at(context, 4)
    await evaluator.evaluate_milestones()
    probe = await context.board.wait_for_probe(4, timeout_s=1.0)
    assert [len(group.samples) for group in probe.groups] == [4] * 16
    for sample in (sample for group in probe.groups for sample in group.samples):
        sample.validate()
        assert {span.version for span in sample.spans} == {4}


async def test_a_server_without_the_final_weights_ends_after_the_final_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.evaluation.milestones.BOARD_POLL_S", 0.01)
    context = context_of(tmp_path, config_of(), FakeEngine())
    evaluator, _, _ = await evaluator_at(context, 3)
    running = asyncio.create_task(evaluator.evaluate_milestones())
    await asyncio.sleep(0.05)
    assert not running.done()
    await context.board.put_evaluation(
        Evaluation(version=4, prompts=4, samples=2, sampled_accuracy=0.5, server="other")
    )
    await asyncio.wait_for(running, 1.0)
    assert await versions_on(context.board) == [4]


async def test_milestones_are_evaluated_even_if_versions_are_skipped(tmp_path: Path) -> None:
    context = context_of(
        tmp_path, config_of(steps=10, eval={"prompts": 2, "samples": 1, "every_steps": 3}), FakeEngine()
    )
    evaluator, watcher, receiver = await evaluator_at(context, 0)
    await evaluator.evaluate_initial_version()
    loops = [asyncio.create_task(loop) for loop in (watcher.run_updating(), evaluator.evaluate_milestones())]
    for version in (1, 4, 5, 9, 10):
        await receiver.publish(1, version)
        async with asyncio.timeout(5):
            while (await versions_on(context.board))[-1] != {1: 0, 4: 4, 5: 4, 9: 9, 10: 10}[version]:
                await asyncio.sleep(0.001)
    await asyncio.gather(loops[1])
    loops[0].cancel()
    assert await versions_on(context.board) == [0, 4, 9, 10]


async def test_only_one_of_several_servers_evaluates_a_version(tmp_path: Path) -> None:
    board, engines = InMemoryBoard(), [FakeEngine(), FakeEngine()]
    contexts = [
        context_of(tmp_path, config_of(), engine, board=board, name=f"r{n}") for n, engine in enumerate(engines)
    ]
    evaluators = [(await evaluator_at(context, 0))[0] for context in contexts]
    await asyncio.gather(*(evaluator.evaluate_initial_version() for evaluator in evaluators))
    assert sorted(len(engine.requests) > 0 for engine in engines) == [False, True]
    assert await versions_on(board) == [0]


async def test_a_late_server_does_not_evaluate_a_later_version_as_the_first(tmp_path: Path) -> None:
    context = context_of(tmp_path, config_of(), FakeEngine())
    evaluator, _, _ = await evaluator_at(context, 2)
    await evaluator.evaluate_initial_version()
    assert await versions_on(context.board) == []


async def test_updates_wait_for_the_end_of_an_evaluation(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.hold = True
    context = context_of(tmp_path, config_of(), engine)
    evaluator, watcher, receiver = await evaluator_at(context, 0)
    watching = asyncio.create_task(watcher.run_updating())
    evaluating = asyncio.create_task(evaluator.evaluate_initial_version())
    await until(lambda: len(engine.held) > 0)
    await receiver.publish(1, 1)
    while not evaluating.done():
        assert engine.version == 0
        engine.release()
        await asyncio.sleep(0.001)
    await watcher.wait_for_version(1)
    watching.cancel()


async def test_a_slow_evaluation_times_out_with_the_fix(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.hold = True
    context = context_of(tmp_path, config_of(eval={"prompts": 1, "timeout_s": 0.05}), engine)
    evaluator, _, _ = await evaluator_at(context, 0)
    with pytest.raises(WaitTimeout, match=r"version 0.*eval\.prompts"):
        await evaluator.evaluate_initial_version()
    assert engine.held == {}


async def test_tokens_of_an_evaluation_are_not_counted_as_generated_for_training(tmp_path: Path) -> None:
    engine = FakeEngine()
    context = context_of(tmp_path, config_of(), engine)
    evaluator, watcher, _ = await evaluator_at(context, 0)
    feeder = TaskFeeder(context.buffer, context.source, target=4)
    heartbeat = Heartbeat(context, watcher, Dispatcher(context, watcher, feeder), evaluator)
    await evaluator.evaluate_initial_version()
    engine.tokens += 100
    await heartbeat.send_heartbeat()
    counters = await context.board.counters()
    assert counters == {"eval_tokens": (4 * 2 + 4) * 3, "generated_tokens": 100}
    (beat,) = await context.board.live_servers()
    assert (beat.name, beat.version, beat.updates) == ("rollout-0", 0, 1)


def test_milestones_are_start_multiples_and_end() -> None:
    walk = [0]
    while walk[-1] < 25:
        walk.append(next_milestone(walk[-1], every_steps=10, final=25))
    assert walk == [0, 10, 20, 25]
    assert [milestone_of(v, every_steps=10, final=25) for v in (0, 9, 10, 24, 25, 30)] == [0, 0, 10, 20, 25, 25]
    assert next_milestone(0, every_steps=0, final=25) == 25
    assert [milestone_of(v, every_steps=0, final=25) for v in (0, 24, 25)] == [0, 0, 25]

"""`async-grpo eval` with a scripted engine: how much is asked, what is waited for, what the report says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.cli.evaluate import _remarks
from async_grpo.config import RunConfig
from async_grpo.data.base import make_task
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.lab.evaluate.evaluate import (
    EvalReport,
    completion_rows,
    evaluate,
    find_stated_evaluation,
    hold_out_prompts,
    make_eval_plan,
    report_as_json,
)
from async_grpo.lab.evaluate.policy_source import Checkpoint, LiveRun
from async_grpo.rewards.base import RewardInput, RewardResult
from rollout_server.context import EvalContext
from rollout_server.evaluation.eval_runner import EvalPlan, EvalRunner
from rollout_server.workflows import SingleTurn
from tests.support.http_fakes import Letters, script_of, scripted
from tests.support.rollout_fakes import FakePool, YesSource, config_of, leave_run_folder

CONFIG = config_of()
SOMEWHERE = Checkpoint(Path("hf"), 4)
PLAN = EvalPlan(4, 2)


def test_the_plan_is_the_runs_unless_told_otherwise() -> None:
    assert make_eval_plan(CONFIG, prompts=None, samples=None, temperature=None) == EvalPlan(4, 2, 1.0, True)
    assert make_eval_plan(CONFIG, prompts=3, samples=8, temperature=0.5) == EvalPlan(3, 8, 0.5, True)
    with pytest.raises(ConfigError, match="--temperature 0 "):
        make_eval_plan(CONFIG, prompts=None, samples=None, temperature=0.0)


def test_more_prompts_are_held_out_only_where_they_were_not_trained_on(tmp_path: Path) -> None:
    assert hold_out_prompts(CONFIG, 4) is CONFIG
    assert hold_out_prompts(CONFIG, 100).eval.prompts == 100
    data = {"kind": "jsonl", "path": tmp_path / "train.jsonl"}
    with pytest.raises(ConfigError, match=r"--prompts 5 .*eval\.prompts.*data\.eval_path"):
        hold_out_prompts(config_of(data=data), 5)
    assert hold_out_prompts(config_of(data={**data, "eval_path": data["path"]}), 5).eval.prompts == 5


class Numbered(YesSource):
    """Prompts of the sources a and b."""

    def held_out(self) -> list[Any]:
        return [make_task(i, f"p{i}", [i], "yes", {"source": "ab"[i // 2]}) for i in range(4)]


async def report_of(
    config: RunConfig = CONFIG, policy: Checkpoint | LiveRun = SOMEWHERE, plan: EvalPlan = PLAN, wrong: bytes = b"no"
) -> EvalReport:
    """Of a policy that answers every other prompt wrongly."""
    engine = await scripted(lambda request: [*(b"yes" if request.prompt[0] % 2 else wrong), 255])
    pool: Any = FakePool()
    context = EvalContext(config, "eval", engine, pool, SingleTurn(Letters()), Numbered())
    grades = await EvalRunner(context).grade_prompts(plan)
    stated = find_stated_evaluation(config, policy, plan, len(grades.prompts))
    return EvalReport(config, policy, plan, grades, {3: 10, 4: 30}, 1.5, stated)


async def test_the_facts_and_the_rows_say_everything() -> None:
    report = await report_of()
    found = json.loads(json.dumps(report_as_json(report)))
    assert found["policy"] == {"checkpoint": "hf", "version": 4}
    assert found["figures"]["mean"]["value"] == found["figures"]["greedy"]["value"] == 0.5
    assert set(found["by_source"]) == {"a", "b"}
    written = list(completion_rows(report))
    assert len(written) == 4 * 2 + 4
    assert {(row["how"], row["extracted"], row["right"]) for row in written} == {
        ("sampled", "yes", True),
        ("sampled", "no", False),
        ("greedy", None, True),
        ("greedy", None, False),
    }


async def test_answers_that_could_not_be_looked_for_are_remarked_with_the_reason() -> None:
    report = await report_of(wrong=b"!")
    assert report_as_json(report)["figures"]["unextracted"] == 4
    (remark,) = [line for line in _remarks(report) if "`extract`" in line]
    assert "4 completions" in remark and "extraction 4" in remark and "ValueError: no" in remark
    found = {(row["how"], row["completion"]): row["unextracted"] for row in completion_rows(report)}
    assert found["sampled", "!"] == "extraction: ValueError: no"
    assert found["sampled", "yes"] == found["greedy", "!"] == ""


async def test_prompts_that_are_trained_on_are_left_out_with_a_remark() -> None:
    report = await report_of(plan=EvalPlan(7, 2))
    (remark,) = [line for line in _remarks(report) if "held-out prompts" in line]
    assert "4 held-out prompts" in remark and "7 requested" in remark
    without = replace(report, trained_on=3)
    (remark,) = [line for line in _remarks(without) if "prompts" in line]
    assert remark.startswith("3 ") and "trains on" in remark
    assert report_as_json(without)["prompts_trained_on"] == 3


async def test_a_live_evaluation_says_which_versions_wrote_the_answers() -> None:
    report = await report_of(policy=LiveRun(CONFIG, {"http://h:1": 4}))
    (remark,) = [line for line in _remarks(report) if "versions" in line]
    assert "3 (25%" in remark and "4 (75%" in remark
    assert report_as_json(report)["policy"] == {"live": ["http://h:1"], "tokens_by_version": {"3": 10, "4": 30}}


async def test_it_says_whether_the_run_states_the_same(tmp_path: Path) -> None:
    config = config_of(runs_dir=tmp_path, eval={"prompts": 10, "samples": 2})
    folder = leave_run_folder(config)
    policy = Checkpoint(folder.path / "checkpoints" / "hf", 4)
    assert (await report_of(config, policy)).agrees is None
    stated = {"version": 4, "prompts": 4, "samples": 2, "sampled_accuracy": 0.5, "greedy_accuracy": 0.5}
    summary = folder.path / "summary.json"
    summary.write_text(json.dumps({"evaluations": [stated]}))
    report = await report_of(config, policy)
    assert report.agrees and "equal those" in " ".join(_remarks(report))
    assert (await report_of(config, policy, EvalPlan(10, 2))).agrees  # the data hold out 4 in both
    assert (await report_of(config, policy, EvalPlan(4, 1))).agrees is None
    assert (await report_of(config, Checkpoint(tmp_path / "stranger", 4))).agrees is None
    summary.write_text(json.dumps({"evaluations": [{**stated, "greedy_accuracy": 0.25}]}))
    report = await report_of(config, policy)
    assert report.agrees is False and "0.5 sampled, 0.25 greedy" in " ".join(_remarks(report))


class Evaluating:
    """`evaluate` of a policy that says yes, with an engine, a pool and prompts of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Any, pool: Any = None, source: Any = None) -> None:
        self.kept = -1

        @asynccontextmanager
        async def policy(*_: object) -> Any:
            yield engine, Path("hf")

        @asynccontextmanager
        async def context(config: RunConfig, sampler: Any, *_: object, kept: int) -> Any:
            self.kept = kept
            yield EvalContext(config, "eval", sampler, pool or FakePool(), SingleTurn(Letters()), source or YesSource())

        module = "async_grpo.lab.evaluate.evaluate"
        monkeypatch.setattr(f"{module}.open_policy", policy)
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda _: Letters())
        monkeypatch.setattr(f"{module}.POLL_INTERVAL_S", 0.01)
        monkeypatch.setattr(f"{module}.open_eval_context", context)

    async def __call__(self, plan: EvalPlan = PLAN, patience_s: float = 5.0) -> EvalReport:
        nothing = lambda _: None  # noqa: E731
        return await evaluate(
            CONFIG, SOMEWHERE, plan, patience_s=patience_s, report_progress=nothing, on_answer=nothing
        )


async def test_a_policy_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluating = Evaluating(monkeypatch, await scripted(script_of("never"), tokens_per_s=0.001))
    with pytest.raises(WaitTimeout, match=r"completion \(0 of 12 .*--patience"):
        await evaluating(patience_s=0.05)


async def test_reward_functions_that_never_judge_are_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool()
    pool.gate = asyncio.Event()
    evaluating = Evaluating(monkeypatch, await scripted(script_of("yes")), pool)
    with pytest.raises(WaitTimeout, match=r"rewards of completions .*\(12 .* 0 .*rewards\.deadline_s"):
        await evaluating(patience_s=0.2)


async def test_grades_that_come_slowly_one_after_the_other_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = asyncio.Lock()

    class Slow(FakePool):
        async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
            async with free:
                await asyncio.sleep(0.15)
                return await super().judge(items)

    report = await Evaluating(monkeypatch, await scripted(script_of("yes")), Slow())(patience_s=0.5)  # four take longer
    assert report.grades.sampled_accuracy == 1.0


async def test_prompts_beyond_those_that_the_run_kept_are_asked_unless_it_trains_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fewer(YesSource):
        dropped = {"also trained on": 2, "prompt too long": 1}

    evaluating = Evaluating(monkeypatch, await scripted(script_of("yes")), source=Fewer())
    report = await evaluating(EvalPlan(6, 1))
    assert (evaluating.kept, report.trained_on, report.config.eval.prompts) == (4, 2, 6)


async def test_a_live_run_that_refuses_such_long_completions_is_not_asked() -> None:
    config = config_of(sampling={"max_tokens": 200}, rollout={"http": {"max_tokens": 100}})
    nothing = lambda _: None  # noqa: E731
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens \(200\).*rollout\.http\.max_tokens \(100\)"):
        await evaluate(config, LiveRun(config, {}), PLAN, patience_s=1.0, report_progress=nothing, on_answer=nothing)

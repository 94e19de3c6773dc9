"""`async-grpo eval`: grade a policy on the held-out prompts of its configuration.

    Checkpoint --engine--+
                         +--> EvalRunner --> EvalReport --> report_as_json (--json), completion_rows (--save)
    LiveRun ----HTTP-----+

Engine settings, prompts, seeds and rewards come from the configuration, so the same weights reproduce the accuracy of
the run's own evaluation. Waits at most `patience_s` seconds for each completion, and again for each reward.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from async_grpo.app.launch.inputs import fetch_inputs, pin_inputs
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, validate
from async_grpo.data.jsonl import ALSO_TRAINED_ON
from async_grpo.data.tokenizer import load_tokenizer
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.evaluation.summary import INTERVALS
from async_grpo.lab.evaluate.policy_source import Checkpoint, LiveRun, open_eval_context, open_policy
from async_grpo.rewards.base import RewardFailure
from async_grpo.utils.aio import cancel_and_wait
from rollout_server.context import EvalContext
from rollout_server.evaluation.eval_runner import EvalPlan, EvalResult, EvalRunner, PromptResult

POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The result of an evaluation."""

    config: RunConfig
    policy: Checkpoint | LiveRun
    plan: EvalPlan
    grades: EvalResult
    versions: dict[int, int]
    """Policy version -> number of tokens it generated."""
    wall_s: float
    stated: dict[str, Any] = field(default_factory=dict)
    """Entry of this version in the run's summary.json; empty if the run has no comparable evaluation."""
    trained_on: int = 0
    """Number of requested prompts left out because the run trains on them."""

    @property
    def agrees(self) -> bool | None:
        """True if both accuracies equal the run's own evaluation; None without one."""
        if not self.stated:
            return None
        measured = (self.grades.sampled_accuracy, self.grades.greedy_accuracy)
        return measured == (self.stated["sampled_accuracy"], self.stated["greedy_accuracy"])


def make_eval_plan(
    config: RunConfig, *, prompts: int | None, samples: int | None, temperature: float | None
) -> EvalPlan:
    """Return the configured plan with the user's changes. Raises ConfigError for a temperature out of range."""
    plan = EvalPlan.from_config(config)
    if temperature is not None and not 0 < temperature <= 10:
        raise ConfigError(
            f"--temperature {temperature:g} is outside (0, 10]. For temperature 0, use the greedy accuracy, which is "
            "reported unless eval.greedy is false"
        )
    if temperature is None:
        temperature = plan.temperature
    return EvalPlan(prompts or plan.prompts, samples or plan.samples, temperature, plan.greedy)


def hold_out_prompts(config: RunConfig, prompts: int) -> RunConfig:
    """Return the configuration with at least `prompts` held-out prompts. Raises ConfigError if the additional ones were
    trained on."""
    if prompts <= config.eval.prompts:
        return config
    data = config.data
    if data.kind == "jsonl" and data.eval_path is None and data.path is not None and not data.path.is_dir():
        raise ConfigError(
            f"--prompts {prompts} is above eval.prompts ({config.eval.prompts}): the run holds out the last rows of "
            f"{data.path} and trains on all others. Use at most {config.eval.prompts}, or evaluate other prompts with "
            "-o data.eval_path=FILE and --checkpoint"
        )
    plain = config.model_dump(mode="json")
    return validate({**plain, "eval": {**plain["eval"], "prompts": prompts}}, source="--prompts")


def check_completion_length(config: RunConfig, policy: Checkpoint | LiveRun) -> None:
    """Raise ConfigError if the servers of a live run would refuse completions of `sampling.max_tokens` tokens."""
    if not isinstance(policy, LiveRun):
        return
    max_tokens = config.sampling.max_tokens
    limit = config.rollout.http.max_tokens
    if max_tokens > limit:
        raise ConfigError(
            f"sampling.max_tokens ({max_tokens}) is above rollout.http.max_tokens ({limit}), and the live run "
            f"refuses longer completions. Resume the run with -o rollout.http.max_tokens={max_tokens}, or "
            "evaluate a checkpoint (--checkpoint)"
        )


async def evaluate(
    config: RunConfig,
    policy: Checkpoint | LiveRun,
    plan: EvalPlan,
    *,
    patience_s: float,
    report_progress: Callable[[str], None],
    on_answer: Callable[[int], None],
) -> EvalReport:
    """Grade the policy. Calls `on_answer(total)` after each completion, where `total` is the number expected in all.

    Raises WaitTimeout if neither a completion nor a reward arrives for `patience_s`, and the errors of engine, workflow
    and rewards.
    """
    check_completion_length(config, policy)
    config = await asyncio.to_thread(fetch_inputs, pin_inputs(config, planning=True), report_progress, ("data.path",))
    # The run held out only `eval.prompts` prompts. The source needs that number to leave out the ones it trained on.
    held_out_by_run = config.eval.prompts
    config = hold_out_prompts(config, plan.prompts)
    async with (
        open_policy(config, policy, "eval", patience_s, report_progress) as (sampler, tokenizer_folder),
        open_eval_context(config, sampler, load_tokenizer(tokenizer_folder), "eval", kept=held_out_by_run) as context,
    ):
        total = min(plan.prompts, len(context.source.held_out())) * plan.completions_per_prompt
        started_s = time.monotonic()
        grades = await _grade(EvalProgress(total, on_answer), plan, context, patience_s)
        wall_s = time.monotonic() - started_s
    return EvalReport(
        config,
        policy,
        plan,
        grades,
        versions=_tokens_by_version(grades.prompts),
        wall_s=wall_s,
        stated=find_stated_evaluation(config, policy, plan, len(grades.prompts)),
        trained_on=context.source.dropped.get(ALSO_TRAINED_ON, 0),
    )


@dataclass
class EvalProgress:
    """Number of completions and rewards, and the time of the newest."""

    total: int
    on_answer: Callable[[int], None]
    done: int = 0
    graded: int = 0
    last_s: float = field(default_factory=time.monotonic)

    def count_completion(self) -> None:
        """Count one generated completion."""
        self.done += 1
        self.last_s = time.monotonic()
        self.on_answer(self.total)

    def count_graded(self, completions: int) -> None:
        """Count `completions` with rewards and extracted answers."""
        self.graded += completions
        self.last_s = time.monotonic()


async def _grade(progress: EvalProgress, plan: EvalPlan, context: EvalContext, patience_s: float) -> EvalResult:
    runner = EvalRunner(context, progress.count_completion, progress.count_graded)
    grading = asyncio.create_task(runner.grade_prompts(plan))
    try:
        while not grading.done():
            await asyncio.wait([grading], timeout=POLL_INTERVAL_S)
            if not grading.done() and time.monotonic() - progress.last_s > patience_s:
                raise _no_progress_error(progress, runner, patience_s)
        return grading.result()
    finally:
        await cancel_and_wait(grading)


def _no_progress_error(progress: EvalProgress, runner: EvalRunner, patience_s: float) -> WaitTimeout:
    if runner.unfinished:
        awaited = f"the next completion ({progress.done} of {progress.total} are done)"
        return WaitTimeout(awaited, patience_s, "Raise --patience if completions take that long")
    awaited = f"the rewards of completions ({progress.done} are generated, {progress.graded} have rewards)"
    return WaitTimeout(awaited, patience_s, "Raise --patience, or lower rewards.deadline_s or raise rewards.workers")


def _tokens_by_version(results: list[PromptResult]) -> dict[int, int]:
    tokens: Counter[int] = Counter()
    for result in results:
        for answer in (*result.sampled, *result.greedy):
            for span in answer.sample.spans:
                tokens[span.version] += span.end - span.start
    return dict(sorted(tokens.items()))


def find_stated_evaluation(
    config: RunConfig, policy: Checkpoint | LiveRun, plan: EvalPlan, prompts: int
) -> dict[str, Any]:
    """Return the run's own evaluation of this version, with equal numbers of prompts and samples at temperature 1, from
    its summary.json. Empty without one."""
    if isinstance(policy, LiveRun) or policy.version is None or plan.temperature != 1.0:
        return {}
    summary = RunFolder(config.run_dir).path / "summary.json"
    is_of_this_run = config.run_dir.resolve() in policy.path.resolve().parents
    if not is_of_this_run or not summary.is_file():
        return {}

    wanted = (policy.version, prompts, plan.samples)
    for entry in json.loads(summary.read_text()).get("evaluations") or []:
        if (entry.get("version"), entry.get("prompts"), entry.get("samples")) == wanted:
            return dict(entry)
    return {}


def report_as_json(report: EvalReport) -> dict[str, Any]:
    """Return the report as the object written by `--json`."""
    grades = report.grades
    policy = report.policy
    if isinstance(policy, LiveRun):
        versions = {str(version): tokens for version, tokens in report.versions.items()}
        source: dict[str, Any] = {"live": list(policy.servers), "tokens_by_version": versions}
    else:
        source = {"checkpoint": str(policy.path), "version": policy.version}
    return {
        "run": report.config.name,
        "policy": source,
        "prompts": len(grades.prompts),
        "prompts_trained_on": report.trained_on,
        "samples": report.plan.samples,
        "temperature": report.plan.temperature,
        "seed": report.config.seed,
        "reward": report.config.rewards.functions[0].name,
        "right_at": report.config.eval.right_at,
        "figures": msgspec.to_builtins(grades.metrics),
        "by_source": msgspec.to_builtins(grades.by_source),
        "no_majority": grades.no_majority,
        "intervals": INTERVALS,
        "completion_tokens_mean": grades.completion_tokens_mean,
        "wall_s": report.wall_s,
        "stated_by_the_run": report.stated or None,
        "agrees_with_the_run": report.agrees,
    }


def completion_rows(report: EvalReport) -> Iterator[dict[str, Any]]:
    """Yield one object per completion, as written by `--save`."""
    right_at = report.config.eval.right_at
    graded_by = report.config.rewards.functions[0].name
    for result in report.grades.prompts:
        for how, answers in (("sampled", result.sampled), ("greedy", result.greedy)):
            for index, answer in enumerate(answers):
                score = answer.grade.score
                yield {
                    "prompt_index": result.task.index,
                    "source": result.source,
                    "how": how,
                    "sample": index,
                    "prompt": result.task.prompt,
                    "answer": result.task.answer,
                    "completion": answer.sample.text,
                    "extracted": answer.grade.answer,
                    "unextracted": _failure_text(answer.extraction),
                    "score": score,
                    "right": None if score is None else score >= right_at,
                    "scores": answer.result.scores,
                    "unjudged": _failure_text(answer.result.failures.get(graded_by)),
                    "failed": answer.failure,
                    "finish_reason": answer.sample.finish_reason,
                    "tokens": answer.sample.length,
                    "spans": [[span.version, span.start, span.end] for span in answer.sample.spans],
                }


def _failure_text(failure: RewardFailure | None) -> str:
    return "" if failure is None else f"{failure.kind}: {failure.reason}"

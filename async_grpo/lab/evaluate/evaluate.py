"""`async-grpo eval`: grade a policy on the held-out prompts of its configuration.

    Checkpoint --engine--+
                         +--> EvalRunner --> EvalReport --> facts (JSON), rows (--save)
    LiveRun ----HTTP-----+

Engine settings, prompts, seeds and rewards are those of the configuration, so the same weights reproduce the figures of
the run's own evaluation. It waits for the next completion and for its grade, at most `patience_s` seconds each.
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

from async_grpo.app.launch.inputs import fetch, pin
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, validate
from async_grpo.data.jsonl import ALSO_TRAINED_ON
from async_grpo.data.tokenizer import load_tokenizer
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.evaluation.summary import INTERVALS
from async_grpo.lab.evaluate.policy_source import Checkpoint, LiveRun, open_context, open_policy
from async_grpo.rewards.base import RewardFailure
from async_grpo.utils.aio import cancel_and_wait
from rollout_server.context import EvalContext
from rollout_server.evaluation.eval_runner import EvalPlan, EvalResult, EvalRunner, PromptResult

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The result of an evaluation."""

    config: RunConfig
    policy: Checkpoint | LiveRun
    plan: EvalPlan
    grades: EvalResult
    versions: dict[int, int]
    """Policy version -> tokens of the answers that it wrote."""
    wall_s: float
    stated: dict[str, Any] = field(default_factory=dict)
    """The entry for this version in the run's summary.json, if the run measured it in the same way; else empty."""
    trained_on: int = 0
    """Number of requested prompts that were left out, because the run trains on them."""

    @property
    def agrees(self) -> bool | None:
        """Whether both accuracies equal those that the run states; None if it states none."""
        if not self.stated:
            return None
        measured = (self.grades.sampled_accuracy, self.grades.greedy_accuracy)
        return measured == (self.stated["sampled_accuracy"], self.stated["greedy_accuracy"])


def plan_of(config: RunConfig, *, prompts: int | None, samples: int | None, temperature: float | None) -> EvalPlan:
    """The plan of the configuration with the user's changes. Raises ConfigError for a temperature out of range."""
    plan = EvalPlan.of(config)
    if temperature is not None and not 0 < temperature <= 10:
        raise ConfigError(
            f"--temperature {temperature:g} is outside (0, 10]. Accuracy at temperature 0 is reported as "
            "greedy, unless eval.greedy is false"
        )
    return EvalPlan(
        prompts or plan.prompts,
        samples or plan.samples,
        plan.temperature if temperature is None else temperature,
        plan.greedy,
    )


def with_prompts(config: RunConfig, prompts: int) -> RunConfig:
    """The configuration, changed to hold out at least `prompts` prompts. Raises ConfigError if the policy was trained
    on the additional ones."""
    if prompts <= config.eval.prompts:
        return config
    data = config.data
    if data.kind == "jsonl" and data.eval_path is None and data.path is not None and not data.path.is_dir():
        raise ConfigError(
            f"--prompts {prompts} is above eval.prompts ({config.eval.prompts}): the run holds out the last rows of "
            f"{data.path} and trains on the others. Ask for {config.eval.prompts} or fewer, or name other held-out "
            "prompts with -o data.eval_path=FILE and --checkpoint"
        )
    plain = config.model_dump(mode="json")
    return validate({**plain, "eval": {**plain["eval"], "prompts": prompts}}, source="--prompts")


def check_length(config: RunConfig, policy: Checkpoint | LiveRun) -> None:
    """Raises ConfigError if the servers of a live run would refuse completions of the length that is sampled."""
    wanted, most = config.sampling.max_tokens, config.rollout.http.max_tokens
    if isinstance(policy, LiveRun) and wanted > most:
        raise ConfigError(
            f"sampling.max_tokens ({wanted}) is above rollout.http.max_tokens ({most}): the servers of the live run "
            f"refuse completions of that length. Stop the run and resume it with -o rollout.http.max_tokens={wanted}, "
            "or evaluate a checkpoint (--checkpoint)"
        )


async def evaluate(
    config: RunConfig,
    policy: Checkpoint | LiveRun,
    plan: EvalPlan,
    *,
    patience_s: float,
    say: Callable[[str], None],
    on_answer: Callable[[int], None],
) -> EvalReport:
    """Grade the policy. `on_answer(total)` is called for every completion, with the number that all will be.

    Raises what any part raises, and WaitTimeout if neither a completion nor a grade comes for `patience_s`.
    """
    check_length(config, policy)
    config = await asyncio.to_thread(fetch, pin(config, planning=True), say, ("data.path",))
    kept, config = config.eval.prompts, with_prompts(config, plan.prompts)
    async with (
        open_policy(config, policy, "eval", patience_s, say) as (sampler, tokenizer_folder),
        open_context(config, sampler, load_tokenizer(tokenizer_folder), "eval", kept=kept) as context,
    ):
        total = min(plan.prompts, len(context.source.held_out())) * plan.completions
        started_s = time.monotonic()
        grades = await _grade(EvalProgress(total, on_answer), plan, context, patience_s)
        wall_s = time.monotonic() - started_s
    versions, stated = _versions(grades.prompts), stated_by_the_run(config, policy, plan, len(grades.prompts))
    trained_on = context.source.dropped.get(ALSO_TRAINED_ON, 0)
    return EvalReport(config, policy, plan, grades, versions, wall_s, stated, trained_on)


@dataclass
class EvalProgress:
    """Counts completions and grades, and when the last of them came."""

    total: int
    on_answer: Callable[[int], None]
    done: int = 0
    graded: int = 0
    last_s: float = field(default_factory=time.monotonic)

    def answered(self) -> None:
        """Count one completion."""
        self.done, self.last_s = self.done + 1, time.monotonic()
        self.on_answer(self.total)

    def judged(self, completions: int) -> None:
        """Count `completions` that have rewards and extracted answers."""
        self.graded, self.last_s = self.graded + completions, time.monotonic()


async def _grade(progress: EvalProgress, plan: EvalPlan, context: EvalContext, patience_s: float) -> EvalResult:
    runner = EvalRunner(context, progress.answered, progress.judged)
    grading = asyncio.create_task(runner.grade(plan))
    try:
        while not (await asyncio.wait([grading], timeout=LOOK_EVERY_S))[0]:
            if time.monotonic() - progress.last_s > patience_s:
                raise _waited_too_long(progress, runner, patience_s)
        return grading.result()
    finally:
        await cancel_and_wait(grading)


def _waited_too_long(progress: EvalProgress, runner: EvalRunner, patience_s: float) -> WaitTimeout:
    if runner.generating:
        awaited = f"the next completion ({progress.done} of {progress.total} are there)"
        return WaitTimeout(awaited, patience_s, "Raise --patience if completions take that long")
    awaited = f"the reward functions to judge completions ({progress.done} are there, {progress.graded} are judged)"
    return WaitTimeout(awaited, patience_s, "Raise --patience, or lower rewards.deadline_s or raise rewards.workers")


def _versions(results: list[PromptResult]) -> dict[int, int]:
    tokens: Counter[int] = Counter()
    for result in results:
        for answer in (*result.sampled, *result.greedy):
            for span in answer.sample.spans:
                tokens[span.version] += span.end - span.start
    return dict(sorted(tokens.items()))


def stated_by_the_run(config: RunConfig, policy: Checkpoint | LiveRun, plan: EvalPlan, prompts: int) -> dict[str, Any]:
    """The entry of the run's summary.json for this version, measured on as many prompts and samples at temperature 1;
    {} if there is none."""
    if isinstance(policy, LiveRun) or policy.version is None or plan.temperature != 1.0:
        return {}
    summary = RunFolder(config.run_dir).path / "summary.json"
    belongs = config.run_dir.resolve() in policy.path.resolve().parents
    if not belongs or not summary.is_file():
        return {}
    for entry in json.loads(summary.read_text()).get("evaluations") or []:
        same = (entry.get("version"), entry.get("prompts"), entry.get("samples"))
        if same == (policy.version, prompts, plan.samples):
            return dict(entry)
    return {}


def facts(report: EvalReport) -> dict[str, Any]:
    """The report as the object that `--json` writes."""
    grades, policy = report.grades, report.policy
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
        "figures": msgspec.to_builtins(grades.figures),
        "by_source": msgspec.to_builtins(grades.by_source),
        "no_majority": grades.no_majority,
        "intervals": INTERVALS,
        "completion_tokens_mean": grades.completion_tokens_mean,
        "wall_s": report.wall_s,
        "stated_by_the_run": report.stated or None,
        "agrees_with_the_run": report.agrees,
    }


def rows(report: EvalReport) -> Iterator[dict[str, Any]]:
    """One object for each completion, as `--save` writes them."""
    right_at, first = report.config.eval.right_at, report.config.rewards.functions[0].name
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
                    "unextracted": _why(answer.extraction),
                    "score": score,
                    "right": None if score is None else score >= right_at,
                    "scores": answer.result.scores,
                    "unjudged": _why(answer.result.failures.get(first)),
                    "failed": answer.failure,
                    "finish_reason": answer.sample.finish_reason,
                    "tokens": answer.sample.length,
                    "spans": [[span.version, span.start, span.end] for span in answer.sample.spans],
                }


def _why(failure: RewardFailure | None) -> str:
    return "" if failure is None else f"{failure.kind}: {failure.reason}"

"""`async-grpo eval`: a policy against the held-out prompts of its configuration.

    Checkpoint --engine--+
                         +--> Exam --> Report --> facts (JSON), rows (--save)
    LiveRun ----HTTP-----+

The engine's settings, prompts, seeds and rewards are those of the configuration, so that the weights of a run's
evaluation give its figures again. It waits for completions and for their grades, for the next so long and no longer.
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

from async_grpo.app.evaluate.policy_source import Checkpoint, LiveRun, open_policy
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, validate
from async_grpo.data.jsonl import ALSO_TRAINED_ON
from async_grpo.data.tokenizer import load_tokenizer
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.evaluation.summary import INTERVALS
from async_grpo.rewards.base import RewardFailure
from async_grpo.utils.aio import cancel_and_wait
from rollout_server.context import EvalContext
from rollout_server.evaluation.eval_runner import EvalPlan, EvalResult, EvalRunner, PromptResult

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class EvalReport:
    """What came out. `versions`: policy version -> tokens that it wrote; a checkpoint's own is `version`."""

    config: RunConfig
    policy: Checkpoint | LiveRun
    plan: EvalPlan
    grades: EvalResult
    versions: dict[int, int]
    wall_s: float
    stated: dict[str, Any] = field(default_factory=dict)
    """What the run's summary.json says of this version, if it was measured there in the same way."""
    trained_on: int = 0
    """Prompts that were asked for and left out, because the run trains on them."""

    @property
    def agrees(self) -> bool | None:
        """Whether both accuracies are what the run has stated; None if it has stated nothing."""
        if not self.stated:
            return None
        measured = (self.grades.sampled_accuracy, self.grades.greedy_accuracy)
        return measured == (self.stated["sampled_accuracy"], self.stated["greedy_accuracy"])


def plan_of(config: RunConfig, *, prompts: int | None, samples: int | None, temperature: float | None) -> EvalPlan:
    """The configuration's, with what the user has changed. Raises ConfigError."""
    plan = EvalPlan.of(config)
    if temperature is not None and not 0 < temperature <= 10:
        raise ConfigError(
            f"--temperature {temperature:g} is not above 0 and at most 10. Accuracy at temperature 0 is reported as "
            "greedy, unless eval.greedy is false"
        )
    return EvalPlan(
        prompts or plan.prompts,
        samples or plan.samples,
        plan.temperature if temperature is None else temperature,
        plan.greedy,
    )


def with_prompts(config: RunConfig, prompts: int) -> RunConfig:
    """The configuration that holds out at least so many prompts. Raises ConfigError where all further ones would be
    prompts that the policy was trained on."""
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
    """Grade the policy; `on_answer(completions of all)` is called as they come. Raises what any part raises, and
    WaitTimeout if neither a completion nor a prompt's grades come for `patience_s`."""
    from async_grpo.app.evaluate.policy_source import open_hall

    check_length(config, policy)
    kept, config = config.eval.prompts, with_prompts(config, plan.prompts)
    async with (
        open_policy(config, policy, "eval", patience_s, say) as (sampler, tokenizer_folder),
        open_hall(config, sampler, load_tokenizer(tokenizer_folder), "eval", kept=kept) as hall,
    ):
        total = min(plan.prompts, len(hall.source.held_out())) * plan.completions
        started_s = time.monotonic()
        grades = await _grade(EvalProgress(total, on_answer), plan, hall, patience_s)
        wall_s = time.monotonic() - started_s
    versions, stated = _versions(grades.prompts), stated_by_the_run(config, policy, plan, len(grades.prompts))
    trained_on = hall.source.dropped.get(ALSO_TRAINED_ON, 0)
    return EvalReport(config, policy, plan, grades, versions, wall_s, stated, trained_on)


@dataclass
class EvalProgress:
    """Completions so far."""

    total: int
    on_answer: Callable[[int], None]
    done: int = 0
    graded: int = 0
    last_s: float = field(default_factory=time.monotonic)

    def answered(self) -> None:
        """One more is there."""
        self.done, self.last_s = self.done + 1, time.monotonic()
        self.on_answer(self.total)

    def judged(self, completions: int) -> None:
        """So many more have verdicts and answers."""
        self.graded, self.last_s = self.graded + completions, time.monotonic()


async def _grade(progress: EvalProgress, plan: EvalPlan, hall: EvalContext, patience_s: float) -> EvalResult:
    exam = EvalRunner(hall, progress.answered, progress.judged)
    grading = asyncio.create_task(exam.grade(plan))
    try:
        while not (await asyncio.wait([grading], timeout=LOOK_EVERY_S))[0]:
            if time.monotonic() - progress.last_s > patience_s:
                raise _waited_too_long(progress, exam, patience_s)
        return grading.result()
    finally:
        await cancel_and_wait(grading)


def _waited_too_long(progress: EvalProgress, exam: EvalRunner, patience_s: float) -> WaitTimeout:
    if exam.generating:
        awaited = f"the next completion ({progress.done} of {progress.total} are there)"
        return WaitTimeout(awaited, patience_s, "Raise --patience if completions take that long")
    awaited = f"the reward functions to judge completions ({progress.done} are there, {progress.graded} are judged)"
    return WaitTimeout(awaited, patience_s, "Raise --patience, or lower rewards.deadline_s or raise rewards.workers")


def _versions(papers: list[PromptResult]) -> dict[int, int]:
    tokens: Counter[int] = Counter()
    for paper in papers:
        for answer in (*paper.sampled, *paper.greedy):
            for span in answer.sample.spans:
                tokens[span.version] += span.end - span.start
    return dict(sorted(tokens.items()))


def stated_by_the_run(config: RunConfig, policy: Checkpoint | LiveRun, plan: EvalPlan, prompts: int) -> dict[str, Any]:
    """The entry of summary.json for this very version, measured as here, on as many `prompts`; {} if there is none."""
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
    """For `--json`."""
    grades, policy = report.grades, report.policy
    return {
        "run": report.config.name,
        "policy": _policy_facts(report, policy),
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


def _policy_facts(report: EvalReport, policy: Checkpoint | LiveRun) -> dict[str, Any]:
    if isinstance(policy, LiveRun):
        versions = {str(version): tokens for version, tokens in report.versions.items()}
        return {"live": list(policy.servers), "tokens_by_version": versions}
    return {"checkpoint": str(policy.path), "version": policy.version}


def rows(report: EvalReport) -> Iterator[dict[str, Any]]:
    """For `--save`: one completion each."""
    right_at, first = report.config.eval.right_at, report.config.rewards.functions[0].name
    for paper in report.grades.prompts:
        for how, answers in (("sampled", paper.sampled), ("greedy", paper.greedy)):
            for index, answer in enumerate(answers):
                score = answer.grade.score
                yield {
                    "prompt_index": paper.task.index,
                    "source": paper.source,
                    "how": how,
                    "sample": index,
                    "prompt": paper.task.prompt,
                    "answer": paper.task.answer,
                    "completion": answer.sample.text,
                    "extracted": answer.grade.answer,
                    "unextracted": _why(answer.extraction),
                    "score": score,
                    "right": None if score is None else score >= right_at,
                    "scores": answer.result.scores,
                    "unjudged": _why(answer.result.failures.get(first)),
                    "finish_reason": answer.sample.finish_reason,
                    "tokens": answer.sample.length,
                    "spans": [[span.version, span.start, span.end] for span in answer.sample.spans],
                }


def _why(failure: RewardFailure | None) -> str:
    return "" if failure is None else f"{failure.kind}: {failure.reason}"

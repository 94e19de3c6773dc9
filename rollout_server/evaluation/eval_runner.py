"""Completes and grades held-out prompts, for the milestones of a run and for `async-grpo eval`.

    held-out tasks --> sessions --> reward pool: judge, extract --> one PromptResult per prompt --> EvalMetrics

At most `rollout.max_concurrency` completions run at a time, in addition to those of training; the end of one starts the
next. Grading waits for the reward pool. Prompts, seeds and rewards follow from the configuration alone, so the same
weights give the same completions in both uses.

A completion whose workflow fails is logged, counted and left out, like one that could not be judged: one prompt that a
workflow cannot handle must not end the server, and with it the run. Only an engine error ends an evaluation.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, TypeVar

import structlog

from async_grpo.config import RunConfig
from async_grpo.errors import EngineError, SampleOverdue, WaitTimeout
from async_grpo.evaluation.estimators import GradedAnswer, GradedPrompt
from async_grpo.evaluation.summary import compute_metrics, compute_metrics_by_source
from async_grpo.rewards.base import RewardFailure, RewardInput, RewardResult
from async_grpo.utils.aio import root_cause
from async_grpo.wire import Group, Sample, Task
from async_grpo.wire.board import EvalMetrics
from rollout_server.context import EvalContext
from rollout_server.engines.base import sample_seed
from rollout_server.workflows.sample_rollout import SampleDeadline, WorkflowRunner
from rollout_server.workflows.session import SampleSession

T = TypeVar("T")

PROBE_GROUPS = 16
PROBE_SAMPLES = 4
SOURCE_FIELDS = ("data_source", "source", "file")
"""Metadata keys with the name of a task's data source, by priority."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """Size of an evaluation.

    The first `prompts` held-out prompts get `samples` completions each at `temperature`, and one more at temperature 0
    with `greedy`.
    """

    prompts: int
    samples: int
    temperature: float = 1.0
    greedy: bool = True

    @classmethod
    def from_config(cls, config: RunConfig) -> EvalPlan:
        """Plan of a run's milestones."""
        return cls(config.eval.prompts, config.eval.samples, greedy=config.eval.greedy)

    @property
    def completions_per_prompt(self) -> int:
        """Number of completions per prompt, sampled and greedy."""
        return self.samples + self.greedy


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """Error of a workflow that returned no completion."""

    reason: str


@dataclass(frozen=True, slots=True)
class GradedCompletion:
    """A completion with its grade.

    The answer is extracted from sampled completions only; `extraction` is the error if that failed. `failure` is the
    error of the workflow, "" if it succeeded; the sample of a failed workflow is empty.
    """

    sample: Sample
    result: RewardResult
    grade: GradedAnswer
    extraction: RewardFailure | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt with all its graded completions."""

    task: Task
    sampled: list[GradedCompletion]
    greedy: list[GradedCompletion]

    @property
    def source(self) -> str:
        """Name of the prompt's data source, "" if the data have none."""
        for field in SOURCE_FIELDS:
            if field in self.task.metadata:
                return self.task.metadata[field]
        return ""

    @property
    def graded(self) -> GradedPrompt:
        """The grades only, for `async_grpo.evaluation`."""
        return GradedPrompt(
            [completion.grade for completion in self.sampled],
            [completion.grade for completion in self.greedy],
            self.source,
        )


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Results of an evaluation.

    Accuracy is the mean score of the first reward function over the completions that it could judge (nan if none).
    """

    prompts: list[PromptResult]
    metrics: EvalMetrics
    by_source: dict[str, EvalMetrics]
    no_majority: str
    """Reason why maj@k is absent, "" if it is present."""
    completion_tokens_mean: float

    @property
    def extraction_failures(self) -> list[RewardFailure]:
        """Errors of sampled completions whose answer could not be extracted."""
        completions = [completion for prompt in self.prompts for completion in prompt.sampled]
        return [completion.extraction for completion in completions if completion.extraction is not None]

    @property
    def failures(self) -> list[str]:
        """Errors of failed workflows, sampled and greedy."""
        completions = [completion for prompt in self.prompts for completion in (*prompt.sampled, *prompt.greedy)]
        return [completion.failure for completion in completions if completion.failure]

    @property
    def sampled_accuracy(self) -> float:
        """mean@k: mean score of the sampled completions."""
        return math.nan if self.metrics.mean is None else self.metrics.mean.value

    @property
    def greedy_accuracy(self) -> float | None:
        """Mean score of the greedy completions; None if the plan has none."""
        if not any(prompt.greedy for prompt in self.prompts):
            return None
        return math.nan if self.metrics.greedy is None else self.metrics.greedy.value


class EvalRunner:
    """Completes and grades held-out prompts. If all completions must have one version, the caller pins it.

    `tokens`: tokens generated by all calls so far.
    """

    def __init__(
        self,
        context: EvalContext,
        on_completion: Callable[[], None] = lambda: None,
        on_prompt_graded: Callable[[int], None] = lambda _: None,
        *,
        deadline_s: float | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_completion` is called after every completion, `on_prompt_graded(count)` when all `count` completions of a
        prompt are graded. A completion that takes longer than `deadline_s`, measured by `clock_s`, fails."""
        self._context = context
        name = context.config.rollout.workflow
        self._workflow_runner = WorkflowRunner(context.workflow, name, SampleDeadline(deadline_s), clock_s)
        self._on_completion = on_completion
        self._on_prompt_graded = on_prompt_graded
        self._concurrency = asyncio.Semaphore(context.config.rollout.max_concurrency)
        self._reward_name = context.config.rewards.functions[0].name
        self._sessions = 0
        self.tokens = 0
        self.unfinished = 0
        """Number of completions that are queued or running."""

    async def grade_prompts(self, plan: EvalPlan) -> EvalResult:
        """Complete and grade the prompts of the plan. Raises EngineError, WaitTimeout (of the engine)."""
        tasks = self._context.source.held_out()[: plan.prompts]

        # Generate sampled and greedy completions together. A workflow that hangs for one prompt hangs in both, so one
        # after the other they would take two deadlines, which is longer than eval.timeout_s.
        parts = [self._grade_tasks(tasks, plan.samples, plan.temperature)]
        if plan.greedy:
            parts.append(self._grade_tasks(tasks, 1, 0.0))
        graded = await _run_all(parts)
        sampled = graded[0]
        greedy = graded[1] if plan.greedy else [[] for _ in tasks]
        prompts = [PromptResult(*results) for results in zip(tasks, sampled, greedy, strict=True)]

        lengths = [
            completion.sample.length for completions in sampled for completion in completions if not completion.failure
        ]
        no_majority = self._context.pool.explain_missing_extraction(self._reward_name)
        # The bootstrap takes seconds: in a thread it does not block the event loop.
        metrics, by_source = await asyncio.to_thread(
            self._compute_metrics, prompts, plan.samples, votes=no_majority is None
        )
        return EvalResult(
            prompts=prompts,
            metrics=metrics,
            by_source=by_source,
            no_majority=no_majority or "",
            completion_tokens_mean=sum(lengths) / len(lengths) if lengths else math.nan,
        )

    async def generate_probe(self, version: int) -> list[Group]:
        """Generate PROBE_GROUPS groups of PROBE_SAMPLES samples as for training, without rewards.

        Samples whose workflow failed are left out, and so are groups without any sample.
        """
        tasks = list(islice(cycle(self._context.source.held_out()), PROBE_GROUPS))
        started_s = time.time()
        temperature = self._context.config.sampling.temperature
        results = await _run_all(
            self._complete_task(task, PROBE_SAMPLES, temperature, f"probe{seq}") for seq, task in enumerate(tasks)
        )

        groups = []
        for seq, (task, completions) in enumerate(zip(tasks, results, strict=True)):
            samples = [sample for sample in completions if isinstance(sample, Sample)]
            if not samples:
                continue
            group = Group(
                seq=seq,
                attempt=0,
                task=task,
                samples=samples,
                server=self._context.name,
                admitted_version=version,
                started_s=started_s,
                finished_s=time.time(),
            )
            groups.append(group)
        return groups

    def _compute_metrics(
        self, prompts: Sequence[PromptResult], samples: int, *, votes: bool
    ) -> tuple[EvalMetrics, dict[str, EvalMetrics]]:
        """Compute the metrics of all prompts, and of each source."""
        graded = [prompt.graded for prompt in prompts]
        right_at = self._context.config.eval.right_at
        metrics = compute_metrics(graded, samples=samples, right_at=right_at, votes=votes)
        by_source = compute_metrics_by_source(graded, samples=samples, right_at=right_at, votes=votes)
        return metrics, by_source

    async def _grade_tasks(
        self, tasks: Sequence[Task], samples: int, temperature: float
    ) -> list[list[GradedCompletion]]:
        return await _run_all(self._grade_task(task, samples, temperature) for task in tasks)

    async def _grade_task(self, task: Task, count: int, temperature: float) -> list[GradedCompletion]:
        completions = await self._complete_task(task, count, temperature, f"eval{temperature:g}")
        samples = [sample for sample in completions if isinstance(sample, Sample)]
        pool = self._context.pool
        name = self._reward_name
        results = await pool.judge([RewardInput.from_sample(sample, task) for sample in samples])

        # Only maj@k needs the answers, and it is a metric of sampled completions.
        answers: list[str | RewardFailure | None] = [None] * len(samples)
        if temperature and pool.explain_missing_extraction(name) is None:
            answers = await pool.extract_answers(name, [sample.text for sample in samples])
        self._on_prompt_graded(count)

        graded = [
            _grade_completion(sample, result, result.scores.get(name), answer)
            for sample, result, answer in zip(samples, results, answers, strict=True)
        ]
        failed = [_failed_completion(failure) for failure in completions if isinstance(failure, SampleFailure)]
        return graded + failed

    async def _complete_task(
        self, task: Task, count: int, temperature: float, purpose: str
    ) -> list[Sample | SampleFailure]:
        return await _run_all(self._complete_sample(task, index, temperature, purpose) for index in range(count))

    async def _complete_sample(
        self, task: Task, index: int, temperature: float, purpose: str
    ) -> Sample | SampleFailure:
        self.unfinished += 1
        try:
            async with self._concurrency:
                session = self._open_session(task, index, temperature, purpose)
                result = await self._run_workflow(task, session)
        finally:
            self.unfinished -= 1

        if isinstance(result, SampleFailure):
            log.warning(
                "a held-out completion failed", task=task.index, sample=index, purpose=purpose, why=result.reason
            )
        else:
            self.tokens += len(result.token_ids())
        self._on_completion()
        return result

    async def _run_workflow(self, task: Task, session: SampleSession) -> Sample | SampleFailure:
        """Return the sample, or the workflow's error. Raises EngineError, WaitTimeout if the engine failed."""
        try:
            sample = await self._workflow_runner.generate_sample(task, session)
            sample.validate()
        except SampleOverdue as error:
            # Before WaitTimeout, of which it is a subclass: the workflow was too slow, and the engine is alive.
            return SampleFailure(f"SampleOverdue: {error}")
        except (EngineError, WaitTimeout):
            raise
        except Exception as error:  # a workflow may raise anything
            return SampleFailure(f"{type(error).__name__}: {error}")
        return sample

    def _open_session(self, task: Task, index: int, temperature: float, purpose: str) -> SampleSession:
        # The number makes request IDs unique: the same sample may be generated again at a later version.
        self._sessions += 1
        return SampleSession(
            self._context.engine,
            f"{purpose}-{task.index}-{index}-{self._sessions}",
            task.prompt_ids(),
            seed=sample_seed(self._context.config.seed, purpose, task.index, index),
            temperature=temperature,
            max_tokens=self._context.config.sampling.max_tokens,
            interruptible=False,
            index=index,
        )


def _grade_completion(
    sample: Sample, result: RewardResult, score: float | None, answer: str | RewardFailure | None
) -> GradedCompletion:
    """Combine a completion with its score and its answer; `answer` is a RewardFailure if the extraction failed."""
    if isinstance(answer, RewardFailure):
        return GradedCompletion(sample, result, GradedAnswer(score, unextracted=True), answer)
    return GradedCompletion(sample, result, GradedAnswer(score, answer))


def _failed_completion(failure: SampleFailure) -> GradedCompletion:
    empty = Sample(tokens=b"", logprobs=b"", spans=[], finish_reason="")
    return GradedCompletion(empty, RewardResult(), GradedAnswer(None, failed=True), failure=failure.reason)


async def _run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results in order.

    The first error cancels the others and is raised without an ExceptionGroup.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise root_cause(errors) from None
    return [task.result() for task in tasks]

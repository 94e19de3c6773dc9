"""Completes and grades held-out prompts, for the milestones of a run and for `async-grpo eval`.

    held-out tasks --> sessions --> reward pool: judge, extract --> PromptResult a prompt --> EvalMetrics

Completions wait for one of `rollout.max_concurrency` places, which are separate from those of training; a completion
that ends frees its place. Grading waits for the reward pool. Prompts, seeds and rewards follow from the configuration
alone, so the same weights give the same completions in both.

A completion whose workflow fails is logged, counted and left out, as one that could not be judged: one prompt that a
workflow cannot handle must not end the server, and with it the run. Only a fault of the engine ends an evaluation.
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
from async_grpo.evaluation.summary import eval_metrics, metrics_by_source
from async_grpo.rewards.base import RewardFailure, RewardInput, RewardResult
from async_grpo.utils.aio import root_cause
from async_grpo.wire import Group, Sample, Task
from async_grpo.wire.board import EvalMetrics
from rollout_server.context import EvalContext
from rollout_server.engines.base import sample_seed
from rollout_server.workflows.sample_rollout import SampleDeadline, SampleMaker
from rollout_server.workflows.session import SampleSession

T = TypeVar("T")

PROBE_GROUPS = 16
PROBE_SAMPLES = 4
SOURCE_FIELDS = ("data_source", "source", "file")
"""Metadata keys of a task: the first one that a task has says where it is from."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The number of prompts and completions: the first `prompts` held-out ones, each with `samples` completions at
    `temperature` and, with `greedy`, one more at temperature 0."""

    prompts: int
    samples: int
    temperature: float = 1.0
    greedy: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> EvalPlan:
        """The plan of a run's milestones."""
        return cls(config.eval.prompts, config.eval.samples, greedy=config.eval.greedy)

    @property
    def completions(self) -> int:
        """Number of completions of one prompt."""
        return self.samples + self.greedy


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A completion that the workflow did not make, and its error."""

    reason: str


@dataclass(frozen=True, slots=True)
class GradedCompletion:
    """A completion with its grade. The answer is extracted from sampled completions only; `extraction` says why that
    failed. `failure` is the error of the workflow, "" if there is none; the sample of a failed workflow is empty."""

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
        """Name of the data source of the prompt, "" if the data do not say."""
        return next((self.task.metadata[field] for field in SOURCE_FIELDS if field in self.task.metadata), "")

    @property
    def graded(self) -> GradedPrompt:
        """The grades, in the form that `async_grpo.evaluation` takes."""
        return GradedPrompt([a.grade for a in self.sampled], [a.grade for a in self.greedy], self.source)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """All results of an evaluation. Accuracy is the mean score of the first reward function over the completions that
    it could judge (nan if none)."""

    prompts: list[PromptResult]
    figures: EvalMetrics
    by_source: dict[str, EvalMetrics]
    no_majority: str
    """Why there is no maj@k, "" if there is."""
    completion_tokens_mean: float

    @property
    def extraction_failures(self) -> list[RewardFailure]:
        """The failures of sampled completions whose answer could not be extracted."""
        answers = (answer for prompt in self.prompts for answer in prompt.sampled)
        return [answer.extraction for answer in answers if answer.extraction is not None]

    @property
    def failures(self) -> list[str]:
        """The errors of workflows that failed, sampled and greedy."""
        answers = (answer for prompt in self.prompts for answer in (*prompt.sampled, *prompt.greedy))
        return [answer.failure for answer in answers if answer.failure]

    @property
    def sampled_accuracy(self) -> float:
        """mean@k: mean score of the sampled completions."""
        return math.nan if self.figures.mean is None else self.figures.mean.value

    @property
    def greedy_accuracy(self) -> float | None:
        """Mean score of the greedy completions; None if none were asked for."""
        if not any(prompt.greedy for prompt in self.prompts):
            return None
        return math.nan if self.figures.greedy is None else self.figures.greedy.value


class EvalRunner:
    """Completes and grades held-out prompts. If all completions must be of one version, the caller holds the pin.

    `tokens`: generated so far, in all calls.
    """

    def __init__(
        self,
        context: EvalContext,
        on_answer: Callable[[], None] = lambda: None,
        on_grades: Callable[[int], None] = lambda _: None,
        *,
        deadline_s: float | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_answer` is called after every completion, `on_grades(count)` when all `count` completions of a prompt are
        graded. A completion that takes longer than `deadline_s`, measured by `clock_s`, has failed."""
        self._context = context
        name = context.config.rollout.workflow
        self._maker = SampleMaker(context.workflow, name, SampleDeadline(deadline_s), clock_s)
        self._on_answer = on_answer
        self._on_grades = on_grades
        self._room = asyncio.Semaphore(context.config.rollout.max_concurrency)
        self._judged_by = context.config.rewards.functions[0].name
        self._sessions = 0
        self.tokens = 0
        self.generating = 0
        """Completions that are waiting or under way."""

    async def grade(self, plan: EvalPlan) -> EvalResult:
        """Complete and grade the prompts of the plan. Raises EngineError, WaitTimeout (of the engine)."""
        tasks = self._context.source.held_out()[: plan.prompts]

        # Sampled and greedy completions together: a workflow that hangs for one prompt hangs in both, and one after the
        # other they would wait for the deadline twice, which is more than an evaluation may take.
        parts = [self._grade_all(tasks, plan.samples, plan.temperature)]
        if plan.greedy:
            parts.append(self._grade_all(tasks, 1, 0.0))
        sampled, *rest = await _all(parts)
        greedy = rest[0] if rest else [[] for _ in tasks]

        prompts = [PromptResult(*results) for results in zip(tasks, sampled, greedy, strict=True)]
        lengths = [answer.sample.length for answers in sampled for answer in answers if not answer.failure]
        no_majority = self._context.pool.reason_without_extraction(self._judged_by)
        figures, by_source = await asyncio.to_thread(self._statistics, prompts, plan.samples, votes=not no_majority)
        return EvalResult(
            prompts, figures, by_source, no_majority, sum(lengths) / len(lengths) if lengths else math.nan
        )

    async def probe(self, version: int) -> list[Group]:
        """PROBE_GROUPS groups of PROBE_SAMPLES samples, sampled as for training, without rewards; without the samples
        whose workflow failed, and without a group of which nothing is left."""
        tasks = list(islice(cycle(self._context.source.held_out()), PROBE_GROUPS))
        started_s, temperature = time.time(), self._context.config.sampling.temperature
        makes = (self._complete(task, PROBE_SAMPLES, temperature, f"probe{seq}") for seq, task in enumerate(tasks))
        groups = []
        for seq, (task, made) in enumerate(zip(tasks, await _all(makes), strict=True)):
            samples = [sample for sample in made if isinstance(sample, Sample)]
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

    def _statistics(
        self, prompts: Sequence[PromptResult], samples: int, *, votes: bool
    ) -> tuple[EvalMetrics, dict[str, EvalMetrics]]:
        """Metrics of all prompts, and by source. Runs in a thread, so that it does not hold the event loop."""
        graded, right_at = [prompt.graded for prompt in prompts], self._context.config.eval.right_at
        return (
            eval_metrics(graded, samples=samples, right_at=right_at, votes=votes),
            metrics_by_source(graded, samples=samples, right_at=right_at, votes=votes),
        )

    async def _grade_all(self, tasks: Sequence[Task], samples: int, temperature: float) -> list[list[GradedCompletion]]:
        return await _all(self._grade_prompt(task, samples, temperature) for task in tasks)

    async def _grade_prompt(self, task: Task, count: int, temperature: float) -> list[GradedCompletion]:
        made = await self._complete(task, count, temperature, f"eval{temperature:g}")
        samples = [sample for sample in made if isinstance(sample, Sample)]
        pool, name = self._context.pool, self._judged_by
        results = await pool.judge([RewardInput.from_sample(sample, task) for sample in samples])
        found: list[str | RewardFailure | None] = [None] * len(samples)
        if temperature and not pool.reason_without_extraction(name):
            found = await pool.extract_answers(name, [sample.text for sample in samples])
        self._on_grades(count)
        scores = [result.scores.get(name) for result in results]
        graded = [_graded(*parts) for parts in zip(samples, results, scores, found, strict=True)]
        return graded + [_failed(failure) for failure in made if isinstance(failure, SampleFailure)]

    async def _complete(self, task: Task, count: int, temperature: float, purpose: str) -> list[Sample | SampleFailure]:
        return await _all(self._sample(task, index, temperature, purpose) for index in range(count))

    async def _sample(self, task: Task, index: int, temperature: float, purpose: str) -> Sample | SampleFailure:
        self.generating += 1
        try:
            async with self._room:
                session = self._session(task, index, temperature, purpose)
                result = await self._run_workflow(task, session)
        finally:
            self.generating -= 1
        if isinstance(result, SampleFailure):
            what = {"task": task.index, "sample": index, "purpose": purpose}
            log.warning("a held-out completion failed", **what, why=result.reason)
        else:
            self.tokens += len(result.token_ids())
        self._on_answer()
        return result

    async def _run_workflow(self, task: Task, session: SampleSession) -> Sample | SampleFailure:
        """The sample, or the error of the workflow. Raises EngineError, WaitTimeout: the engine has failed."""
        try:
            sample = await self._maker.make(task, session)
            sample.validate()
        except SampleOverdue as error:
            return SampleFailure(f"SampleOverdue: {error}")
        except (EngineError, WaitTimeout):
            raise
        except Exception as error:  # a workflow may raise anything
            return SampleFailure(f"{type(error).__name__}: {error}")
        return sample

    def _session(self, task: Task, index: int, temperature: float, purpose: str) -> SampleSession:
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


def _graded(
    sample: Sample, result: RewardResult, score: float | None, found: str | RewardFailure | None
) -> GradedCompletion:
    """`found`: the extracted answer, None if there is none, or why the extraction failed."""
    if isinstance(found, RewardFailure):
        return GradedCompletion(sample, result, GradedAnswer(score, unextracted=True), found)
    return GradedCompletion(sample, result, GradedAnswer(score, found))


def _failed(failure: SampleFailure) -> GradedCompletion:
    empty = Sample(tokens=b"", logprobs=b"", spans=[], finish_reason="")
    return GradedCompletion(empty, RewardResult(), GradedAnswer(None, failed=True), failure=failure.reason)


async def _all(makes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first failure cancels the rest and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make) for make in makes]
    except ExceptionGroup as errors:
        raise root_cause(errors) from None
    return [task.result() for task in tasks]

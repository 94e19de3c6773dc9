"""Held-out prompts, completed and graded: of a run's milestones, and of `async-grpo eval`.

    held-out tasks --> sessions --> reward pool: judge, extract --> Paper a prompt --> Figures

Completions wait for one of `rollout.max_concurrency` places of their own, beside those of training (another that ends
frees it); grading waits for the reward pool. Prompts, seeds and rewards follow from the configuration alone, so that
the same weights give the same completions in both.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Protocol, TypeVar

from async_grpo.config import RunConfig
from async_grpo.data.base import TaskSource
from async_grpo.evaluation.estimators import GradedAnswer, GradedPrompt
from async_grpo.evaluation.summary import eval_metrics, figures_by_source
from async_grpo.rewards.base import RewardFailure, RewardInput, RewardResult
from async_grpo.rewards.pool import RewardPool
from async_grpo.utils.aio import root_cause
from async_grpo.wire import Group, Sample, Task
from async_grpo.wire.board import EvalMetrics
from rollout_server.engines.base import Sampler, sample_seed
from rollout_server.workflows import Workflow
from rollout_server.workflows.sample_rollout import SampleDeadline, SampleMaker
from rollout_server.workflows.session import SampleSession

T = TypeVar("T")

PROBE_GROUPS = 16
PROBE_SAMPLES = 4
SOURCE_FIELDS = ("data_source", "source", "file")
"""Metadata of a task, the first of which that it has says where the task is from."""


class EvalContext(Protocol):
    """What an runner needs; a rollout server's context has it."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> Sampler: ...
    @property
    def pool(self) -> RewardPool: ...
    @property
    def workflow(self) -> Workflow: ...
    @property
    def source(self) -> TaskSource: ...


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """How much is asked. Other `prompts` than the configuration's: the first of the same ones."""

    prompts: int
    samples: int
    temperature: float = 1.0
    greedy: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> EvalPlan:
        """What a run asks at its milestones."""
        return cls(config.eval.prompts, config.eval.samples, greedy=config.eval.greedy)

    @property
    def completions(self) -> int:
        """Of one prompt."""
        return self.samples + self.greedy


@dataclass(frozen=True, slots=True)
class GradedCompletion:
    """A completion, graded; of a greedy one nobody extracts the answer. `extraction`: why that failed."""

    sample: Sample
    verdict: RewardResult
    grade: GradedAnswer
    extraction: RewardFailure | None = None


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt with all its completions."""

    task: Task
    sampled: list[GradedCompletion]
    greedy: list[GradedCompletion]

    @property
    def source(self) -> str:
        """Where the prompt is from, "" if the data do not say."""
        return next((self.task.metadata[field] for field in SOURCE_FIELDS if field in self.task.metadata), "")

    @property
    def graded(self) -> GradedPrompt:
        """As the statistics take it."""
        return GradedPrompt([a.grade for a in self.sampled], [a.grade for a in self.greedy], self.source)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Accuracy is the mean score of the first reward function over the completions it could judge
    (nan if none)."""

    papers: list[PromptResult]
    figures: EvalMetrics
    by_source: dict[str, EvalMetrics]
    no_majority: str
    """Why there is no maj@k, "" if there is."""
    completion_tokens_mean: float

    @property
    def extraction_failures(self) -> list[RewardFailure]:
        """Of all sampled completions in which looking for the answer failed."""
        answers = (answer for paper in self.papers for answer in paper.sampled)
        return [answer.extraction for answer in answers if answer.extraction is not None]

    @property
    def sampled_accuracy(self) -> float:
        """mean@k."""
        return math.nan if self.figures.mean is None else self.figures.mean.value

    @property
    def greedy_accuracy(self) -> float | None:
        """None if it was not asked for."""
        if not any(paper.greedy for paper in self.papers):
            return None
        return math.nan if self.figures.greedy is None else self.figures.greedy.value


class EvalRunner:
    """For completions of one version only, the caller holds the pin."""

    def __init__(
        self,
        hall: EvalContext,
        on_answer: Callable[[], None] = lambda: None,
        on_grades: Callable[[int], None] = lambda _: None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """`on_answer` is called after every completion, `on_grades` with so many of them when all of a prompt are
        graded. A completion that is not there by `deadline_s` ends the runner with SampleOverdue."""
        self._context = hall
        self._maker = SampleMaker(hall.workflow, hall.config.rollout.workflow, SampleDeadline(deadline_s))
        self._on_answer = on_answer
        self._on_grades = on_grades
        self._room = asyncio.Semaphore(hall.config.rollout.max_concurrency)
        self._judged_by = hall.config.rewards.functions[0].name
        self.tokens = 0
        self.generating = 0
        """Completions that are asked for and not there yet."""

    async def grade(self, plan: EvalPlan) -> EvalResult:
        """mean@k and the like, and greedy if it is asked for."""
        tasks = self._context.source.held_out()[: plan.prompts]
        sampled = await self._answer_all(tasks, plan.samples, plan.temperature)
        greedy = await self._answer_all(tasks, 1, 0.0) if plan.greedy else [[] for _ in tasks]
        papers = [PromptResult(*parts) for parts in zip(tasks, sampled, greedy, strict=True)]
        lengths = [answer.sample.length for answers in sampled for answer in answers]
        no_majority = self._context.pool.why_no_answers(self._judged_by)
        figures, by_source = await asyncio.to_thread(self._figures, papers, plan.samples, votes=not no_majority)
        return EvalResult(papers, figures, by_source, no_majority, sum(lengths) / len(lengths) if lengths else math.nan)

    async def probe(self, version: int) -> list[Group]:
        """Groups sampled as for training, with behaviour log-probabilities, without rewards."""
        tasks = list(islice(cycle(self._context.source.held_out()), PROBE_GROUPS))
        started_s, temperature = time.time(), self._context.config.sampling.temperature
        makes = (self._complete(task, PROBE_SAMPLES, temperature, f"probe{seq}") for seq, task in enumerate(tasks))
        return [
            Group(
                seq=seq,
                attempt=0,
                task=task,
                samples=samples,
                server=self._context.name,
                admitted_version=version,
                started_s=started_s,
                finished_s=time.time(),
            )
            for seq, (task, samples) in enumerate(zip(tasks, await _all(makes), strict=True))
        ]

    def _figures(
        self, papers: Sequence[PromptResult], samples: int, *, votes: bool
    ) -> tuple[EvalMetrics, dict[str, EvalMetrics]]:
        """A moment of arithmetic that must not hold the event loop."""
        graded, right_at = [paper.graded for paper in papers], self._context.config.eval.right_at
        return (
            eval_metrics(graded, samples=samples, right_at=right_at, votes=votes),
            figures_by_source(graded, samples=samples, right_at=right_at, votes=votes),
        )

    async def _answer_all(
        self, tasks: Sequence[Task], samples: int, temperature: float
    ) -> list[list[GradedCompletion]]:
        return await _all(self._answer(task, samples, temperature) for task in tasks)

    async def _answer(self, task: Task, count: int, temperature: float) -> list[GradedCompletion]:
        samples = await self._complete(task, count, temperature, f"eval{temperature:g}")
        pool, name = self._context.pool, self._judged_by
        verdicts = await pool.judge([RewardInput.of(sample, task) for sample in samples])
        found: list[str | RewardFailure | None] = [None] * count
        if temperature and not pool.why_no_answers(name):
            found = await pool.extract(name, [sample.text for sample in samples])
        self._on_grades(count)
        scores = [verdict.scores.get(name) for verdict in verdicts]
        return [_answer(*parts) for parts in zip(samples, verdicts, scores, found, strict=True)]

    async def _complete(self, task: Task, count: int, temperature: float, purpose: str) -> list[Sample]:
        return await _all(self._sample(task, index, temperature, purpose) for index in range(count))

    async def _sample(self, task: Task, index: int, temperature: float, purpose: str) -> Sample:
        self.generating += 1
        try:
            async with self._room:
                session = self._session(task, index, temperature, purpose)
                sample = await self._maker.make(task, session)
        finally:
            self.generating -= 1
        self.tokens += len(sample.token_ids())
        self._on_answer()
        return sample

    def _session(self, task: Task, index: int, temperature: float, purpose: str) -> SampleSession:
        return SampleSession(
            self._context.engine,
            f"{purpose}-{task.index}-{index}-{self.tokens}",
            task.prompt_ids(),
            seed=sample_seed(self._context.config.seed, purpose, task.index, index),
            temperature=temperature,
            max_tokens=self._context.config.sampling.max_tokens,
            interruptible=False,
            index=index,
        )


def _answer(
    sample: Sample, verdict: RewardResult, score: float | None, found: str | RewardFailure | None
) -> GradedCompletion:
    """`found`: what the extraction gave."""
    if isinstance(found, RewardFailure):
        return GradedCompletion(sample, verdict, GradedAnswer(score, unextracted=True), found)
    return GradedCompletion(sample, verdict, GradedAnswer(score, found))


async def _all(makes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first failure cancels the rest and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make) for make in makes]
    except ExceptionGroup as errors:
        raise root_cause(errors) from None
    return [task.result() for task in tasks]

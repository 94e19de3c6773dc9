"""Held-out prompts, completed and graded by the version that the engine has now."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, TypeVar

from async_grpo.rewards.item import Item
from async_grpo.wire import Group, Sample, Task
from rollout_server.cast import Cast
from rollout_server.failures import first_cause
from rollout_server.seeds import sample_seed
from rollout_server.session import Session

T = TypeVar("T")

PROBE_GROUPS = 16
PROBE_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Grades:
    """Accuracy is the mean score of the first reward function over the completions it could judge
    (nan if none)."""

    prompts: int
    sampled_accuracy: float
    greedy_accuracy: float | None
    completion_tokens_mean: float


class Exam:
    """The caller holds the pin, so that all tokens come from one version."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._room = asyncio.Semaphore(cast.config.rollout.max_concurrency)
        self.tokens = 0

    async def grade(self) -> Grades:
        """mean@k at temperature 1, and greedy if it is asked for."""
        config, tasks = self._cast.config.eval, self._cast.source.held_out()
        sampled, scores = await self._grade_all(tasks, config.samples, 1.0)
        greedy = (await self._grade_all(tasks, 1, 0.0))[1] if config.greedy else None
        return Grades(
            prompts=len(tasks),
            sampled_accuracy=_mean(scores),
            greedy_accuracy=None if greedy is None else _mean(greedy),
            completion_tokens_mean=_mean([len(sample.token_ids()) for sample in sampled]),
        )

    async def probe(self, version: int) -> list[Group]:
        """Groups sampled as for training, with behaviour log-probabilities, without rewards."""
        tasks = list(islice(cycle(self._cast.source.held_out()), PROBE_GROUPS))
        started_s, temperature = time.time(), self._cast.config.sampling.temperature
        makes = (self._complete(task, PROBE_SAMPLES, temperature, f"probe{seq}") for seq, task in enumerate(tasks))
        return [
            Group(
                seq=seq,
                attempt=0,
                task=task,
                samples=samples,
                server=self._cast.name,
                admitted_version=version,
                started_s=started_s,
                finished_s=time.time(),
            )
            for seq, (task, samples) in enumerate(zip(tasks, await _all(makes), strict=True))
        ]

    async def _grade_all(
        self, tasks: Sequence[Task], samples: int, temperature: float
    ) -> tuple[list[Sample], list[float]]:
        graded = await _all(self._grade(task, samples, temperature) for task in tasks)
        return [sample for made, _ in graded for sample in made], [score for _, scores in graded for score in scores]

    async def _grade(self, task: Task, count: int, temperature: float) -> tuple[list[Sample], list[float]]:
        samples = await self._complete(task, count, temperature, f"eval{temperature:g}")
        verdicts = await self._cast.pool.judge(
            [Item(sample.text, task.answer, task.prompt, task.metadata) for sample in samples]
        )
        first = self._cast.config.rewards.functions[0].name
        return samples, [verdict.scores[first] for verdict in verdicts if first in verdict.scores]

    async def _complete(self, task: Task, count: int, temperature: float, purpose: str) -> list[Sample]:
        return await _all(self._sample(task, index, temperature, purpose) for index in range(count))

    async def _sample(self, task: Task, index: int, temperature: float, purpose: str) -> Sample:
        async with self._room:
            session = Session(
                self._cast.engine,
                f"{purpose}-{task.index}-{index}-{self.tokens}",
                task.prompt_ids(),
                seed=sample_seed(self._cast.config.seed, purpose, task.index, index),
                temperature=temperature,
                max_tokens=self._cast.config.sampling.max_tokens,
                interruptible=False,
            )
            sample = await self._cast.workflow.run(task, session)
            self.tokens += len(sample.token_ids())
            return sample


async def _all(makes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first failure cancels the rest and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make) for make in makes]
    except ExceptionGroup as errors:
        raise first_cause(errors) from None
    return [task.result() for task in tasks]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan

"""Generated arithmetic problems as tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from async_grpo.config import RunConfig
from async_grpo.data.arithmetic import Problem, ProblemSet
from async_grpo.data.source import Tokenizer, make_task
from async_grpo.errors import DataError
from async_grpo.wire import Task

STREAM = "train"
"""The stream that GRPO trains on; the warm-up has another one. None contains a held-out problem."""


class ArithmeticSource:
    """Problem i of the stream is task i. Raises DataError if fewer problems are held out than wanted."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = config.data.template
        self._problems = ProblemSet(config.data.arithmetic, config.seed)
        if config.eval.prompts > len(self._problems.held_out):
            raise DataError(
                f"eval.prompts ({config.eval.prompts}) exceeds data.arithmetic.held_out "
                f"({len(self._problems.held_out)}). Raise data.arithmetic.held_out or lower eval.prompts"
            )
        held_out = self._problems.held_out[: config.eval.prompts]
        self._held_out = [self._task(index, problem) for index, problem in enumerate(held_out)]

    @property
    def dropped(self) -> Mapping[str, int]:
        """Nothing: every generated problem can be used."""
        return {}

    def task(self, index: int) -> Task:
        """The task at this position of the stream."""
        return self._task(index, self._problems.problem(STREAM, index))

    def held_out(self) -> list[Task]:
        """The tasks for evaluation."""
        return self._held_out

    def _task(self, index: int, problem: Problem) -> Task:
        prompt = self._template.replace("{prompt}", problem.prompt)
        return make_task(index, prompt, self._tokenizer.encode(prompt), problem.answer)


def arithmetic_prompts(config: RunConfig) -> Iterator[str]:
    """The prompts of the stream, without end."""
    problems = ProblemSet(config.data.arithmetic, config.seed)
    return (config.data.template.replace("{prompt}", problems.problem(STREAM, index).prompt) for index in count())

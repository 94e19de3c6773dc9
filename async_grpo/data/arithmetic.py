"""The quickstart's tasks: generated additions such as `478+356=`.

Every problem is a pure function of (configuration, seed, stream, index).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from async_grpo.config import RunConfig
from async_grpo.config.model import ArithmeticTaskConfig
from async_grpo.data.base import make_task, prompt_limit, prompt_limit_reason
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.errors import DataError
from async_grpo.wire import Task

STREAM = "train"
"""Name of the stream that GRPO trains on. The warm-up uses another. No stream contains a held-out problem."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The addition left + right."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The question, without the template."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The reference answer: this text in <answer> tags earns reward 1."""
        return str(self.left + self.right)


class ProblemSet:
    """The problems of one seed: a held-out set, and any number of endless streams without held-out problems.

    >>> problems = ProblemSet(ArithmeticTaskConfig(), seed=1)
    >>> problems.problem("train", 0) in problems.held_out
    False
    """

    def __init__(self, config: ArithmeticTaskConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self.held_out = self._draw_held_out()
        self._excluded = frozenset(self.held_out)

    def problem(self, stream: str, index: int) -> Problem:
        """Return problem `index` (>= 0) of a stream. Deterministic, and never a held-out problem."""
        rng = random.Random(f"{self._seed}/{stream}/{index}")
        while True:
            problem = self._draw(rng)
            if problem not in self._excluded:
                return problem

    def _draw_held_out(self) -> tuple[Problem, ...]:
        rng = random.Random(f"{self._seed}/held out")
        problems: dict[Problem, None] = {}  # a set in order of drawing
        while len(problems) < self._config.held_out:
            problems[self._draw(rng)] = None
        return tuple(problems)

    def _draw(self, rng: random.Random) -> Problem:
        smallest = 10 ** (self._config.digits - 1)
        largest = 10**self._config.digits - 1
        return Problem(rng.randint(smallest, largest), rng.randint(smallest, largest))


class ArithmeticSource:
    """Generated problems as tasks: problem i of the stream is task i.

    Raises DataError for a prompt that is too long, usually at construction, because the held-out problems have as many
    digits as all others.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = config.data.template
        self._problems = ProblemSet(config.data.arithmetic, config.seed)
        held_out = self._problems.held_out[: config.eval.prompts]
        self._held_out = [self._task(index, problem) for index, problem in enumerate(held_out)]

    @property
    def dropped(self) -> Mapping[str, int]:
        """Always empty: every generated problem is usable."""
        return {}

    def task(self, index: int) -> Task:
        """Return the task at position `index` of the stream."""
        return self._task(index, self._problems.problem(STREAM, index))

    def held_out(self) -> list[Task]:
        """Return the tasks for evaluation."""
        return self._held_out

    def _task(self, index: int, problem: Problem) -> Task:
        prompt = self._template.replace("{prompt}", problem.prompt)
        tokens = self._tokenizer.encode(prompt)
        self._check_fits(prompt, len(tokens))
        return make_task(index, prompt, tokens, problem.answer)

    def _check_fits(self, prompt: str, tokens: int) -> None:
        limit = prompt_limit(self._config)
        if tokens > limit:
            raise DataError(
                f"the prompt {prompt[:80]!r} has {tokens} tokens, but the limit is {limit}: "
                f"{prompt_limit_reason(self._config)}. Shorten data.template, or raise data.max_prompt_tokens or "
                f"{self._config.rollout.limits.length_key}"
            )


def arithmetic_prompts(config: RunConfig) -> Iterator[str]:
    """Yield the prompts of the training stream, with the template, without end."""
    problems = ProblemSet(config.data.arithmetic, config.seed)
    for index in count():
        yield config.data.template.replace("{prompt}", problems.problem(STREAM, index).prompt)

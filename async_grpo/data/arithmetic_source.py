"""Generated arithmetic problems as tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from async_grpo.config import RunConfig
from async_grpo.data.arithmetic import Problem, ProblemSet
from async_grpo.data.source import Tokenizer, make_task, prompt_limit
from async_grpo.errors import DataError
from async_grpo.wire import Task

STREAM = "train"
"""The stream that GRPO trains on; the warm-up has another one. None contains a held-out problem."""


class ArithmeticSource:
    """Problem i of the stream is task i.

    Raises DataError for a prompt without room for a whole completion behind it. The held-out ones
    tell at construction: every problem has as many digits.
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
        tokens = self._tokenizer.encode(prompt)
        self._check_fits(prompt, len(tokens))
        return make_task(index, prompt, tokens, problem.answer)

    def _check_fits(self, prompt: str, tokens: int) -> None:
        if tokens <= (limit := prompt_limit(self._config)):
            return
        data, vllm = self._config.data, self._config.rollout.vllm
        raise DataError(
            f"the prompt {prompt[:80]!r} takes {tokens} tokens, but {limit} is the most: data.max_prompt_tokens is "
            f"{data.max_prompt_tokens}, and rollout.vllm.max_model_len ({vllm.max_model_len}) less "
            f"sampling.max_tokens ({self._config.sampling.max_tokens}) must hold it. "
            "Shorten data.template, or raise data.max_prompt_tokens or rollout.vllm.max_model_len"
        )


def arithmetic_prompts(config: RunConfig) -> Iterator[str]:
    """The prompts of the stream, without end."""
    problems = ProblemSet(config.data.arithmetic, config.seed)
    return (config.data.template.replace("{prompt}", problems.problem(STREAM, index).prompt) for index in count())

"""The batch of every round: lengths as GSM8K has them, drawn by seed, and a model to train on them.

A prompt has 50 to 200 tokens and G completions, whose lengths are log-normal: most are short, a few very long, and a
micro-batch that is padded to its longest pays for them. The tokens are random, for speed does not depend on them.
None is special: the Hugging Face model gives the embedding of its padding token no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_grpo.config.data import DataConfig
from async_grpo.data.fields import Rejections
from async_grpo.data.jsonl import usable_rows
from async_grpo.wire import Batch, Group, Sample, Task, VersionSpan, logprobs_to_bytes, tokens_to_bytes

_SPECIAL = 3
"""Tokens of `make_random_model` that stand for no text: the first ones."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How long prompts and completions are, in tokens, and how many there are in a batch."""

    groups: int = 8
    group_size: int = 8
    prompt: tuple[int, int] = (50, 200)
    """Evenly between these, both included; not asked where the prompts are given."""
    median: int = 150
    sigma: float = 0.8
    """Standard deviation of the logarithm: the longest of 64 completions has about seven times the median."""
    longest: int = 1024
    """The few that would be longer end here, as at max_tokens."""
    seed: int = 1

    def __str__(self) -> str:
        return (
            f"{self.groups} groups of {self.group_size}, completions lognormal, median {self.median}, "
            f"sigma {self.sigma:g}, at most {self.longest} tokens"
        )


def make_batch(mix: Mix, vocab_size: int, prompts: Sequence[list[int]] = ()) -> Batch:
    """The same for the same arguments. `prompts`: real ones as token ids, drawn from; else random ones."""
    random = np.random.default_rng(mix.seed)
    groups = []
    for index in range(mix.groups):
        prompt = (
            np.asarray(prompts[int(random.integers(len(prompts)))])
            if prompts
            else _random_prompt(mix, vocab_size, random)
        )
        task = Task(index=index, prompt=f"bench {index}", prompt_tokens=tokens_to_bytes(prompt), answer="")
        samples = [_sample(mix, vocab_size, random) for _ in range(mix.group_size)]
        groups.append(Group(seq=index, attempt=1, task=task, samples=samples))
    return Batch(epoch=1, version=0, groups=groups)


def lengths_of(mix: Mix, vocab_size: int) -> list[int]:
    """Positions that the network reads, of each sequence of the batch."""
    groups = make_batch(mix, vocab_size).groups
    return [len(g.task.prompt_ids()) + sample.length - 1 for g in groups for sample in g.samples]


def question_texts(path: Path) -> list[str]:
    """The prompts of a JSON-lines file with GSM8K's fields. Raises DataError."""
    data = DataConfig(kind="jsonl", path=path)
    return [row.prompt for row in usable_rows(path, data, Rejections())]


def _random_prompt(mix: Mix, vocab_size: int, random: np.random.Generator) -> list[int]:
    shortest, longest = mix.prompt
    prompt: list[int] = random.integers(_SPECIAL, vocab_size, random.integers(shortest, longest + 1)).tolist()
    return prompt


def _sample(mix: Mix, vocab_size: int, random: np.random.Generator) -> Sample:
    length = int(min(max(round(random.lognormal(math.log(mix.median), mix.sigma)), 1), mix.longest))
    return Sample(
        tokens=tokens_to_bytes(random.integers(_SPECIAL, vocab_size, length)),
        logprobs=logprobs_to_bytes(-np.log(vocab_size) + random.normal(0, 0.5, length)),
        spans=[VersionSpan(0, 0, length)],
        reward=float(random.random() < 0.5),
    )

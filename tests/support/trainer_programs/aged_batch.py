"""A batch with everything in it that an objective can see: tokens of four versions, some too old, an environment's
tokens, a sample that nobody could judge, groups of unequal size."""

from __future__ import annotations

import numpy as np

from async_grpo.wire import Batch, Group, Sample, Turn, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from tests.support.trainer_programs.batches import VOCAB, make_task

VERSION = 5
LONGEST = 20


def make_aged_batch() -> Batch:
    """The trainer is at version 5; tokens are of 2 (masked) to 5."""
    generator = np.random.default_rng(11)
    groups = [_group(generator, number, samples) for number, samples in enumerate([4, 4, 3, 4])]
    return Batch(epoch=1, version=VERSION, groups=groups, mask_below=3)


def _group(generator: np.random.Generator, number: int, samples: int) -> Group:
    rewards = [None if number == 1 and place == 2 else float(generator.random()) for place in range(samples)]
    members = [_sample(generator, reward, turns=number == 2) for reward in rewards]
    return Group(seq=number, attempt=1, task=make_task(generator, number, 4 + number), samples=members)


def _sample(generator: np.random.Generator, reward: float | None, *, turns: bool) -> Sample:
    length = int(generator.integers(8, LONGEST + 1))
    logprobs = -np.log(VOCAB) + generator.normal(0, 0.3, length)
    if turns:
        logprobs[3:5] = 0.0
    return Sample(
        tokens=tokens_to_bytes(generator.integers(0, VOCAB, length)),
        logprobs=logprobs_to_bytes(logprobs),
        spans=_spans(generator, length),
        turns=[Turn(0, 3, True, "tool"), Turn(3, 5, False), Turn(5, length, True, "stop")] if turns else [],
        reward=reward,
    )


def _spans(generator: np.random.Generator, length: int) -> list[VersionSpan]:
    """One to three versions, one after another, between 2 and 5."""
    count = int(generator.integers(1, 4))
    first = int(generator.integers(2, VERSION - count + 2))
    ends = [0, *sorted(generator.choice(np.arange(1, length), count - 1, replace=False).tolist()), length]
    return [VersionSpan(first + place, ends[place], ends[place + 1]) for place in range(count)]

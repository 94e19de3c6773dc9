"""Batches for programs, and for the references that they are compared with: the same whenever they are made."""

from __future__ import annotations

import msgspec
import numpy as np

from async_grpo.wire import Batch, Group, Sample, Task, Turn, VersionSpan, logprobs_to_bytes, tokens_to_bytes

VOCAB = 96
GROUPS = 4
SAMPLES = 4
AGED_VERSION = 5
LONGEST = 20
"""Most tokens of a completion."""


def make_batch(version: int, *, poisoned: bool = False) -> Batch:
    """4 groups of 4 samples of 2-20 tokens; one sample in ten is unverifiable. `poisoned`: a reward is NaN."""
    generator = np.random.default_rng(version)
    groups = [_group(generator, version * GROUPS + index, version, 5 + index) for index in range(GROUPS)]
    if poisoned:
        samples = [msgspec.structs.replace(groups[0].samples[0], reward=float("nan")), *groups[0].samples[1:]]
        groups[0] = msgspec.structs.replace(groups[0], samples=samples)
    return Batch(epoch=1, version=version, groups=groups)


def make_task(generator: np.random.Generator, index: int, prompt_tokens: int) -> Task:
    prompt = generator.integers(0, VOCAB, prompt_tokens)
    return Task(index=index, prompt=f"prompt {index}", prompt_tokens=tokens_to_bytes(prompt), answer="")


def make_sample(generator: np.random.Generator, version: int, *, mixed: bool = True) -> Sample:
    """All tokens from `version`; if `mixed`, the first half from the one before."""
    length = int(generator.integers(2, LONGEST + 1))
    half = length // 2
    old_half = [VersionSpan(version - 1, 0, half), VersionSpan(version, half, length)]
    return Sample(
        tokens=tokens_to_bytes(generator.integers(0, VOCAB, length)),
        logprobs=logprobs_to_bytes(-np.log(VOCAB) + generator.normal(0, 0.8, length)),
        spans=old_half if mixed and version > 0 else [VersionSpan(version, 0, length)],
        reward=None if generator.random() < 0.1 else float(generator.random() < 0.5),
    )


def _group(generator: np.random.Generator, seq: int, version: int, prompt_tokens: int) -> Group:
    task = make_task(generator, seq, prompt_tokens)
    return Group(seq=seq, attempt=1, task=task, samples=[make_sample(generator, version) for _ in range(SAMPLES)])


def make_aged_batch(*, truncated: bool = False) -> Batch:
    """Everything that an objective can see: tokens of versions 2 (masked) to 5, an environment's tokens, a sample that
    nobody could judge, groups of unequal size. The trainer is at version 5. truncated: samples have a sampling mask."""
    generator = np.random.default_rng(11)
    groups = [_aged_group(generator, number, samples) for number, samples in enumerate([4, 4, 3, 4])]
    if truncated:
        masks = np.random.default_rng(12)
        groups = [
            msgspec.structs.replace(group, samples=[_truncated(masks, sample) for sample in group.samples])
            for group in groups
        ]
    return Batch(epoch=1, version=AGED_VERSION, groups=groups, mask_below=3)


def _truncated(generator: np.random.Generator, sample: Sample) -> Sample:
    """The sample with 1 to 9 kept tokens at each position of the policy, the sampled one among them."""
    ids: list[int] = []
    counts = []
    for token, written in zip(sample.token_ids().tolist(), sample.written_by_policy().tolist(), strict=True):
        row: set[int] = set()
        if written:
            row = {token, *generator.integers(0, VOCAB, int(generator.integers(0, 9))).tolist()}
        ids += sorted(row)
        counts.append(len(row))
    masked = msgspec.structs.replace(
        sample, mask_ids=np.array(ids, np.int32).tobytes(), mask_counts=np.array(counts, np.uint16).tobytes()
    )
    masked.validate()
    return masked


def _aged_group(generator: np.random.Generator, number: int, samples: int) -> Group:
    rewards = [None if number == 1 and place == 2 else float(generator.random()) for place in range(samples)]
    members = [_aged_sample(generator, reward, turns=number == 2) for reward in rewards]
    return Group(seq=number, attempt=1, task=make_task(generator, number, 4 + number), samples=members)


def _aged_sample(generator: np.random.Generator, reward: float | None, *, turns: bool) -> Sample:
    length = int(generator.integers(8, LONGEST + 1))
    logprobs = -np.log(VOCAB) + generator.normal(0, 0.3, length)
    if turns:
        logprobs[3:5] = 0.0
    return Sample(
        tokens=tokens_to_bytes(generator.integers(0, VOCAB, length)),
        logprobs=logprobs_to_bytes(logprobs),
        spans=_aged_spans(generator, length),
        turns=[Turn(0, 3, True, "tool"), Turn(3, 5, False), Turn(5, length, True, "stop")] if turns else [],
        reward=reward,
    )


def _aged_spans(generator: np.random.Generator, length: int) -> list[VersionSpan]:
    """One to three versions, one after another, between 2 and 5."""
    count = int(generator.integers(1, 4))
    first = int(generator.integers(2, AGED_VERSION - count + 2))
    ends = [0, *sorted(generator.choice(np.arange(1, length), count - 1, replace=False).tolist()), length]
    return [VersionSpan(first + place, ends[place], ends[place + 1]) for place in range(count)]

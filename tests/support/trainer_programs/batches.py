"""Batches that depend on their version alone, for programs and for the references they are compared with."""

from __future__ import annotations

import msgspec
import numpy as np

from async_grpo.wire import Batch, Group, Sample, Task, VersionSpan, logprobs_to_bytes, tokens_to_bytes

VOCAB = 96
GROUPS, SAMPLES = 4, 4


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
    length = int(generator.integers(2, 21))
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

"""From a batch of groups to what a training step needs: sequences, then packed micro-batches.

    Batch --sequences_of--> [Sequence] --pack_batch--> indices --micro_batch--> tensors

The network reads all tokens but the last of a sequence; position t predicts token t + 1. Of those
predictions, the ones of completion tokens of verifiable samples are trained.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo.algorithms import ADVANTAGES, AGGREGATIONS
from async_grpo.config.schema import ObjectiveConfig
from async_grpo.wire import Group, Sample
from trainer.model.spec import PackedSequences, pack

MIXED = -1


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt with one completion. C = completion length."""

    tokens: npt.NDArray[np.int32]
    prompt_tokens: int
    behaviour_C: npt.NDArray[np.float32]
    version: int
    """Of the policy that sampled all of it; MIXED if several did."""
    trained: bool
    advantage: float
    weight: float
    """Of each trained token in the loss of the batch."""

    @property
    def length(self) -> int:
        """Positions that the network reads."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T packed positions, N of which predict a trained token."""

    tokens_1T: Tensor
    positions_1T: Tensor
    packing: PackedSequences
    trained_N: Tensor
    """int64: positions whose prediction is trained."""
    labels_N: Tensor
    """int64: the token predicted there."""
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    versions_N: Tensor
    """int64: version of the policy that sampled the whole completion of this token, or MIXED."""


def sequences_of(groups: Many[Group], objective: ObjectiveConfig) -> list[Sequence]:
    """All samples of the batch, with advantages and loss weights computed over the whole of it."""
    samples = [sample for group in groups for sample in group.samples]
    advantages = [a for group in groups for a in _advantages(group.samples, objective.advantage)]
    trained_tokens = [0 if sample.reward is None else len(sample.token_ids()) for sample in samples]
    weights = AGGREGATIONS[objective.aggregation](torch.tensor(trained_tokens)).tolist()
    prompts = [group.task.prompt_ids() for group in groups for _ in group.samples]
    return [
        _sequence(prompt, sample, advantage, weight)
        for prompt, sample, advantage, weight in zip(prompts, samples, advantages, weights, strict=True)
    ]


def micro_batch(members: Many[Sequence]) -> MicroBatch:
    """Sequences end to end. An empty one is a single token that nothing is predicted from."""
    if not members:
        return _tensors([np.zeros(1, np.int32)], [], [])
    starts = np.cumsum([0] + [member.length for member in members[:-1]])
    trained = [(start, member) for start, member in zip(starts, members, strict=True) if member.trained]
    return _tensors([member.tokens[:-1] for member in members], [m for _, m in trained], [s for s, _ in trained])


def _tensors(inputs: Many[npt.NDArray[np.int32]], trained: Many[Sequence], starts: Many[int]) -> MicroBatch:
    """`trained` members, whose inputs start at `starts`, give the N predictions."""
    lengths = [len(tokens) for tokens in inputs]
    counts = [len(member.behaviour_C) for member in trained]
    where = [
        start + member.prompt_tokens - 1 + np.arange(count)
        for start, member, count in zip(starts, trained, counts, strict=True)
    ]
    return MicroBatch(
        tokens_1T=_join(inputs, np.int64)[None],
        positions_1T=_join([np.arange(length) for length in lengths], np.int64)[None],
        packing=pack(lengths),
        trained_N=_join(where, np.int64),
        labels_N=_join([member.tokens[member.prompt_tokens :] for member in trained], np.int64),
        behaviour_N=_join([member.behaviour_C for member in trained], np.float32),
        advantages_N=_join([np.repeat(m.advantage, n) for m, n in zip(trained, counts, strict=True)], np.float32),
        weights_N=_join([np.repeat(m.weight, n) for m, n in zip(trained, counts, strict=True)], np.float32),
        versions_N=_join([np.repeat(m.version, n) for m, n in zip(trained, counts, strict=True)], np.int64),
    )


def _join(arrays: Many[npt.NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype))


def _advantages(samples: Many[Sample], rule: str) -> list[float]:
    rewards = [float("nan") if sample.reward is None else sample.reward for sample in samples]
    rewards_1G = torch.tensor([rewards], dtype=torch.float64)
    valid_1G = torch.tensor([[sample.reward is not None for sample in samples]])
    values: list[float] = ADVANTAGES[rule](rewards_1G, valid_1G)[0].tolist()
    return values


def _sequence(prompt: npt.NDArray[np.int32], sample: Sample, advantage: float, weight: float) -> Sequence:
    return Sequence(
        tokens=np.concatenate([prompt, sample.token_ids()]),
        prompt_tokens=len(prompt),
        behaviour_C=sample.token_logprobs(),
        version=sample.spans[0].version if len(sample.spans) == 1 else MIXED,
        trained=sample.reward is not None,
        advantage=advantage,
        weight=weight,
    )

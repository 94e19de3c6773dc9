"""From a batch of groups to what a training step needs: sequences, then packed micro-batches.

    Batch --sequences_of--> [TrainingSequence] --pack_batch--> indices --micro_batch--> tensors

The network reads all tokens but the last of a sequence; position t predicts token t + 1. The trained predictions are
those of tokens that the policy wrote in verifiable samples. Tokens of the environment are context, and so are tokens of
versions below the batch's `mask_below`. A sequence that fits no micro-batch loses its last tokens or its whole gradient
(`trainer.overlong`). The loss is divided by the count that includes both, so that neither makes the gradient of the
other tokens larger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo.algorithms import AGGREGATIONS, advantage_of
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.wire import Batch, Group, Sample
from trainer.batch.packed import PackedSequences, pack

MIXED = -1


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt with one completion. C = completion length, N = its trained tokens."""

    tokens: npt.NDArray[np.int32]
    prompt_tokens: int
    behaviour_C: npt.NDArray[np.float32]
    versions_C: npt.NDArray[np.int32]
    """Version of the policy that sampled each token."""
    positions_N: npt.NDArray[np.int64]
    """Positions in the completion of the tokens that get a gradient; none if no verifier could judge it."""
    advantage: float
    weight: float
    """Weight of each trained token in the loss of the batch."""
    first: int
    """Index of the first trained token among those of the batch."""
    counted: int
    """Tokens in the denominator of the loss: those that the policy wrote, if a verifier could judge it."""
    group: int
    """Index of its group in the batch."""
    overlong: bool = False
    """Whether it had to be truncated or dropped."""
    prox_N: npt.NDArray[np.float32] | None = None
    """log pi_prox, where a pass before the step computed it (`trainer.step.precompute`)."""
    multiplier_N: npt.NDArray[np.float32] | None = None
    """Product of the corrections, where it was computed before the step."""
    reference_N: npt.NDArray[np.float32] | None = None
    """log pi_ref, if there is a reference model."""

    @property
    def length(self) -> int:
        """Positions that the network reads."""
        return len(self.tokens) - 1

    @property
    def trained_tokens(self) -> int:
        """Completion tokens that get a gradient."""
        return len(self.positions_N)

    @property
    def version(self) -> int:
        """The version of the policy that sampled the whole completion; MIXED if several did."""
        oldest, newest = int(self.versions_C[0]), int(self.versions_C[-1])
        return newest if oldest == newest else MIXED


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """N trained tokens of whole sequences, and what is known of them before an update: one column for each."""

    labels_N: Tensor
    """int64: the token that was sampled."""
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    versions_N: Tensor
    """int64: version of the policy that sampled this token."""
    whole_N: Tensor
    """int64: version of the policy that sampled the whole completion of this token, or MIXED."""
    segment_N: Tensor
    """int64: the sequence of each token, counted from 0 over those with trained tokens."""
    segments: int
    index_N: Tensor
    """int64: index of each token among the trained ones of the batch."""
    prox_N: Tensor | None
    """log pi_prox; None: it follows from the log-probabilities of the update."""
    multiplier_N: Tensor | None
    """Product of the corrections; None: it follows from the log-probabilities of the update."""
    reference_N: Tensor | None
    """log pi_ref; None without a reference model."""


@dataclass(frozen=True, slots=True)
class MicroBatch(TrainedTokens):
    """T packed positions, N of which predict a trained token."""

    tokens_1T: Tensor
    positions_1T: Tensor
    packing: PackedSequences
    trained_N: Tensor
    """int64: positions whose prediction is trained."""


def sequences_of(
    batch: Batch,
    objective: ObjectiveConfig,
    longest: int,
    *,
    room: int | None = None,
    truncate: bool = False,
    squares: Sequence[float] | None = None,
) -> list[TrainingSequence]:
    """All samples of the batch, with advantages and loss weights computed over the whole of it.

    `longest`: the most tokens that a completion may have. `room`: the most that a sequence may have, None if that does
    not matter; what is longer is truncated, or else gets no gradient. `squares`: as in `group_advantages`.
    """
    groups = batch.groups
    samples = [sample for group in groups for sample in group.samples]
    advantages = [value for values in group_advantages(groups, objective.advantage, squares) for value in values]
    tokens = torch.tensor([_judged_tokens(sample) for sample in samples])
    weights = AGGREGATIONS[objective.aggregation](tokens, longest).tolist()
    group_indices = [index for index, group in enumerate(groups) for _ in group.samples]
    sequences, first = [], 0
    for index, sample, advantage, weight in zip(group_indices, samples, advantages, weights, strict=True):
        sequence = _sequence(groups[index], index, sample, advantage, weight, batch.mask_below, first)
        if room is not None and sequence.length > room:
            sequence = _shortened(sequence, room if truncate else 0)
        first += sequence.trained_tokens
        sequences.append(sequence)
    return sequences


def reweighed(
    sequences: Sequence[TrainingSequence], objective: ObjectiveConfig, longest: int
) -> list[TrainingSequence]:
    """The sequences with the loss weights that they have as a separate batch: the mini-batch of one update."""
    tokens = torch.tensor([sequence.counted for sequence in sequences])
    weights = AGGREGATIONS[objective.aggregation](tokens, longest).tolist()
    return [replace(sequence, weight=weight) for sequence, weight in zip(sequences, weights, strict=True)]


def with_columns(
    sequences: Sequence[TrainingSequence],
    *,
    prox_N: Tensor | None = None,
    multiplier_N: Tensor | None = None,
    reference_N: Tensor | None = None,
) -> list[TrainingSequence]:
    """The sequences with their parts of columns over all trained tokens of the batch."""

    def part(sequence: TrainingSequence, values_N: Tensor | None) -> npt.NDArray[np.float32] | None:
        if values_N is None:
            return None
        return values_N[sequence.first : sequence.first + sequence.trained_tokens].numpy()

    return [
        replace(
            sequence,
            prox_N=part(sequence, prox_N),
            multiplier_N=part(sequence, multiplier_N),
            reference_N=part(sequence, reference_N),
        )
        for sequence in sequences
    ]


def micro_batch(sequences: Sequence[TrainingSequence]) -> MicroBatch:
    """Pack sequences end to end. An empty micro-batch is a single token that nothing is predicted from."""
    inputs = [sequence.tokens[:-1] for sequence in sequences] or [np.zeros(1, np.int32)]
    lengths = [len(tokens) for tokens in inputs]
    starts = np.cumsum([0, *lengths[:-1]])
    where = [
        start + sequence.prompt_tokens - 1 + sequence.positions_N
        for start, sequence in zip(starts, sequences, strict=False)  # one start and no sequence: the empty one
    ]
    return MicroBatch(
        **_columns(sequences),
        tokens_1T=_join(inputs, np.int64)[None],
        positions_1T=_join([np.arange(length) for length in lengths], np.int64)[None],
        packing=pack(lengths),
        trained_N=_join(where, np.int64),
    )


def trained_tokens(sequences: Sequence[TrainingSequence]) -> TrainedTokens:
    """The trained tokens of these sequences, in their order."""
    return TrainedTokens(**_columns(sequences))


def _columns(sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
    trained = [sequence for sequence in sequences if sequence.trained_tokens]

    def repeated(values: Sequence[float]) -> list[npt.NDArray[Any]]:
        return [np.repeat(value, sequence.trained_tokens) for value, sequence in zip(values, trained, strict=True)]

    def precomputed(name: str) -> Tensor | None:
        parts = [part for sequence in trained if (part := getattr(sequence, name)) is not None]
        return _join(parts, np.float32) if parts or not trained else None

    return {
        "labels_N": _join([s.tokens[s.prompt_tokens + s.positions_N] for s in trained], np.int64),
        "behaviour_N": _join([s.behaviour_C[s.positions_N] for s in trained], np.float32),
        "advantages_N": _join(repeated([s.advantage for s in trained]), np.float32),
        "weights_N": _join(repeated([s.weight for s in trained]), np.float32),
        "versions_N": _join([s.versions_C[s.positions_N] for s in trained], np.int64),
        "whole_N": _join(repeated([s.version for s in trained]), np.int64),
        "segment_N": _join(repeated(range(len(trained))), np.int64),
        "segments": len(trained),
        "index_N": _join([s.first + np.arange(s.trained_tokens) for s in trained], np.int64),
        **{name: precomputed(name) for name in ("prox_N", "multiplier_N", "reference_N")},
    }


def _join(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype))


def _judged_tokens(sample: Sample) -> int:
    """Tokens that count in the denominator of the loss; none if no verifier could judge the sample."""
    if sample.reward is None:
        return 0
    return int(sample.written_by_policy().sum()) if sample.turns else sample.length


def group_advantages(groups: Sequence[Group], rule: str, squares: Sequence[float] | None = None) -> list[list[float]]:
    """The advantages of the samples of each group.

    Groups of unequal size are padded with samples that are not valid. `squares`: the squared importance weight of every
    sample, for a rule that counts samples by them; None: all are 1.
    """
    factors = itertools.repeat(1) if squares is None else iter(squares)
    size = max(len(group.samples) for group in groups)
    rewards: list[list[float]] = []
    lengths: list[list[float]] = []
    valid: list[list[bool]] = []
    for group in groups:
        absent = size - len(group.samples)
        given = [math.nan if sample.reward is None else sample.reward for sample in group.samples]
        rewards.append([*given, *[math.nan] * absent])
        lengths.append([*(_judged_tokens(sample) * next(factors) for sample in group.samples), *[0] * absent])
        valid.append([*(sample.reward is not None for sample in group.samples), *[False] * absent])
    rewards_BG = torch.tensor(rewards, dtype=torch.float64)
    lengths_BG = torch.tensor(lengths, dtype=None if squares is None else torch.float64)
    valid_BG = torch.tensor(valid)
    values = advantage_of(rule)(rewards_BG, valid_BG, lengths_BG).tolist()
    return [row[: len(group.samples)] for row, group in zip(values, groups, strict=True)]


def _sequence(
    group: Group, index: int, sample: Sample, advantage: float, weight: float, mask_below: int, first: int
) -> TrainingSequence:
    prompt, versions_C = group.task.prompt_ids(), sample.token_versions()
    trained_C = sample.written_by_policy() & (versions_C >= mask_below) & (sample.reward is not None)
    return TrainingSequence(
        tokens=np.concatenate([prompt, sample.token_ids()]),
        prompt_tokens=len(prompt),
        behaviour_C=sample.token_logprobs(),
        versions_C=versions_C,
        positions_N=np.flatnonzero(trained_C),
        advantage=advantage,
        weight=weight,
        first=first,
        counted=_judged_tokens(sample),
        group=index,
    )


def _shortened(sequence: TrainingSequence, room: int) -> TrainingSequence:
    """Keep only the first `room` positions of the sequence; 0 means no gradient."""
    kept = max(0, room + 1 - sequence.prompt_tokens)
    return replace(
        sequence,
        tokens=sequence.tokens[: room + 1],
        behaviour_C=sequence.behaviour_C[:kept],
        versions_C=sequence.versions_C[:kept],
        positions_N=sequence.positions_N[sequence.positions_N < kept],
        overlong=True,
    )

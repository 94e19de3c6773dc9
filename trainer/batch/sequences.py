"""Training sequences of a batch, and the tensors of a micro-batch.

    Batch --split_into_sequences--> [TrainingSequence] --assign_sequences--> indices --make_micro_batch--> MicroBatch

    sample          prompt   policy's turn   environment's turn   policy's turn
    loss            -        trained         -                    trained
    denominator     -        counted         -                    counted

The network reads all tokens of a sequence but the last; position t predicts token t + 1. The trained tokens are those
that the policy wrote, in samples with a reward. Tokens of versions below the batch's `mask_below` are context, like
those of the environment. A sequence that is longer than a micro-batch loses its last tokens or its whole gradient
(`trainer.overlong`). Masked and truncated tokens still count in the denominator of the loss, so dropping them does not
increase the gradient of the other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo.algorithms import AGGREGATIONS, gdpo, load_advantage, normalise_over_batch
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.wire import Batch, Group, Sample
from async_grpo.wire.sampling_mask import PADDING, SamplingMask, first_occurrences
from trainer.batch.layout import PackedSequences, lay_out_sequences

MIXED = -1
"""Stands for the version of a completion that several policies sampled."""


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt with one completion. C = completion length, N = its trained tokens."""

    tokens: npt.NDArray[np.int32]
    prompt_tokens: int
    behaviour_C: npt.NDArray[np.float32]
    """Log-probability of each token under the policy that sampled it."""
    versions_C: npt.NDArray[np.int32]
    """Version of the policy that sampled each token."""
    positions_N: npt.NDArray[np.int64]
    """Positions of the trained tokens in the completion; empty if the sample has no reward."""
    advantages_N: npt.NDArray[np.float64]
    """Advantage of each trained token. Rules such as GRPO give all tokens of a sample the same advantage."""
    weight: float
    """Weight of each trained token in the loss of the batch."""
    first_index: int
    """Index of its first trained token among those of the batch."""
    denominator_tokens: int
    """Number of tokens in the denominator of the loss: those that the policy wrote, or 0 without a reward."""
    group: int
    """Index of its group in the batch."""
    sampling_mask: SamplingMask | None = None
    """The tokens that could be sampled at each position of the completion; None if all could (no top-k, no top-p)."""
    overlong: bool = False
    """True if it was truncated or dropped because of its length."""
    prox_N: npt.NDArray[np.float32] | None = None
    """log pi_prox, if a pass before the step computed it (`trainer.step.precompute`)."""
    multiplier_N: npt.NDArray[np.float32] | None = None
    """Product of the corrections, if it was computed before the step."""
    reference_N: npt.NDArray[np.float32] | None = None
    """log pi_ref, if there is a reference model."""

    @property
    def length(self) -> int:
        """Number of positions that the network reads."""
        return len(self.tokens) - 1

    @property
    def trained_tokens(self) -> int:
        """Number of completion tokens that get a gradient."""
        return len(self.positions_N)

    @property
    def advantage(self) -> float:
        """Mean advantage of the trained tokens; 0 without any."""
        return float(self.advantages_N.mean()) if len(self.advantages_N) else 0.0

    @property
    def version(self) -> int:
        """Version of the policy that sampled the whole completion; MIXED if there were several."""
        # Versions never decrease within a completion, so its ends are enough.
        oldest = int(self.versions_C[0])
        newest = int(self.versions_C[-1])
        return newest if oldest == newest else MIXED


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The N trained tokens of some sequences. All columns are fixed before an update starts."""

    labels_N: Tensor
    """int64: the token that was sampled."""
    behaviour_N: Tensor
    """float32: its log-probability under the policy that sampled it."""
    advantages_N: Tensor
    weights_N: Tensor
    versions_N: Tensor
    """int64: version of the policy that sampled this token."""
    completion_version_N: Tensor
    """int64: version of the policy that sampled the whole completion of this token, or MIXED."""
    segment_N: Tensor
    """int64: the sequence of each token, numbered from 0 among the sequences with trained tokens."""
    segments: int
    index_N: Tensor
    """int64: index of each token among the trained ones of the batch."""
    prox_N: Tensor | None
    """log pi_prox; None if it is derived from the log-probabilities of the update."""
    multiplier_N: Tensor | None
    """Product of the corrections; None if it is derived from the log-probabilities of the update."""
    reference_N: Tensor | None
    """log pi_ref; None without a reference model."""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that the engine could sample at each of N trained positions, W at most."""

    ids_NW: Tensor
    """int64: token ids; PADDING behind shorter rows. Each row contains the sampled token."""
    repeated_NW: Tensor
    """bool: True if the token occurs before this position, so that a repetition penalty applies to it."""


@dataclass(frozen=True, slots=True)
class MicroBatch(TrainedTokens):
    """T packed positions, N of which predict a trained token."""

    tokens_1T: Tensor
    positions_1T: Tensor
    packing: PackedSequences
    trained_N: Tensor
    """int64: positions that predict the trained tokens."""
    kept: KeptTokens | None = None
    """The tokens to normalise over; None: the whole vocabulary."""


def split_into_sequences(
    batch: Batch,
    objective: ObjectiveConfig,
    max_completion_tokens: int,
    *,
    reward_weights: Mapping[str, float] = MappingProxyType({}),
    max_sequence_tokens: int | None = None,
    truncate: bool = False,
    squared_weights: Sequence[float] | None = None,
) -> list[TrainingSequence]:
    """Return one sequence per sample, with advantages and loss weights computed over the whole batch.

    Sequences of more than `max_sequence_tokens` are truncated if `truncate`; otherwise they get no gradient. None: no
    limit.
    `reward_weights`, `squared_weights`: see `group_advantages`. Advantages are not normalised over the batch yet: see
    `normalise_advantages`.
    """
    advantages = group_advantages(batch.groups, objective.advantage, squared_weights, reward_weights)
    weights = _token_weights(
        [_denominator_tokens(sample) for group in batch.groups for sample in group.samples],
        [index for index, group in enumerate(batch.groups) for _ in group.samples],
        objective,
        max_completion_tokens,
    )

    # If top-k or top-p was changed before a resume, a batch can have samples with and without a sampling mask. A
    # micro-batch normalises either over the kept tokens or over the vocabulary, so those without get no gradient.
    needs_mask = any(sample.mask_counts for group in batch.groups for sample in group.samples)

    sequences: list[TrainingSequence] = []
    first_index = 0
    for index, group in enumerate(batch.groups):
        for sample, advantage in zip(group.samples, advantages[index], strict=True):
            weight = weights[len(sequences)]
            sequence = _make_sequence(group, index, sample, advantage, weight, batch.mask_below, first_index)
            if needs_mask and sequence.sampling_mask is None:
                sequence = replace(sequence, positions_N=sequence.positions_N[:0], advantages_N=np.zeros(0))
            if max_sequence_tokens is not None and sequence.length > max_sequence_tokens:
                sequence = _shorten(sequence, max_sequence_tokens if truncate else 0)
            first_index += sequence.trained_tokens
            sequences.append(sequence)
    return sequences


def reweight_sequences(
    sequences: Sequence[TrainingSequence], objective: ObjectiveConfig, max_completion_tokens: int
) -> list[TrainingSequence]:
    """Return the sequences of a mini-batch, with loss weights as if it were the whole batch."""
    weights = _token_weights(
        [sequence.denominator_tokens for sequence in sequences],
        [sequence.group for sequence in sequences],
        objective,
        max_completion_tokens,
    )
    return [replace(sequence, weight=weight) for sequence, weight in zip(sequences, weights, strict=True)]


def normalise_advantages(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Return the sequences with advantages of mean 0 and deviation 1 over all their trained tokens."""
    advantages_N = _join([sequence.advantages_N for sequence in sequences], np.float64)
    return replace_advantages(sequences, normalise_over_batch(advantages_N))


def replace_advantages(sequences: Sequence[TrainingSequence], advantages_N: Tensor) -> list[TrainingSequence]:
    """Return the sequences with other advantages, given for all their trained tokens in order."""
    parts = advantages_N.split([sequence.trained_tokens for sequence in sequences])
    return [
        replace(sequence, advantages_N=part.double().numpy()) for sequence, part in zip(sequences, parts, strict=True)
    ]


def attach_columns(
    sequences: Sequence[TrainingSequence],
    *,
    prox_N: Tensor | None = None,
    multiplier_N: Tensor | None = None,
    reference_N: Tensor | None = None,
) -> list[TrainingSequence]:
    """Return the sequences with their parts of columns over all trained tokens of the batch."""

    def part(sequence: TrainingSequence, values_N: Tensor | None) -> npt.NDArray[np.float32] | None:
        if values_N is None:
            return None
        return values_N[sequence.first_index : sequence.first_index + sequence.trained_tokens].numpy()

    return [
        replace(
            sequence,
            prox_N=part(sequence, prox_N),
            multiplier_N=part(sequence, multiplier_N),
            reference_N=part(sequence, reference_N),
        )
        for sequence in sequences
    ]


def make_micro_batch(sequences: Sequence[TrainingSequence]) -> MicroBatch:
    """Pack sequences end to end.

    Without sequences, the micro-batch is a single token that predicts nothing: its rank still has to join the
    collective calls of the forward and backward pass.
    """
    inputs = [sequence.tokens[:-1] for sequence in sequences] or [np.zeros(1, np.int32)]
    lengths = [len(tokens) for tokens in inputs]
    starts = np.cumsum([0, *lengths[:-1]])

    trained = []
    for start, sequence in zip(starts, sequences, strict=False):  # a start without sequence: the empty micro-batch
        # The first completion token is predicted by the last prompt token, hence - 1.
        trained.append(start + sequence.prompt_tokens - 1 + sequence.positions_N)

    return MicroBatch(
        **_stack_columns(sequences),
        tokens_1T=_join(inputs, np.int64)[None],
        positions_1T=_join([np.arange(length) for length in lengths], np.int64)[None],
        packing=lay_out_sequences(lengths),
        trained_N=_join(trained, np.int64),
        kept=_stack_kept_tokens(sequences),
    )


def _stack_kept_tokens(sequences: Sequence[TrainingSequence]) -> KeptTokens | None:
    """Pad the rows of the sampling masks to one width. None without truncated sampling."""
    blocks = []
    repeated_blocks = []
    for sequence in sequences:
        if sequence.sampling_mask is None:
            continue  # it has no trained tokens if other sequences have a mask: see `split_into_sequences`
        ids_NW = sequence.sampling_mask.pad_rows(sequence.positions_N)
        first_NW = first_occurrences(sequence.tokens, ids_NW)
        positions_N1 = sequence.prompt_tokens + sequence.positions_N[:, None]
        blocks.append(ids_NW)
        repeated_blocks.append(first_NW < positions_N1)
    if not blocks:
        return None

    width = max(block.shape[1] for block in blocks)
    ids = [np.pad(block, ((0, 0), (0, width - block.shape[1])), constant_values=PADDING) for block in blocks]
    repeated = [np.pad(block, ((0, 0), (0, width - block.shape[1]))) for block in repeated_blocks]
    return KeptTokens(
        torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(np.concatenate(repeated))
    )


def stack_trained_tokens(sequences: Sequence[TrainingSequence]) -> TrainedTokens:
    """Concatenate the trained tokens of the sequences."""
    return TrainedTokens(**_stack_columns(sequences))


def _stack_columns(sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
    trained = [sequence for sequence in sequences if sequence.trained_tokens]

    def repeated(values: Sequence[float]) -> list[npt.NDArray[Any]]:
        return [np.repeat(value, sequence.trained_tokens) for value, sequence in zip(values, trained, strict=True)]

    def precomputed(name: str) -> Tensor | None:
        columns = [getattr(sequence, name) for sequence in trained]
        parts = [column for column in columns if column is not None]
        if trained and not parts:
            return None
        return _join(parts, np.float32)

    return {
        "labels_N": _join([s.tokens[s.prompt_tokens + s.positions_N] for s in trained], np.int64),
        "behaviour_N": _join([s.behaviour_C[s.positions_N] for s in trained], np.float32),
        "advantages_N": _join([s.advantages_N for s in trained], np.float32),
        "weights_N": _join(repeated([s.weight for s in trained]), np.float32),
        "versions_N": _join([s.versions_C[s.positions_N] for s in trained], np.int64),
        "completion_version_N": _join(repeated([s.version for s in trained]), np.int64),
        "segment_N": _join(repeated(range(len(trained))), np.int64),
        "segments": len(trained),
        "index_N": _join([s.first_index + np.arange(s.trained_tokens) for s in trained], np.int64),
        "prox_N": precomputed("prox_N"),
        "multiplier_N": precomputed("multiplier_N"),
        "reference_N": precomputed("reference_N"),
    }


def _join(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    # The empty array in front is for an empty list, which np.concatenate refuses.
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype))


def _denominator_tokens(sample: Sample) -> int:
    """Number of tokens in the denominator of the loss; 0 for a sample without a reward."""
    if sample.reward is None:
        return 0
    if not sample.turns:
        return sample.length
    return int(sample.written_by_policy().sum())


def _token_weights(
    tokens: Sequence[int], groups: Sequence[int], objective: ObjectiveConfig, max_completion_tokens: int
) -> list[float]:
    """Weight of each token of each sequence in the loss of their batch."""
    rule = AGGREGATIONS[objective.aggregation]
    weights: list[float] = rule(
        torch.tensor(tokens), torch.tensor(groups, dtype=torch.int64), max_completion_tokens
    ).tolist()
    return weights


def group_advantages(
    groups: Sequence[Group],
    rule: str,
    squared_weights: Sequence[float] | None = None,
    reward_weights: Mapping[str, float] = MappingProxyType({}),
) -> list[list[float]]:
    """Return the advantages of the samples of each group.

    `squared_weights`: squared importance weight per sample, for rules that weigh samples; None if all are 1.
    `reward_weights`: weight of each reward function, for rules that normalise them separately.
    """
    # The rules take rectangles [B, G]. Smaller groups are filled up with samples that are not valid.
    size = max(len(group.samples) for group in groups)
    rewards: list[list[float]] = []
    lengths: list[list[float]] = []
    valid: list[list[bool]] = []
    sample_index = 0
    for group in groups:
        missing = size - len(group.samples)
        group_rewards = [math.nan if sample.reward is None else sample.reward for sample in group.samples]
        group_lengths: list[float] = [_denominator_tokens(sample) for sample in group.samples]
        if squared_weights is not None:
            squares = squared_weights[sample_index : sample_index + len(group.samples)]
            group_lengths = [length * square for length, square in zip(group_lengths, squares, strict=True)]
        group_valid = [sample.reward is not None for sample in group.samples]

        rewards.append(group_rewards + [math.nan] * missing)
        lengths.append(group_lengths + [0] * missing)
        valid.append(group_valid + [False] * missing)
        sample_index += len(group.samples)

    rewards_BG = torch.tensor(rewards, dtype=torch.float64)
    lengths_BG = torch.tensor(lengths, dtype=None if squared_weights is None else torch.float64)
    valid_BG = torch.tensor(valid)
    if rule == "gdpo":
        advantages_BG = _gdpo_advantages(groups, rewards_BG, valid_BG, reward_weights)
    else:
        advantages_BG = load_advantage(rule)(rewards_BG, valid_BG, lengths_BG)
    return [row[: len(group.samples)] for row, group in zip(advantages_BG.tolist(), groups, strict=True)]


def _gdpo_advantages(
    groups: Sequence[Group], rewards_BG: Tensor, valid_BG: Tensor, reward_weights: Mapping[str, float]
) -> Tensor:
    """Advantages of GDPO. The part of the reward that no function explains (a length penalty, a divergence) counts as
    one more function with weight 1."""
    names = sorted(
        {name for group in groups for sample in group.samples for name in sample.rewards} & {*reward_weights}
    )
    parts_KBG = torch.zeros(len(names), *rewards_BG.shape, dtype=torch.float64)
    for k, name in enumerate(names):
        for b, group in enumerate(groups):
            for g, sample in enumerate(group.samples):
                parts_KBG[k, b, g] = sample.rewards.get(name, 0.0)
    weights_K = torch.tensor([reward_weights[name] for name in names], dtype=torch.float64)
    rest_BG = rewards_BG - torch.einsum("k,kbg->bg", weights_K, parts_KBG)

    # Rounding leaves a rest of 1e-16, which the division by its own deviation would make as large as a real function.
    if float(rest_BG[valid_BG].abs().max() if valid_BG.any() else 0.0) < 1e-9:
        return gdpo(parts_KBG, weights_K, valid_BG)
    one = torch.ones(1, dtype=torch.float64)
    return gdpo(torch.cat([parts_KBG, rest_BG[None]]), torch.cat([weights_K, one]), valid_BG)


def _make_sequence(
    group: Group, index: int, sample: Sample, advantage: float, weight: float, mask_below: int, first_index: int
) -> TrainingSequence:
    prompt = group.task.prompt_ids()
    versions_C = sample.token_versions()
    trained_C = sample.written_by_policy() & (versions_C >= mask_below) & (sample.reward is not None)
    positions_N = np.flatnonzero(trained_C)
    return TrainingSequence(
        tokens=np.concatenate([prompt, sample.token_ids()]),
        prompt_tokens=len(prompt),
        behaviour_C=sample.token_logprobs(),
        versions_C=versions_C,
        positions_N=positions_N,
        advantages_N=np.full(len(positions_N), advantage),
        weight=weight,
        first_index=first_index,
        denominator_tokens=_denominator_tokens(sample),
        group=index,
        sampling_mask=sample.sampling_mask(),
    )


def _shorten(sequence: TrainingSequence, max_tokens: int) -> TrainingSequence:
    """Cut the sequence to `max_tokens` positions, which is one token more. 0 leaves no completion, so no gradient."""
    completion_tokens = max(0, max_tokens + 1 - sequence.prompt_tokens)
    is_kept_N = sequence.positions_N < completion_tokens
    return replace(
        sequence,
        tokens=sequence.tokens[: max_tokens + 1],
        behaviour_C=sequence.behaviour_C[:completion_tokens],
        versions_C=sequence.versions_C[:completion_tokens],
        positions_N=sequence.positions_N[is_kept_N],
        advantages_N=sequence.advantages_N[is_kept_N],
        overlong=True,
    )

"""The sequences of a batch, with everything that must be known of all of them before the first update.

    micro-batches --forward, reference's weights--> log pi_ref                 if there is a reference model
    micro-batches --forward, policy's weights-----> log pi before the step     if something needs it:
                                                        - several updates, and pi_prox is the policy before the step
                                                        - several updates, and corrections, which are of that policy
                                                        - a correction that needs the whole batch
                                                        - an advantage that counts samples by importance weight
    --sum over ranks--> of all tokens, on every rank --> advantages
                                                     --> columns of the sequences, scale of the learning rate

Every rank fills in its own tokens and leaves 0 elsewhere, so the sum is exact. Every rank then computes the same
numbers: they depend on neither micro-batches nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import structs
from torch import Tensor

from async_grpo.algorithms import (
    PROXIMALS,
    Tokens,
    correction_multiplier,
    ess_scale,
    ess_sums,
    rewards_less_kl,
    sequence_weights,
)
from async_grpo.config import RunConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.telemetry.timeline import PhaseTimer
from async_grpo.wire import Batch
from trainer.batch.packing import PackedBatch, pack, sequences_in
from trainer.batch.sequences import TrainedTokens, TrainingSequence, trained_tokens, with_columns
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.ranks.distributed import is_counting_rank, sum_over_ranks


def prepare_sequences(
    policy: Policy, batch: Batch, config: RunConfig, *, reference: Reference | None, phases: PhaseTimer
) -> tuple[list[TrainingSequence], float | None]:
    """The sequences of a batch or a part of one, and the scale of the learning rate; None: it is known after the
    backward passes. Makes a pass over the batch only if something needs it."""
    objective, updates = config.trainer.objective, config.trainer.updates
    with phases.span("pack"):
        sequences = sequences_in(batch, config)
    if reference is None and not needs_policy_pass(config.trainer):
        return sequences, None

    with phases.span("pack"):
        packed = pack(sequences, config, policy.shape.attention_cost)
    tokens = sum(sequence.trained_tokens for sequence in sequences)
    logprobs_N = reference_N = None
    if reference is not None:
        with phases.span("reference"), reference.active() as weights:
            reference_N = whole_logprobs(weights, packed, tokens)
    if needs_policy_pass(config.trainer):
        with phases.span("prox"):
            logprobs_N = whole_logprobs(policy, packed, tokens)

    # Some advantages follow from these passes: they replace those that were computed from the rewards alone.
    squares = None
    if objective.weighs_samples:
        assert logprobs_N is not None
        squares = squared_weights(logprobs_N, sequences, objective, batch.version)
    if objective.penalises_rewards:
        assert reference_N is not None
        batch = penalised(batch, sequences, reference_N, objective)
    if objective.weighs_samples or objective.penalises_rewards:
        with phases.span("pack"):
            sequences = sequences_in(batch, config, squares)

    if logprobs_N is None:
        return with_columns(sequences, reference_N=reference_N), None
    before = tokens_of(logprobs_N, trained_tokens(sequences), objective, theta_version(batch.version, updates))
    sequences = with_columns(
        sequences,
        reference_N=reference_N,
        prox_N=logprobs_N if objective.prox == "recompute" else None,
        multiplier_N=correction_multiplier(before, objective),
    )
    lr_scale = ess_scale(*ess_sums(before).tolist()) if objective.scales_step else None
    return sequences, lr_scale


def needs_policy_pass(trainer: TrainerConfig) -> bool:
    """Whether the log-probabilities of the policy before the step are computed in a separate pass."""
    objective = trainer.objective
    several = trainer.updates > 1 and bool(objective.prox == "recompute" or objective.corrections)
    return several or objective.needs_pass


def whole_logprobs(policy: Policy, packed: PackedBatch, tokens: int) -> Tensor:
    """log pi of all `tokens` trained tokens of the batch, in order, on every rank."""
    results = policy.run(
        packed.micro_batches, lambda values_N, _entropy, _batch: (values_N.sum(), values_N), train=False
    )
    logprobs_N = torch.zeros(tokens)
    if is_counting_rank():
        for batch, values_N in zip(packed.micro_batches, results, strict=False):  # only the last stage has results
            logprobs_N[batch.index_N] = values_N
    return sum_over_ranks(logprobs_N)


def squared_weights(
    logprobs_N: Tensor, sequences: Sequence[TrainingSequence], objective: ObjectiveConfig, version: int
) -> list[float]:
    """The squared importance weight of every sample; 0 for those without a trained token."""
    tokens = tokens_of(logprobs_N, trained_tokens(sequences), objective, version)
    squares = iter(sequence_weights(tokens).square().tolist())
    return [next(squares) if sequence.trained_tokens else 0.0 for sequence in sequences]


def penalised(
    batch: Batch, sequences: Sequence[TrainingSequence], reference_N: Tensor, objective: ObjectiveConfig
) -> Batch:
    """The batch with beta * (divergence of each sample, summed over its trained tokens) subtracted from its reward."""
    columns = trained_tokens(sequences)
    tokens = tokens_of(columns.behaviour_N, columns, objective, batch.version)
    samples = [sample for group in batch.groups for sample in group.samples]
    trained = [index for index, sequence in enumerate(sequences) if sequence.trained_tokens]
    rewards_M = torch.tensor([samples[index].reward for index in trained], dtype=torch.float64)
    less_M = rewards_less_kl(rewards_M, tokens, reference_N, beta=objective.kl_beta, estimator=objective.kl_estimator)
    for index, reward in zip(trained, less_M.tolist(), strict=True):
        samples[index] = structs.replace(samples[index], reward=reward)
    rest = iter(samples)
    groups = [structs.replace(group, samples=[next(rest) for _ in group.samples]) for group in batch.groups]
    return structs.replace(batch, groups=groups)


def theta_version(version: int, updates: int) -> int:
    """The version of the policy that is trained, for `prox: loglinear`, whose pi_prox is one version behind it.

    In a step of several updates that is the policy before it, of `version`, and the one in the making is the next.
    """
    return version + 1 if updates > 1 else version


def tokens_of(
    logprobs_N: Tensor, columns: TrainedTokens, objective: ObjectiveConfig, theta: int, entropy_N: Tensor | None = None
) -> Tokens:
    """The tokens as the objective sees them, evaluated by the weights of version `theta`. `prox_N` and `multiplier_N`
    are those of the step where they were computed before it."""
    prox_N = columns.prox_N
    if prox_N is None:
        prox_N = PROXIMALS[objective.prox](logprobs_N, columns.behaviour_N, theta - columns.versions_N)
    return Tokens(
        logprobs_N=logprobs_N,
        prox_N=prox_N,
        behaviour_N=columns.behaviour_N,
        advantages_N=columns.advantages_N,
        segment_N=columns.segment_N,
        segments=columns.segments,
        reference_N=columns.reference_N,
        entropy_N=entropy_N,
        multiplier_N=columns.multiplier_N,
    )

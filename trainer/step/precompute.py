"""Sequences of a batch, with the columns that must be computed for all of them before the first update.

    micro-batches --forward, reference weights--> log pi_ref                 if there is a reference model
    micro-batches --forward, policy weights-----> log pi before the step     if something needs it:
                                                    - several updates, and pi_prox is the policy before the step
                                                    - several updates, and corrections: their weights are those
                                                      of the policy before the step
                                                    - a correction computed over the whole batch
                                                    - an advantage that weights samples by importance weight
    --sum over ranks--> both log-probabilities of all trained tokens, on every rank --> advantages, corrections,
                                                                                        learning rate scale

Every rank fills in its own tokens and leaves 0 elsewhere, so the sum over ranks is exact. Every rank then computes the
same results, which depend neither on micro-batches nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import structs
from torch import Tensor

from async_grpo.algorithms import (
    PROXIMALS,
    Tokens,
    advantages_less_kl,
    correction_multiplier,
    ess_scale,
    ess_sums,
    penalise_rewards,
    sequence_weights,
)
from async_grpo.config import RunConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.telemetry.timeline import PhaseTimer
from async_grpo.wire import Batch
from trainer.batch.packing import PackedBatch, build_micro_batches, build_sequences
from trainer.batch.sequences import (
    TrainedTokens,
    TrainingSequence,
    attach_columns,
    normalise_advantages,
    replace_advantages,
    stack_trained_tokens,
)
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.ranks.distributed import is_counting_rank, sum_over_ranks


def prepare_sequences(
    policy: Policy, batch: Batch, config: RunConfig, *, reference: Reference | None, phases: PhaseTimer
) -> tuple[list[TrainingSequence], float | None]:
    """Return the sequences of a batch, and the scale of the learning rate. Under streaming, of a part of the batch.

    The scale is None if the learning rate is not scaled, or if its scale is computed from the backward passes.
    Forward passes are made only if something needs them.
    """
    objective = config.trainer.objective
    needs_policy = needs_policy_pass(config.trainer)
    with phases.span("pack"):
        sequences = build_sequences(batch, config)
    if reference is None and not needs_policy:
        if objective.advantage_norm == "batch":
            sequences = normalise_advantages(sequences)
        return sequences, None

    with phases.span("pack"):
        packed = build_micro_batches(sequences, config, policy.shape.attention_cost)
    trained_count = sum(sequence.trained_tokens for sequence in sequences)
    logprobs_N = reference_N = None
    if reference is not None:
        with phases.span("reference"), reference.activate_weights() as weights:
            reference_N = batch_logprobs(weights, packed, trained_count)
    if needs_policy:
        with phases.span("prox"):
            logprobs_N = batch_logprobs(policy, packed, trained_count)

    # Some advantages depend on these passes. The sequences above have advantages from the rewards alone, so build them
    # again.
    squared_weights = None
    if objective.advantages_use_weights:
        assert logprobs_N is not None
        squared_weights = squared_sample_weights(logprobs_N, sequences, objective, batch.version)
    if objective.subtracts_kl_from_rewards:
        assert reference_N is not None
        batch = subtract_kl_from_rewards(batch, sequences, reference_N, objective)
    if objective.advantages_use_weights or objective.subtracts_kl_from_rewards:
        with phases.span("pack"):
            sequences = build_sequences(batch, config, squared_weights)
    if objective.subtracts_kl_from_advantages:
        assert reference_N is not None
        sequences = subtract_kl_from_advantages(sequences, reference_N, objective, batch.version)
    if objective.advantage_norm == "batch":
        sequences = normalise_advantages(sequences)  # last, so that the trained advantages have mean 0

    if logprobs_N is None:
        return attach_columns(sequences, reference_N=reference_N), None
    theta = theta_version(batch.version, config.trainer.updates)
    tokens_before_step = objective_tokens(logprobs_N, stack_trained_tokens(sequences), objective, theta)
    sequences = attach_columns(
        sequences,
        reference_N=reference_N,
        prox_N=logprobs_N if objective.prox == "recompute" else None,
        multiplier_N=correction_multiplier(tokens_before_step, objective),
    )
    lr_scale = ess_scale(*ess_sums(tokens_before_step).tolist()) if objective.scales_learning_rate else None
    return sequences, lr_scale


def needs_policy_pass(trainer: TrainerConfig) -> bool:
    """True if the log-probabilities of the policy before the step need a separate pass."""
    objective = trainer.objective
    if objective.needs_forward_pass:
        return True
    # With one update, the forward pass of the update itself evaluates the policy before the step.
    return trainer.updates > 1 and bool(objective.prox == "recompute" or objective.corrections)


def batch_logprobs(policy: Policy, packed: PackedBatch, trained_count: int) -> Tensor:
    """Return log pi of all trained tokens of the batch, in order, on every rank."""
    results = policy.run_micro_batches(
        # It expects a loss first, which is not used here.
        packed.micro_batches,
        lambda logprobs_N, _entropy, _micro_batch: (logprobs_N.sum(), logprobs_N),
        train=False,
    )
    logprobs_N = torch.zeros(trained_count)
    if is_counting_rank():
        # Not strict: all stages but the last have no results.
        for micro_batch, micro_batch_logprobs_N in zip(packed.micro_batches, results, strict=False):
            logprobs_N[micro_batch.index_N] = micro_batch_logprobs_N
    return sum_over_ranks(logprobs_N)


def squared_sample_weights(
    logprobs_N: Tensor, sequences: Sequence[TrainingSequence], objective: ObjectiveConfig, version: int
) -> list[float]:
    """Return the squared importance weight of every sample; 0 for those without a trained token."""
    tokens = objective_tokens(logprobs_N, stack_trained_tokens(sequences), objective, version)
    trained_squares = iter(sequence_weights(tokens).square().tolist())
    return [next(trained_squares) if sequence.trained_tokens else 0.0 for sequence in sequences]


def subtract_kl_from_rewards(
    batch: Batch, sequences: Sequence[TrainingSequence], reference_N: Tensor, objective: ObjectiveConfig
) -> Batch:
    """Return the batch with rewards R - beta * KL, KL being summed over the trained tokens of the sample.

    The divergence is that of the policy that sampled, from the reference. M: samples with a trained token; the others
    keep their rewards, which still belong to the baseline of their group.
    """
    columns = stack_trained_tokens(sequences)
    tokens = objective_tokens(columns.behaviour_N, columns, objective, batch.version)
    samples = [sample for group in batch.groups for sample in group.samples]
    trained = [index for index, sequence in enumerate(sequences) if sequence.trained_tokens]
    rewards_M = torch.tensor([samples[index].reward for index in trained], dtype=torch.float64)
    penalised_M = penalise_rewards(
        rewards_M, tokens, reference_N, beta=objective.kl_beta, estimator=objective.kl_estimator
    )
    for index, reward in zip(trained, penalised_M.tolist(), strict=True):
        samples[index] = structs.replace(samples[index], reward=reward)

    remaining = iter(samples)
    groups = [structs.replace(group, samples=[next(remaining) for _ in group.samples]) for group in batch.groups]
    return structs.replace(batch, groups=groups)


def subtract_kl_from_advantages(
    sequences: Sequence[TrainingSequence], reference_N: Tensor, objective: ObjectiveConfig, version: int
) -> list[TrainingSequence]:
    """Return the sequences with advantages A - beta * KL, KL being summed over the token and those after it.

    The divergence is that of the policy that sampled, from the reference.
    """
    columns = stack_trained_tokens(sequences)
    tokens = objective_tokens(columns.behaviour_N, columns, objective, version)
    advantages_N = advantages_less_kl(
        columns.advantages_N.double(), tokens, reference_N, beta=objective.kl_beta, estimator=objective.kl_estimator
    )
    return replace_advantages(sequences, advantages_N)


def theta_version(version: int, updates: int) -> int:
    """Return the version number of the trained weights for `prox: loglinear`.

    That rule estimates the policy one version before this number. With one update, the number is `version`. With
    several, pi_prox must be the policy before the step, which is `version`, so the weights that the updates change
    count as version + 1.
    """
    return version + 1 if updates > 1 else version


def objective_tokens(
    logprobs_N: Tensor, columns: TrainedTokens, objective: ObjectiveConfig, theta: int, entropy_N: Tensor | None = None
) -> Tokens:
    """Return the input of the objective. `logprobs_N` are from the trained weights, which `theta` numbers.

    `prox_N` and `multiplier_N` are taken from the columns if they were computed before the step. Otherwise pi_prox
    follows from `logprobs_N`: with one update, `recompute` returns just these.
    """
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

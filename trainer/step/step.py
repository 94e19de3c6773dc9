"""One training step on one batch: version v -> v + 1, in one optimizer update or several.

    groups -> sequences --(forward passes before the step, if needed)--> sequences with columns
                                                                                       |
    for every mini-batch:   zero gradients, forward and backward, optimizer update  <--+

Every rank receives the whole batch, so advantages, loss weights and packing need no communication; gradients and a few
statistics do. A step makes `num_iterations` passes over the batch, of `mini_batches` updates each. Loss weights are
those of the mini-batch, advantages those of the whole batch. pi_prox, corrections and reference belong to the policy
before the step.

A streamed step (`trainer.streaming`) trains groups as they arrive, while others are still being generated. The loss is
a sum over sequences of (own weight / D). D, the number of tokens or sequences of the batch (by `aggregation`), is known
only after the last group. Gradients are therefore accumulated without D and divided once before the update, which gives
the same step up to rounding. The configuration rejects objectives that need the whole batch before the first
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from msgspec import structs
from torch import Tensor

from async_grpo.algorithms import aggregation_denominator, ess_scale, token_objective
from async_grpo.config import RunConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import NonFiniteStep
from async_grpo.telemetry.metrics import StepTotals
from async_grpo.telemetry.timeline import PhaseTimer
from async_grpo.wire import Batch
from trainer.batch.packing import PackedBatch, build_micro_batches, own_micro_batches, split_groups
from trainer.batch.sequences import MicroBatch, TrainingSequence, reweight_sequences
from trainer.model.policy import LossFunction, Policy
from trainer.model.reference import Reference
from trainer.step.precompute import objective_tokens, prepare_sequences, theta_version
from trainer.step.results import ADAPTER_TRAINING_PASSES, TRAINING_PASSES, StepValues
from trainer.step.statistics import StepSums, gap_sums, micro_batch_sums, reduce_sums


def train_step(
    policy: Policy,
    batch: Batch,
    config: RunConfig,
    *,
    lr: float,
    phases: PhaseTimer,
    reference: Reference | None = None,
) -> StepValues:
    """Train `batch.version` to the next version. All ranks call it.

    The result does not depend on the number of micro-batches or ranks (up to rounding). Raises NonFiniteStep if the
    loss or the gradient of an update is not finite: that update changes nothing, and those before it stand.
    """
    objective = config.trainer.objective
    totals = StepTotals(with_entropy=objective.entropy_coef > 0, with_reference=reference is not None)

    # Advantages, pi_prox and corrections belong to the policy before the step. Compute them here: the first update
    # changes the weights.
    sequences, lr_scale = prepare_sequences(policy, batch, config, reference=reference, phases=phases)
    add_sample_totals(totals, sequences)

    for update, mini_batch in enumerate(split_mini_batches(sequences, batch, config)):
        with phases.span("pack"):
            packed = build_micro_batches(mini_batch, config, policy.shape.attention_cost)
        loss = partial(
            micro_batch_loss,
            objective=objective,
            theta=theta_version(batch.version, config.trainer.updates),
            # After the first update the weights are no longer those that sampled, so there is no gap to measure.
            gap_version=batch.version if update == 0 else None,
        )
        with phases.span("train", micro_batches=len(packed.micro_batches)):
            policy.zero_grad()
            parts = forward_backward(policy, packed, loss, totals)
            sums, maxima = reduce_sums(parts)
        check_loss(sums["loss"], batch.version)
        set_lr_scale(totals, sums, objective, lr_scale)
        with phases.span("optimizer"):
            totals.norms.append(policy.update_weights(lr * totals.lr_scale))
        totals.add(sums, maxima)
    return totals.values()


def train_step_streamed(
    policy: Policy,
    parts: Iterable[Batch],
    config: RunConfig,
    *,
    version: int,
    lr: float,
    phases: PhaseTimer,
    reference: Reference | None = None,
) -> StepValues | None:
    """Train `version` to the next version on the groups of one batch, in order of arrival. All ranks call it.

    Returns None if `parts` ends before the batch is complete; the weights are unchanged then. Raises NonFiniteStep if
    the loss or the gradient is not finite; that changes no weights either.
    """
    objective = config.trainer.objective
    totals = StepTotals(with_entropy=objective.entropy_coef > 0, with_reference=reference is not None)
    sequences: list[TrainingSequence] = []
    statistics: list[StepSums] = []
    groups = 0
    is_complete = False

    policy.zero_grad()
    for part in parts:
        # Train a part immediately, even if it does not fill its micro-batches. The trainer would be idle otherwise, and
        # while it computes, more groups arrive for the next part.
        part_sequences, _ = prepare_sequences(policy, part, config, reference=reference, phases=phases)
        part_sequences = [replace(sequence, group=sequence.group + groups) for sequence in part_sequences]
        groups += len(part.groups)
        add_sample_totals(totals, part_sequences)
        with phases.span("pack"):
            packed = build_micro_batches(part_sequences, config, policy.shape.attention_cost)
        loss = partial(
            micro_batch_loss,
            objective=objective,
            theta=version,
            gap_version=version,
            # The weights are those of the part as a batch, so they contain its own D: multiply it out again.
            scale=loss_denominator(part_sequences, objective),
        )
        with phases.span("train", groups=len(part.groups)):
            statistics += forward_backward(policy, packed, loss, totals, sum_over_ranks=False)
        sequences += part_sequences
        is_complete = part.missing == 0
    if not is_complete:
        return None

    denominator_of_batch = loss_denominator(sequences, objective)
    with phases.span("train"):
        policy.sum_gradients(scale=1.0 / denominator_of_batch)
        sums, maxima = reduce_sums(statistics)
    sums["loss"] /= denominator_of_batch
    check_loss(sums["loss"], version)
    set_lr_scale(totals, sums, objective)
    with phases.span("optimizer"):
        totals.norms.append(policy.update_weights(lr * totals.lr_scale))
    totals.add(sums, maxima)
    return totals.values()


def split_mini_batches(
    sequences: Sequence[TrainingSequence], batch: Batch, config: RunConfig
) -> Iterator[Sequence[TrainingSequence]]:
    """Yield the sequences of each update, with the loss weights of their mini-batch."""
    trainer = config.trainer
    if trainer.updates == 1:
        yield sequences
        return
    for iteration in range(trainer.num_iterations):
        parts = split_groups(
            len(batch.groups), trainer.mini_batches, seed=config.seed, version=batch.version, iteration=iteration
        )
        for part in parts:
            mini_batch = [sequence for sequence in sequences if sequence.group in part]
            yield reweight_sequences(mini_batch, trainer.objective, config.sampling.max_tokens)


def forward_backward(
    policy: Policy, packed: PackedBatch, loss: LossFunction, totals: StepTotals, *, sum_over_ranks: bool = True
) -> list[StepSums]:
    """Accumulate the gradients of the micro-batches and return their statistics.

    `sum_over_ranks=False` leaves the sum over ranks to a later `Policy.sum_gradients`.
    """
    parts: list[StepSums] = policy.run_micro_batches(
        packed.micro_batches, loss, train=True, entropy=totals.with_entropy, sum_over_ranks=sum_over_ranks
    )
    totals.lengths += packed.lengths
    totals.token_capacity += packed.token_capacity
    totals.micro_batches += len(packed.micro_batches)
    totals.balances.append(packed.balance)
    passes = TRAINING_PASSES if policy.adapters is None else ADAPTER_TRAINING_PASSES
    totals.flops += passes * policy.shape.forward_flops(packed.lengths)
    return parts


def set_lr_scale(
    totals: StepTotals, sums: dict[str, float], objective: ObjectiveConfig, batch_scale: float | None = None
) -> None:
    """Set the scale of the learning rate for the correction `ess_lr`.

    `batch_scale`: scale of the whole batch, if it was computed before the step; else the update's own is used.
    """
    if not objective.scales_learning_rate:
        return
    if batch_scale is None:
        totals.lr_scale = ess_scale(sums["sequence_weight"], sums["sequence_weight_squared"], sums["sequences"])
    else:
        totals.lr_scale = batch_scale


def check_loss(loss: float, version: int) -> None:
    """Raise NonFiniteStep if the loss is not finite. Called before the update changes the weights."""
    if not math.isfinite(loss):
        raise NonFiniteStep(
            f"the loss of the step {version} -> {version + 1} is {loss}. The weights before this update are intact. "
            "Lower trainer.optimizer.lr, or the caps of trainer.objective"
        )


def micro_batch_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    batch: MicroBatch,
    *,
    objective: ObjectiveConfig,
    theta: int,
    gap_version: int | None,
    scale: float = 1.0,
) -> tuple[Tensor, StepSums]:
    """Return the loss of a micro-batch and its statistics.

    `theta`: version of the trained policy (`theta_version`). `gap_version`: version of the weights that evaluated the
    tokens; None between the updates of a step. `scale`: factor on the loss.
    """
    tokens = objective_tokens(logprobs_N, batch, objective, theta, entropy_N)
    result = token_objective(tokens, objective)
    loss = (result.loss_N * batch.weights_N).sum() * scale
    return loss, micro_batch_sums(tokens, batch, result, loss, objective, gap_version)


def add_sample_totals(totals: StepTotals, sequences: Sequence[TrainingSequence]) -> None:
    """Add the advantages of samples with a gradient, and the number of overlong samples."""
    totals.advantages += [sequence.advantage for sequence in sequences if sequence.trained_tokens]
    totals.overlong += sum(sequence.overlong for sequence in sequences)


def loss_denominator(sequences: Sequence[TrainingSequence], objective: ObjectiveConfig) -> float:
    """Return D of these sequences as one batch."""
    tokens_N = torch.tensor([sequence.denominator_tokens for sequence in sequences])
    groups_N = torch.tensor([sequence.group for sequence in sequences], dtype=torch.int64)
    return aggregation_denominator(objective.aggregation, tokens_N, groups_N)


def measure_gap(policy: Policy, batch: Batch, config: RunConfig) -> dict[str, float]:
    """Measure |behaviour - trainer| on tokens that `batch.version`, the current weights, sampled.

    Returns only `gap_tokens` (0) if there are none.
    """
    # Only samples with a reward have trained tokens. Which reward does not matter here.
    groups = [
        structs.replace(group, samples=[structs.replace(sample, reward=0.0) for sample in group.samples])
        for group in batch.groups
    ]
    micro_batches = own_micro_batches(structs.replace(batch, groups=groups), config)

    def gap(logprobs_N: Tensor, _entropy_N: Tensor | None, micro_batch: MicroBatch) -> tuple[Tensor, StepSums]:
        return logprobs_N.sum(), gap_sums(logprobs_N, micro_batch, batch.version)

    sums, maxima = reduce_sums(policy.run_micro_batches(micro_batches, gap, train=False))
    tokens = int(sums["gap_tokens"])
    if not tokens:
        return {"gap_tokens": 0}
    return {"logprob_gap_mean": sums["gap"] / tokens, "logprob_gap_max": maxima["gap"], "gap_tokens": tokens}

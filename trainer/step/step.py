"""One step from one batch: version v -> v + 1, in one optimizer update or several.

    groups -> sequences --(passes before the step, if something needs them)--> sequences with columns
                                                                                       |
    for every mini-batch:   zero gradients, forward and backward, optimizer update  <--+

All ranks see the whole batch, so advantages, loss weights and packing need no communication; gradients and a few
statistics do. A step makes `num_iterations` passes over the batch of `mini_batches` updates each. The loss weights are
those of the mini-batch, the advantages those of the whole batch, and pi_prox, corrections and reference are of the
policy before the step.

A streamed step (`trainer.streaming`) starts with the groups that are there, while others are still being generated. The
loss is a sum over sequences of (own weight / D), and D (tokens or sequences of the batch, by `aggregation`) is known
only when all groups are there. Gradients are therefore accumulated without it and divided once, before the optimizer
sees them: up to rounding, the step equals the one that waits for the whole batch. The configuration refuses objectives
that need the whole batch before the first micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from msgspec import structs
from torch import Tensor

from async_grpo.algorithms import denominator, ess_scale, token_objective
from async_grpo.config import RunConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import NonFiniteStep
from async_grpo.telemetry.metrics import StepTotals
from async_grpo.telemetry.timeline import PhaseTimer
from async_grpo.wire import Batch
from trainer.batch.packing import PackedBatch, pack, pack_for_rank, split_groups
from trainer.batch.sequences import MicroBatch, TrainingSequence, reweighed
from trainer.model.policy import LossFunction, Policy
from trainer.model.reference import Reference
from trainer.step.precompute import prepare_sequences, theta_version, tokens_of
from trainer.step.results import TRAINING, TRAINING_ADAPTERS, StepValues
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
    """Turn version `batch.version` into the next one. All ranks call it.

    The result does not depend on the number of micro-batches or ranks (up to rounding). Raises NonFiniteStep if the
    loss or the gradient of an update is not finite: that update changes nothing, and those before it stand.
    """
    objective, updates = config.trainer.objective, config.trainer.updates
    totals = StepTotals(with_entropy=objective.entropy_coef > 0, with_reference=reference is not None)

    # Advantages, and pi_prox and corrections where a separate pass computes them, are those of the policy before the
    # step. So they are fixed here, before the first update changes the weights.
    sequences, lr_scale = prepare_sequences(policy, batch, config, reference=reference, phases=phases)
    count_samples(totals, sequences)

    for update, mini_batch in enumerate(mini_batches(sequences, batch, config)):
        with phases.span("pack"):
            packed = pack(mini_batch, config, policy.shape.attention_cost)
        loss = partial(
            micro_batch_loss,
            objective=objective,
            theta=theta_version(batch.version, updates),
            # Behaviour and trainer can be compared only while the weights are those that sampled.
            gap_version=batch.version if update == 0 else None,
        )
        with phases.span("train", micro_batches=len(packed.micro_batches)):
            policy.zero_grad()
            parts = forward_backward(policy, packed, loss, totals)
            sums, maxima = reduce_sums(parts)
        check_loss(sums["loss"], batch.version)
        scale_lr(totals, sums, objective, lr_scale)
        with phases.span("optimizer"):
            totals.norms.append(policy.update(lr * totals.lr_scale))
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
    """Turn `version` into the next one, from the groups of one batch in the order in which they arrive. All ranks call
    it.

    None if `parts` ends before the batch is complete: nothing has changed then. Raises NonFiniteStep like `train_step`.
    """
    objective = config.trainer.objective
    totals = StepTotals(with_entropy=objective.entropy_coef > 0, with_reference=reference is not None)
    sequences: list[TrainingSequence] = []
    statistics: list[StepSums] = []
    missing = True

    policy.zero_grad()
    for part in parts:
        # A part is trained as soon as it is here, whether it fills its micro-batches or not: the trainer would be idle
        # otherwise, and while it computes, more groups gather for the next part.
        part_sequences, _ = prepare_sequences(policy, part, config, reference=reference, phases=phases)
        count_samples(totals, part_sequences)
        with phases.span("pack"):
            packed = pack(part_sequences, config, policy.shape.attention_cost)
        loss = partial(
            micro_batch_loss,
            objective=objective,
            theta=version,
            gap_version=version,
            # The weights are those of the part as a batch: its own D is taken out again.
            scale=loss_denominator(part_sequences, objective),
        )
        with phases.span("train", groups=len(part.groups)):
            statistics += forward_backward(policy, packed, loss, totals, total=False)
        sequences += part_sequences
        missing = part.missing > 0
    if missing:
        return None

    total = loss_denominator(sequences, objective)
    with phases.span("train"):
        policy.total_gradients(scale=1.0 / total)
        sums, maxima = reduce_sums(statistics)
    sums["loss"] /= total
    check_loss(sums["loss"], version)
    scale_lr(totals, sums, objective)
    with phases.span("optimizer"):
        totals.norms.append(policy.update(lr * totals.lr_scale))
    totals.add(sums, maxima)
    return totals.values()


def mini_batches(
    sequences: Sequence[TrainingSequence], batch: Batch, config: RunConfig
) -> Iterator[Sequence[TrainingSequence]]:
    """The sequences of each update, in order, with the loss weights of their mini-batch."""
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
            yield reweighed(mini_batch, trainer.objective, config.sampling.max_tokens)


def forward_backward(
    policy: Policy, packed: PackedBatch, loss: LossFunction, totals: StepTotals, *, total: bool = True
) -> list[StepSums]:
    """Add the gradients of the micro-batches to those that are there; returns their statistics. `total`: see
    `Policy.run`."""
    parts: list[StepSums] = policy.run(packed.micro_batches, loss, train=True, entropy=totals.with_entropy, total=total)
    totals.lengths += packed.lengths
    totals.slots += packed.slots
    totals.micro_batches += len(packed.micro_batches)
    totals.balances.append(packed.balance)
    passes = TRAINING if policy.adapters is None else TRAINING_ADAPTERS
    totals.flops += passes * policy.shape.forward_flops(packed.lengths)
    return parts


def scale_lr(
    totals: StepTotals, sums: dict[str, float], objective: ObjectiveConfig, lr_scale: float | None = None
) -> None:
    """Set the scale of the learning rate, for the correction `ess_lr`. `lr_scale`: of the whole batch, where it was
    computed before the step."""
    if objective.scales_step:
        of_update = ess_scale(sums["sequence_weight"], sums["sequence_weight_squared"], sums["sequences"])
        totals.lr_scale = of_update if lr_scale is None else lr_scale


def check_loss(loss: float, version: int) -> None:
    """Raise NonFiniteStep, before an update changes the weights."""
    if not math.isfinite(loss):
        raise NonFiniteStep(
            f"the loss of the step {version} -> {version + 1} is {loss}. The weights before it are intact. Lower "
            "trainer.optimizer.lr, or the caps of trainer.objective"
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
    """The loss of a micro-batch, and its statistics.

    `theta`: version of the policy that is trained (`theta_version`). `gap_version`: that of the weights that evaluated
    the tokens; None between the updates of a step. `scale`: factor on the weights of the tokens.
    """
    tokens = tokens_of(logprobs_N, batch, objective, theta, entropy_N)
    result = token_objective(tokens, objective)
    loss = (result.loss_N * batch.weights_N).sum() * scale
    return loss, micro_batch_sums(tokens, batch, result, loss, objective, gap_version)


def count_samples(totals: StepTotals, sequences: Sequence[TrainingSequence]) -> None:
    """Add what the totals keep of each sample."""
    totals.advantages += [sequence.advantage for sequence in sequences if sequence.counted]
    totals.overlong += sum(sequence.overlong for sequence in sequences)


def loss_denominator(sequences: Sequence[TrainingSequence], objective: ObjectiveConfig) -> float:
    """D of these sequences as one batch."""
    tokens = torch.tensor([sequence.counted for sequence in sequences])
    return denominator(objective.aggregation, tokens)


def measure_gap(policy: Policy, batch: Batch, config: RunConfig) -> dict[str, float]:
    """Measure |behaviour - trainer| of tokens that `batch.version`, the present weights, sampled; rewards do not
    matter. Without such tokens there is no gap, only their number."""
    groups = [
        structs.replace(group, samples=[structs.replace(sample, reward=0.0) for sample in group.samples])
        for group in batch.groups
    ]
    packed = pack_for_rank(structs.replace(batch, groups=groups), config)

    def gap(logprobs_N: Tensor, _entropy_N: Tensor | None, micro_batch: MicroBatch) -> tuple[Tensor, StepSums]:
        return logprobs_N.sum(), gap_sums(logprobs_N, micro_batch, batch.version)

    sums, maxima = reduce_sums(policy.run(packed.micro_batches, gap, train=False))
    tokens = int(sums["gap_tokens"])
    values = {"logprob_gap_mean": sums["gap"] / tokens, "logprob_gap_max": maxima["gap"]} if tokens else {}
    return {**values, "gap_tokens": tokens}

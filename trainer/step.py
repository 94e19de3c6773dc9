"""One optimizer step from one batch.

    groups -> sequences -> micro-batches --(survey)--> forward, backward --> gradients --optimizer--> next version

All ranks see the whole batch, so advantages, loss weights and the packing need no communication; gradients and a dozen
statistics do. Only a correction that must see the log-probabilities of the whole batch costs a pass of its own, the
survey.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core import parallel_state
from msgspec.structs import replace
from torch import Tensor

from async_grpo.algorithms import ess_scale, token_objective
from async_grpo.config import RunConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import TrainingError
from async_grpo.wire import Batch
from trainer.batching import pack_batch
from trainer.phases import Phases
from trainer.policy import Policy
from trainer.sequences import MicroBatch, Targets, micro_batch, sequences_of, targets_of
from trainer.survey import survey, tokens_of
from trainer.tally import Tally, reduce_tallies, tally, tally_gap


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of the whole batch, the same on all ranks. Tokens are the trained ones."""

    loss: float
    grad_norm: float
    clip_fraction: float
    """Tokens that left the trust region."""
    rejected_fraction: float
    """Tokens that a correction multiplies by 0."""
    lr_scale: float
    """What the learning rate was multiplied by; 1 without `ess_lr`."""
    weight_mean: float
    """rho = pi / pi_behaviour before any cap, pi being the policy before the step."""
    weight_max: float
    ess: float
    """Effective sample size (sum rho)^2 / sum rho^2, as a share of the tokens."""
    entropy_estimate: float
    """-mean log-probability of the sampled tokens: unbiased for the entropy only if on-policy."""
    entropy: float | None
    """Mean entropy of the distributions; only with an entropy bonus."""
    trained_tokens: int
    logprob_gap_mean: float | None
    """|behaviour - trainer| over completions that this very version sampled from first token to last; None if
    there are none. Others cannot be compared: where the KV cache is kept, part of it is of older weights."""
    logprob_gap_max: float | None
    gap_tokens: int
    micro_batches: int
    """On each data-parallel rank."""
    packing_efficiency: float
    """Tokens read / (micro-batches * micro_batch_tokens)."""


class Packed(NamedTuple):
    """A batch, cut for the ranks."""

    micro_batches: list[MicroBatch]
    """Of this data-parallel rank."""
    whole: Targets
    """All trained tokens of the batch."""
    efficiency: float
    """How full the micro-batches of all ranks are."""


def train_step(policy: Policy, batch: Batch, config: RunConfig, *, lr: float, phases: Phases) -> StepResult:
    """Turn version `batch.version` into the next one.

    The result does not depend on the number of micro-batches or ranks (up to rounding). Raises
    TrainingError, before any weight changes, if the loss or the gradient is not finite.
    """
    objective = config.trainer.objective
    with phases.span("pack"):
        packed = pack_for_rank(batch, config)
    micro_batches = packed.micro_batches
    with phases.span("train", micro_batches=len(micro_batches)):
        if objective.needs_whole_batch:
            micro_batches = survey(policy, micro_batches, packed.whole, objective, batch.version)
        policy.zero_grad()
        loss = _Loss(objective, batch.version)
        found = policy.run(micro_batches, loss, train=True, entropy=objective.entropy_coef > 0)
        sums, maxima = reduce_tallies(found)
    if not math.isfinite(sums["loss"]):
        raise TrainingError(
            f"the loss of the step {batch.version} -> {batch.version + 1} is {sums['loss']}. The weights before it "
            "are intact. Lower trainer.optimizer.lr, or the caps of trainer.objective"
        )
    scale = _lr_scale(objective, sums)
    with phases.span("optimizer"):
        grad_norm = policy.update(lr * scale)
    return _result(objective, sums, maxima, grad_norm, scale, packed)


def measure_gap(policy: Policy, batch: Batch, config: RunConfig) -> dict[str, float]:
    """|behaviour - trainer| of tokens that `batch.version`, the present weights, sampled; rewards do not matter."""
    groups = [replace(group, samples=[replace(one, reward=0.0) for one in group.samples]) for group in batch.groups]
    packed = pack_for_rank(replace(batch, groups=groups), config)

    def gap(logprobs_N: Tensor, _entropy_N: Tensor | None, targets: MicroBatch) -> tuple[Tensor, Tally]:
        return logprobs_N.sum(), tally_gap(logprobs_N, targets, batch.version)

    sums, maxima = reduce_tallies(policy.run(packed.micro_batches, gap, train=False))
    return {
        "logprob_gap_mean": sums["gap"] / max(1.0, sums["gap_tokens"]),
        "logprob_gap_max": maxima["gap"],
        "gap_tokens": int(sums["gap_tokens"]),
    }


def pack_for_rank(batch: Batch, config: RunConfig) -> Packed:
    """The batch as sequences, and which of them this data-parallel rank trains, in which micro-batches."""
    sequences = sequences_of(batch, config.trainer.objective, longest=config.sampling.max_tokens)
    lengths = [sequence.length for sequence in sequences]
    ranks, max_tokens = parallel_state.get_data_parallel_world_size(), config.trainer.micro_batch_tokens
    packing = pack_batch(lengths, ranks=ranks, max_tokens=max_tokens)
    mine = packing[parallel_state.get_data_parallel_rank()]
    micro_batches = [micro_batch([sequences[i] for i in members]) for members in mine]
    return Packed(micro_batches, targets_of(sequences), sum(lengths) / (ranks * len(mine) * max_tokens))


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss function of a micro-batch; hands back its tally."""

    objective: ObjectiveConfig
    version: int

    def __call__(self, logprobs_N: Tensor, entropy_N: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tally]:
        tokens = tokens_of(logprobs_N, batch, self.objective, self.version, entropy_N)
        found = token_objective(tokens, self.objective, batch.given_N)
        loss = (found.loss_N * batch.weights_N).sum()
        return loss, tally(tokens, batch, found, loss, self.version)


def _lr_scale(objective: ObjectiveConfig, sums: dict[str, float]) -> float:
    if not objective.scales_step:
        return 1.0
    return ess_scale(sums["sequence_weight"], sums["sequence_weight_squared"], sums["sequences"])


def _result(
    objective: ObjectiveConfig,
    sums: dict[str, float],
    maxima: dict[str, float],
    grad_norm: float,
    lr_scale: float,
    packed: Packed,
) -> StepResult:
    tokens = max(1.0, sums["tokens"])
    gap_tokens = int(sums["gap_tokens"])
    return StepResult(
        loss=sums["loss"],
        grad_norm=grad_norm,
        clip_fraction=sums["clipped"] / tokens,
        rejected_fraction=sums["rejected"] / tokens,
        lr_scale=lr_scale,
        weight_mean=sums["weight"] / tokens,
        weight_max=maxima["weight"],
        ess=sums["weight"] ** 2 / (tokens * sums["weight_squared"]) if sums["weight_squared"] else 0.0,
        entropy_estimate=-sums["logprob"] / tokens,
        entropy=sums["entropy"] / tokens if objective.entropy_coef > 0 else None,
        trained_tokens=int(sums["tokens"]),
        logprob_gap_mean=sums["gap"] / gap_tokens if gap_tokens else None,
        logprob_gap_max=maxima["gap"] if gap_tokens else None,
        gap_tokens=gap_tokens,
        micro_batches=len(packed.micro_batches),
        packing_efficiency=packed.efficiency,
    )

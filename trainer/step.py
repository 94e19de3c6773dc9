"""One optimizer step from one batch.

    groups -> sequences -> micro-batches --forward, backward--> gradients --optimizer--> next version

pi_prox of the decoupled loss is the policy just before the step. With one optimizer step a batch,
that is the policy that the forward pass of the step itself evaluates, so its log-probabilities are
taken there, detached: the same numbers as a pass of their own would give, without its cost (a
quarter of the step). The ratio to it is then 1 and only w corrects for the age of the tokens.

All ranks see the whole batch, so advantages, loss weights and the packing need no communication;
gradients and a dozen statistics do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from msgspec.structs import replace
from torch import Tensor

from async_grpo.algorithms import TokenLoss, decoupled, importance_weight, ppo_clip
from async_grpo.config.schema import ObjectiveConfig, TrainerConfig
from async_grpo.errors import TrainingError
from async_grpo.wire import Batch
from trainer.batching import pack_batch
from trainer.parallel import max_over_ranks, sum_over_ranks
from trainer.phases import Phases
from trainer.policy import Policy
from trainer.sequences import MicroBatch, micro_batch, sequences_of

SUMS = ("loss", "tokens", "clipped", "weight", "weight_squared", "logprob", "gap", "gap_tokens")
MAXIMA = ("weight", "gap")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of the whole batch, the same on all ranks. Tokens are the trained ones."""

    loss: float
    grad_norm: float
    clip_fraction: float
    weight_mean: float
    """w = pi / pi_behaviour before the cap, pi being the policy before the step."""
    weight_max: float
    ess: float
    """Effective sample size (sum w)^2 / sum w^2, as a share of the tokens."""
    entropy_estimate: float
    """-mean log-probability of the sampled tokens: unbiased for the entropy only if on-policy."""
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


def train_step(policy: Policy, batch: Batch, config: TrainerConfig, *, lr: float, phases: Phases) -> StepResult:
    """Turn version `batch.version` into the next one.

    The result does not depend on the number of micro-batches or ranks (up to rounding). Raises
    TrainingError, before any weight changes, if the loss or the gradient is not finite.
    """
    with phases.span("pack"):
        packed, efficiency = pack_for_rank(batch, config)
    with phases.span("train", micro_batches=len(packed)):
        policy.zero_grad()
        found = policy.run(packed, _Objective(config.objective, batch.version), train=True)
        sums, maxima = _reduce(found)
    if not math.isfinite(sums["loss"]):
        raise TrainingError(
            f"the loss of the step {batch.version} -> {batch.version + 1} is {sums['loss']}. The weights before it "
            "are intact. Lower trainer.optimizer.lr or trainer.objective.behaviour_cap"
        )
    with phases.span("optimizer"):
        grad_norm = policy.update(lr)
    return _result(sums, maxima, grad_norm, len(packed), efficiency)


def measure_gap(policy: Policy, batch: Batch, config: TrainerConfig) -> dict[str, float]:
    """|behaviour - trainer| of tokens that `batch.version`, the present weights, sampled; rewards do not matter."""
    groups = [replace(group, samples=[replace(one, reward=0.0) for one in group.samples]) for group in batch.groups]
    packed, _ = pack_for_rank(replace(batch, groups=groups), config)
    found = policy.run(packed, _Objective(config.objective, batch.version), train=False)
    sums, maxima = _reduce(found)
    return {
        "logprob_gap_mean": sums["gap"] / max(1.0, sums["gap_tokens"]),
        "logprob_gap_max": maxima["gap"],
        "gap_tokens": int(sums["gap_tokens"]),
    }


def pack_for_rank(batch: Batch, config: TrainerConfig) -> tuple[list[MicroBatch], float]:
    """This data-parallel rank's micro-batches, and how full those of all ranks are."""
    sequences = sequences_of(batch.groups, config.objective)
    lengths = [sequence.length for sequence in sequences]
    ranks = parallel_state.get_data_parallel_world_size()
    packing = pack_batch(lengths, ranks=ranks, max_tokens=config.micro_batch_tokens)
    mine = packing[parallel_state.get_data_parallel_rank()]
    room = ranks * len(mine) * config.micro_batch_tokens
    return [micro_batch([sequences[i] for i in members]) for members in mine], sum(lengths) / room


@dataclass(frozen=True, slots=True)
class _Objective:
    """The loss function of a micro-batch; hands back (sums [SUMS], maxima [MAXIMA])."""

    config: ObjectiveConfig
    version: int

    def __call__(self, logprobs_N: Tensor, batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        token = self._token_loss(logprobs_N, batch)
        loss = (token.loss_N * batch.weights_N).sum()
        return loss, _statistics(loss, token, logprobs_N.detach(), batch, self.version)

    def _token_loss(self, logprobs_N: Tensor, batch: MicroBatch) -> TokenLoss:
        low, high = self.config.clip_low, self.config.clip_high
        if self.config.loss == "ppo_clip":
            return ppo_clip(logprobs_N, batch.behaviour_N, batch.advantages_N, clip_low=low, clip_high=high)
        return decoupled(
            logprobs_N,
            logprobs_N.detach(),
            batch.behaviour_N,
            batch.advantages_N,
            clip_low=low,
            clip_high=high,
            behaviour_cap=self.config.behaviour_cap,
        )


def _statistics(
    loss: Tensor, token: TokenLoss, logprobs_N: Tensor, batch: MicroBatch, version: int
) -> tuple[Tensor, Tensor]:
    weight_N = importance_weight(logprobs_N, batch.behaviour_N).double()
    current_N = batch.versions_N == version
    gap_N = (logprobs_N - batch.behaviour_N).abs().double() * current_N
    sums = [
        loss.detach().double(),
        torch.tensor(float(len(logprobs_N)), dtype=torch.float64),
        token.clipped_N.sum().double(),
        weight_N.sum(),
        weight_N.square().sum(),
        logprobs_N.double().sum(),
        gap_N.sum(),
        current_N.sum().double(),
    ]
    zero = torch.zeros(1, dtype=torch.float64)
    maxima = [torch.cat([values_N, zero]).max() for values_N in (weight_N, gap_N)]
    return torch.stack(sums), torch.stack(maxima)


def _reduce(found: Many[tuple[Tensor, Tensor]]) -> tuple[dict[str, float], dict[str, float]]:
    """Over micro-batches and ranks. Tensor-parallel ranks hold the same numbers: the first one counts."""
    sums, maxima = torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)
    if found and parallel_state.get_tensor_model_parallel_rank() == 0:
        sums = torch.stack([part for part, _ in found]).sum(0)
        maxima = torch.stack([part for _, part in found]).amax(0)
    return (
        dict(zip(SUMS, sum_over_ranks(sums).tolist(), strict=True)),
        dict(zip(MAXIMA, max_over_ranks(maxima).tolist(), strict=True)),
    )


def _result(
    sums: dict[str, float], maxima: dict[str, float], grad_norm: float, micro_batches: int, efficiency: float
) -> StepResult:
    tokens = max(1.0, sums["tokens"])
    gap_tokens = int(sums["gap_tokens"])
    return StepResult(
        loss=sums["loss"],
        grad_norm=grad_norm,
        clip_fraction=sums["clipped"] / tokens,
        weight_mean=sums["weight"] / tokens,
        weight_max=maxima["weight"],
        ess=sums["weight"] ** 2 / (tokens * sums["weight_squared"]) if sums["weight_squared"] else 0.0,
        entropy_estimate=-sums["logprob"] / tokens,
        trained_tokens=int(sums["tokens"]),
        logprob_gap_mean=sums["gap"] / gap_tokens if gap_tokens else None,
        logprob_gap_max=maxima["gap"] if gap_tokens else None,
        gap_tokens=gap_tokens,
        micro_batches=micro_batches,
        packing_efficiency=efficiency,
    )

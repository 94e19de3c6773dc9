"""What a step found: sums over micro-batches, ranks and updates, and the figures made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from async_grpo.errors import NonFiniteStep
from trainer.flops import TRAINING, ModelCost
from trainer.packing import Packed
from trainer.sequences import Sequence
from trainer.tally import MAXIMA, SUMS


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of the whole batch, the same on all ranks. Tokens are the trained ones, each as often as it was trained."""

    loss: float
    """Mean over the updates of the step; so is `grad_norm`."""
    grad_norm: float
    clip_fraction: float
    """Tokens that left the trust region."""
    clip_low_fraction: float
    """Those that left it below: the ratio has fallen."""
    clip_high_fraction: float
    rejected_fraction: float
    """Tokens that a correction multiplies by 0."""
    lr_scale: float
    """What the learning rate was multiplied by; 1 without `ess_lr`."""
    weight_mean: float
    """rho = pi / pi_behaviour before any cap, pi being the policy before the update."""
    weight_max: float
    ess: float
    """Effective sample size (sum rho)^2 / sum rho^2, as a share of the tokens."""
    kl: float | None
    """Mean divergence from the reference model, by objective.kl_estimator; None without one."""
    entropy_estimate: float
    """-mean log-probability of the sampled tokens: unbiased for the entropy only if on-policy."""
    entropy: float | None
    """Mean entropy of the distributions; only with an entropy bonus."""
    advantage_mean: float
    """Over the samples that a verifier could judge."""
    advantage_std: float
    trained_tokens: int
    overlong_samples: int
    """Truncated or dropped because they fit no micro-batch."""
    logprob_gap_mean: float | None
    """|behaviour - trainer| over completions that this very version sampled from first token to last; None if
    there are none. Others cannot be compared: where the KV cache is kept, part of it is of older weights."""
    logprob_gap_max: float | None
    gap_tokens: int
    updates: int
    micro_batches: int
    """On each data-parallel rank."""
    packing_efficiency: float
    """Tokens read / (micro-batches * micro_batch_tokens)."""
    rank_balance: float
    """Mean work of a data-parallel rank / that of the busiest."""
    read_tokens: int
    """Positions that were trained through: with prompts and all other context."""
    model_flops: float
    """Useful floating-point operations of the forward and backward passes, all ranks; see `flops`."""


@dataclass(slots=True)
class StepFigures:
    """Grows with every pass and every update of a step."""

    cost: ModelCost
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MAXIMA, 0.0))
    norms: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    slots: int = 0
    micro_batches: int = 0
    balances: list[float] = field(default_factory=list)
    members: list[Sequence] = field(default_factory=list)
    """All sequences of the batch, once."""
    lr_scale: float = 1.0

    def read(self, packed: Packed) -> None:
        """These micro-batches were trained."""
        self.lengths += packed.lengths
        self.slots += packed.slots
        self.micro_batches += len(packed.micro_batches)
        self.balances.append(packed.balance)

    def add(self, sums: dict[str, float], maxima: dict[str, float]) -> None:
        """What one update found."""
        self.sums = {name: self.sums[name] + value for name, value in sums.items()}
        self.maxima = {name: max(self.maxima[name], value) for name, value in maxima.items()}

    def result(self, *, entropy: bool, reference: bool) -> StepResult:
        """`entropy`, `reference`: whether there was one."""
        sums, updates = self.sums, len(self.norms)
        tokens, gap_tokens = max(1.0, sums["tokens"]), int(sums["gap_tokens"])
        advantages = [member.advantage for member in self.members if member.counted]
        return StepResult(
            loss=sums["loss"] / updates,
            grad_norm=sum(self.norms) / updates,
            clip_fraction=sums["clipped"] / tokens,
            clip_low_fraction=sums["clipped_low"] / tokens,
            clip_high_fraction=sums["clipped_high"] / tokens,
            rejected_fraction=sums["rejected"] / tokens,
            lr_scale=self.lr_scale,
            weight_mean=sums["weight"] / tokens,
            weight_max=self.maxima["weight"],
            ess=sums["weight"] ** 2 / (tokens * sums["weight_squared"]) if sums["weight_squared"] else 0.0,
            kl=sums["kl"] / tokens if reference else None,
            entropy_estimate=-sums["logprob"] / tokens,
            entropy=sums["entropy"] / tokens if entropy else None,
            advantage_mean=_mean(advantages),
            advantage_std=_deviation(advantages),
            trained_tokens=int(sums["tokens"]),
            overlong_samples=sum(member.overlong for member in self.members),
            logprob_gap_mean=sums["gap"] / gap_tokens if gap_tokens else None,
            logprob_gap_max=self.maxima["gap"] if gap_tokens else None,
            gap_tokens=gap_tokens,
            updates=updates,
            micro_batches=self.micro_batches,
            packing_efficiency=sum(self.lengths) / self.slots,
            rank_balance=_mean(self.balances),
            read_tokens=sum(self.lengths),
            model_flops=TRAINING * self.cost.forward(self.lengths),
        )


def refuse_non_finite(loss: float, version: int) -> None:
    """Raise NonFiniteStep for such a loss, of the step from `version`."""
    if not math.isfinite(loss):
        raise NonFiniteStep(
            f"the loss of the step {version} -> {version + 1} is {loss}. The weights before it are intact. "
            "Lower trainer.optimizer.lr, or the caps of trainer.objective"
        )


def _mean(values: Many[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Many[float]) -> float:
    centre = _mean(values)
    return math.sqrt(_mean([(value - centre) ** 2 for value in values]))

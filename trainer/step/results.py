"""What a step found: sums over micro-batches, ranks and updates, and the figures made of them.

How many floating-point operations a model needs, from its Hugging Face configuration. Pure.

    forward pass over a sequence of n tokens = 2 * M * n  +  2 * L * H * n^2

M weights of the matrices that a token meets: attention's four, the MLP's three, and the output layer. Of a mixture of
experts: the router, and the MLPs of the experts that a token is sent to (`num_experts_per_tok`), not of all. The
embedding is a look-up and counts nothing. H = heads * head size; scores and weighted values take 2 * n * H each for a
token that sees n others, and n / 2 on average under the causal mask. A multiplication and an addition are two.

The backward pass takes twice the forward one. What is computed anew to save memory (`trainer.recompute`) is not
counted: the figures are of useful work.

The row of a training step: what its batch was like, what the step did, and how long it took.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from async_grpo.errors import NonFiniteStep
from async_grpo.staleness import age
from async_grpo.telemetry.timeline import START, WAIT
from async_grpo.wire import Batch, Group
from trainer.batch.packing import Packed
from trainer.batch.sequences import Sequence
from trainer.step.statistics import MAXIMA, SUMS

TRAINING = 3
"""Forward and backward, in forward passes."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """M and L * H of the formula."""

    weights: int
    attention: int

    @property
    def quadratic(self) -> float:
        """Cost of attention, of a sequence of one token, in that of its matrices: (2 L H) / (2 M)."""
        return self.attention / self.weights

    def forward(self, lengths: Iterable[int]) -> float:
        """Operations of one forward pass over sequences of these lengths."""
        return float(sum(2 * self.weights * n + 2 * self.attention * n * n for n in lengths))


def model_cost(hf: Any) -> ModelCost:
    """Of Qwen2, Qwen3, Llama, and of Qwen3-MoE, whose layers may be dense or mixed."""
    hidden, layers = hf.hidden_size, hf.num_hidden_layers
    head = getattr(hf, "head_dim", None) or hidden // hf.num_attention_heads
    queries, keys = hf.num_attention_heads * head, hf.num_key_value_heads * head
    weights = layers * hidden * (2 * queries + 2 * keys) + hidden * hf.vocab_size
    weights += sum(_mixed(hf) if _is_mixed(hf, layer) else 3 * hidden * hf.intermediate_size for layer in range(layers))
    return ModelCost(weights, layers * queries)


def _is_mixed(hf: Any, layer: int) -> bool:
    if not getattr(hf, "num_experts", 0) or layer in (getattr(hf, "mlp_only_layers", None) or ()):
        return False
    return (layer + 1) % (getattr(hf, "decoder_sparse_step", None) or 1) == 0


def _mixed(hf: Any) -> int:
    """Weights that a token meets in the experts of a layer."""
    return int(hf.hidden_size * (hf.num_experts + 3 * hf.num_experts_per_tok * hf.moe_intermediate_size))


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
class StepTotals:
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


PHASES = (WAIT, "pack", "prox", "reference", "train", "optimizer", "publish", "checkpoint")


COMPUTE = ("pack", "prox", "reference", "train", "optimizer")
"""What the ranks spend on the step itself."""


def step_row(
    batch: Batch, result: StepResult | None, *, lr: float, seconds: dict[str, float], peak_flops: float | None = None
) -> dict[str, Any]:
    """For metrics.jsonl; `step` is the version that the step made; what was not measured is left out.

    `result` is None for a step that was skipped. It is written before the step's own checkpoint: `checkpoint_s` and
    `step_s` have the one before. `peak_flops`: of all ranks together, a second.
    """
    outcome = {key: value for key, value in asdict(result).items() if value is not None} if result else {}
    return {
        "kind": "step",
        "step": batch.version + 1,
        "version": batch.version,
        "epoch": batch.epoch,
        "time_s": time.time(),
        "replayed": batch.replayed,
        "groups": len(batch.groups),
        "lr": lr,
        **_rewards(batch.groups),
        **_ages(batch),
        **outcome,
        **(_speed(result, sum(seconds.get(name, 0.0) for name in COMPUTE), peak_flops) if result else {}),
        "skipped_steps": int(result is None),
        **{f"{name}_s": seconds.get(name, 0.0) for name in PHASES},
        "start_s": seconds.get(START, 0.0),
        "step_s": sum(taken_s for name, taken_s in seconds.items() if name != START),
    }


def _speed(result: StepResult, compute_s: float, peak_flops: float | None) -> dict[str, float]:
    """Over the time that the ranks compute. MFU is of useful operations: passes before the first update and what is
    computed anew take time and count nothing."""
    if compute_s <= 0:
        return {}
    used = {} if peak_flops is None else {"mfu": result.model_flops / (compute_s * peak_flops)}
    return {"tokens_per_s": result.read_tokens / compute_s, **used}


def _rewards(groups: list[Group]) -> dict[str, Any]:
    """Over verifiable samples; `informative_groups` is the share of groups whose rewards differ."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        **({"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))} if rewards else {}),
        "unverifiable_samples": len(samples) - len(rewards),
        "informative_groups": sum(_informative(group) for group in groups) / len(groups),
        "completion_tokens_mean": float(np.mean([len(sample.token_ids()) for sample in samples])),
    }


def _informative(group: Group) -> bool:
    """Whether the rewards of the group differ, so that it has a gradient."""
    return len({sample.reward for sample in group.samples if sample.reward is not None}) > 1


def _ages(batch: Batch) -> dict[str, Any]:
    """Ages of the tokens that get a gradient, in optimizer steps, and how many are too old to."""
    tokens: Counter[int] = Counter()
    masked = 0
    for sample in (sample for group in batch.groups for sample in group.samples if sample.reward is not None):
        versions, counts = np.unique(sample.token_versions()[sample.written_by_policy()], return_counts=True)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
            if version < batch.mask_below:
                masked += count
            else:
                tokens[age(batch.version, version)] += count
    total = max(1, tokens.total())
    return {
        "masked_tokens": masked,
        "age_mean": sum(steps * count for steps, count in tokens.items()) / total,
        "age_max": max(tokens, default=0),
        "age_histogram": {str(steps): tokens[steps] for steps in sorted(tokens)},
    }

"""Statistics of a step, summed over micro-batches and ranks, and a watch on the log-probability gap.

The gap is |log-probability of the engine - log-probability of the trainer| of a token under the same weights. It can
only be measured on completions that the current version sampled from beginning to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo.algorithms import Objective, Tokens, ess_sums, policy_kl
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.telemetry.metrics import MAXIMA, SUMS
from async_grpo.wire import Batch
from trainer.batch.sequences import TrainedTokens
from trainer.ranks.distributed import is_counting_rank, max_over_ranks, sum_over_ranks

MIN_ZERO_TOKENS = 256
"""Number of tokens with a gap of exactly 0 that two different programs do not reach by accident."""
MIN_SAME_TOKENS = 64
SAME_STEPS = 4
"""Number of consecutive steps, of at least MIN_SAME_TOKENS tokens each, with a gap that is the same to the last
digit. The tokens differ from step to step, so that does not happen by accident."""

StepSums = tuple[Tensor, Tensor]
"""(SUMS, MAXIMA), float64."""

SEQUENCE_RATIO_LOSSES = ("gspo", "topr")
"""Losses whose trust region limits the ratio of a sequence, not of a token."""


def micro_batch_sums(
    tokens: Tokens,
    columns: TrainedTokens,
    result: Objective,
    loss: Tensor,
    objective: ObjectiveConfig,
    gap_version: int | None,
) -> StepSums:
    """Return the statistics of one micro-batch.

    `gap_version`: version of the weights that evaluated it; None between the updates of a step, where no gap can be
    measured.
    """
    logprobs_N = tokens.logprobs_N.detach().double()
    weight_N = tokens.log_rho_N.exp().double()
    gap_N, gap_tokens = _measure_gap(logprobs_N, columns, gap_version)
    is_above_N = _ratio_above_one(tokens, objective)
    sequence_weight, sequence_weight_squared, sequences = ess_sums(tokens.detached())
    sums = {
        "loss": loss.detach().double(),
        "tokens": _scalar(len(logprobs_N)),
        "clipped": result.clipped_N.sum().double(),
        "clipped_low": (result.clipped_N & ~is_above_N).sum().double(),
        "clipped_high": (result.clipped_N & is_above_N).sum().double(),
        "rejected": result.rejected_N.sum().double(),
        "weight": weight_N.sum(),
        "weight_squared": weight_N.square().sum(),
        "sequence_weight": sequence_weight,
        "sequence_weight_squared": sequence_weight_squared,
        "sequences": sequences,
        "logprob": logprobs_N.sum(),
        "entropy": _scalar(0) if tokens.entropy_N is None else tokens.entropy_N.detach().double().sum(),
        "kl": _sum_kl(tokens, objective),
        "gap": gap_N.sum(),
        "gap_tokens": gap_tokens,
    }
    maxima = {"weight": _largest(weight_N), "gap": _largest(gap_N)}
    return torch.stack([sums[name] for name in SUMS]), torch.stack([maxima[name] for name in MAXIMA])


def gap_sums(logprobs_N: Tensor, columns: TrainedTokens, gap_version: int) -> StepSums:
    """Return the statistics of the gap; all others are 0."""
    gap_N, gap_tokens = _measure_gap(logprobs_N.detach().double(), columns, gap_version)
    sums = {"gap": gap_N.sum(), "gap_tokens": gap_tokens}
    maxima = {"gap": _largest(gap_N)}
    return (
        torch.stack([sums.get(name, _scalar(0)) for name in SUMS]),
        torch.stack([maxima.get(name, _scalar(0)) for name in MAXIMA]),
    )


def reduce_sums(parts: Sequence[StepSums]) -> tuple[dict[str, float], dict[str, float]]:
    """Reduce the statistics over micro-batches and ranks. Returns (sums, maxima) by name."""
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    maxima = torch.zeros(len(MAXIMA), dtype=torch.float64)
    # Ranks that hold copies of the same numbers (tensor and context parallel) must not count them again.
    if parts and is_counting_rank():
        sums = torch.stack([part for part, _ in parts]).sum(0)
        maxima = torch.stack([part for _, part in parts]).amax(0)
    return (
        dict(zip(SUMS, sum_over_ranks(sums).tolist(), strict=True)),
        dict(zip(MAXIMA, max_over_ranks(maxima).tolist(), strict=True)),
    )


class GapWatch:
    """Warns about gaps that an engine and a trainer with different kernels are unlikely to have.

    none      all samples were trained, some by the current version alone, and yet the gap covers no token
    zero      exactly 0 over MIN_ZERO_TOKENS tokens, in one step or several, whose log-probabilities are not 0 (those of
              a policy that has become certain are 0 on both sides)
    constant  mean and maximum equal those of the step before to the last digit, SAME_STEPS times in a row

    It warns once per process. The run goes on: with batch-invariant kernels on both sides, a gap of exactly 0 is
    intended.
    """

    def __init__(self) -> None:
        self._warned = False
        self._zero_tokens = 0
        self._last_gap: tuple[float, float] | None = None
        self._same_steps = 1

    def check_step(self, batch: Batch, values: Mapping[str, Any]) -> str | None:
        """Return a warning about a trained step, or None."""
        # Later updates and truncated samples leave tokens of the current version without a gap, which is no fault.
        must_have_gap = values["updates"] == 1 and not values["overlong_samples"]
        current = _current_logprobs(batch, rewarded_only=True)
        return self._warn_once(values, current, f"step {batch.version + 1}", must_have_gap=must_have_gap)

    def check_probe(self, batch: Batch, values: Mapping[str, Any]) -> str | None:
        """Return a warning about the probe of the final version, whose samples have no rewards, or None."""
        current = _current_logprobs(batch, rewarded_only=False)
        return self._warn_once(values, current, f"the probe of version {batch.version}", must_have_gap=True)

    def _warn_once(
        self, values: Mapping[str, Any], current: npt.NDArray[np.float32], source: str, *, must_have_gap: bool
    ) -> str | None:
        if self._warned:
            return None
        reason = self._update_and_check(values, current, source, must_have_gap=must_have_gap)
        if reason is None:
            return None
        self._warned = True
        return f"logprob_gap may measure nothing: {reason}. {_CAUSES}"

    def _update_and_check(
        self, values: Mapping[str, Any], current: npt.NDArray[np.float32], source: str, *, must_have_gap: bool
    ) -> str | None:
        """Add a measurement. Returns why it is suspicious, or None."""
        tokens = values["gap_tokens"]
        if not tokens:
            if must_have_gap and len(current):
                return f"{source} has {len(current)} tokens of the present version, and the gap covers none of them"
            return None
        mean, maximum = values["logprob_gap_mean"], values["logprob_gap_max"]
        uncertain_tokens = min(tokens, int((current < -1e-3).sum()))

        if maximum:
            self._zero_tokens = 0
        else:
            self._zero_tokens += uncertain_tokens
        if self._zero_tokens >= MIN_ZERO_TOKENS:
            return f"it is exactly 0 over {self._zero_tokens} tokens up to {source}"

        if tokens < MIN_SAME_TOKENS or not maximum:
            return None
        if (mean, maximum) == self._last_gap:
            self._same_steps += 1
        else:
            self._same_steps = 1
        self._last_gap = (mean, maximum)
        if self._same_steps < SAME_STEPS:
            return None
        return (
            f"it is {mean:.9g} (largest {maximum:.9g}) for the {self._same_steps}th time in a row at {source}, over "
            "different tokens"
        )


_CAUSES = (
    "With batch-invariant kernels in engine and trainer a gap of exactly 0 is correct. Otherwise a sum over ranks may "
    "be missing, or the samples have the trainer's own log-probabilities: run `async-grpo doctor`, and compare the "
    "installed releases with docs/platforms.md"
)


def _current_logprobs(batch: Batch, *, rewarded_only: bool) -> npt.NDArray[np.float32]:
    """Behaviour log-probabilities of the policy's tokens in completions that only `batch.version` sampled."""
    parts = [np.empty(0, np.float32)]
    for sample in (sample for group in batch.groups for sample in group.samples):
        if rewarded_only and sample.reward is None:
            continue
        if {span.version for span in sample.spans} == {batch.version}:
            parts.append(sample.token_logprobs()[sample.written_by_policy()])
    return np.concatenate(parts)


def _ratio_above_one(tokens: Tokens, objective: ObjectiveConfig) -> Tensor:
    """bool [N]: True if the ratio that the loss clips, of the token or of its sequence, is above 1."""
    log_r_N = tokens.log_r_N.detach()
    if objective.loss in SEQUENCE_RATIO_LOSSES:
        log_r_N = tokens.spread(tokens.sum(log_r_N))
    return log_r_N > 0


def _sum_kl(tokens: Tokens, objective: ObjectiveConfig) -> Tensor:
    divergence_N = policy_kl(tokens.detached(), objective)
    return _scalar(0) if divergence_N is None else divergence_N.double().sum()


def _measure_gap(logprobs_N: Tensor, columns: TrainedTokens, gap_version: int | None) -> tuple[Tensor, Tensor]:
    """Return |behaviour - trainer| of tokens that can be compared (0 for others), and the number of such tokens."""
    if gap_version is None:
        is_comparable_N = torch.zeros_like(columns.completion_version_N, dtype=torch.bool)
    else:
        is_comparable_N = columns.completion_version_N == gap_version
    return (logprobs_N - columns.behaviour_N).abs() * is_comparable_N, is_comparable_N.sum().double()


def _largest(values_N: Tensor) -> Tensor:
    return torch.cat([values_N, torch.zeros(1, dtype=torch.float64)]).max()


def _scalar(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)

"""The statistics of a step: each micro-batch adds to them, then ranks do."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from async_grpo.algorithms import Objective, Tokens, ess_sums, token_kl
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.telemetry.metrics import MAXIMA, SUMS
from trainer.batch.sequences import Targets
from trainer.distributed import is_counting_rank, max_over_ranks, sum_over_ranks

NO_VERSION = -2
"""Neither a version nor MIXED."""

StepSums = tuple[Tensor, Tensor]
"""(SUMS, MAXIMA), float64."""

SEQUENCE_RATIO = ("gspo", "topr")
"""Losses whose trust region is around the ratio of a sequence."""


def micro_batch_sums(
    tokens: Tokens, targets: Targets, found: Objective, loss: Tensor, objective: ObjectiveConfig, version: int | None
) -> StepSums:
    """The statistics of one micro-batch.

    `version`: that of the weights that evaluated it; None between the updates of a step.
    """
    logprobs_N = tokens.logprobs_N.detach().double()
    weight_N = tokens.log_rho_N.exp().double()
    gap_N, gap_tokens = _gap(logprobs_N, targets, version)
    risen_N = _risen(tokens, objective)
    sequence_weight, sequence_weight_squared, sequences = ess_sums(tokens.detached())
    sums = {
        "loss": loss.detach().double(),
        "tokens": _number(len(logprobs_N)),
        "clipped": found.clipped_N.sum().double(),
        "clipped_low": (found.clipped_N & ~risen_N).sum().double(),
        "clipped_high": (found.clipped_N & risen_N).sum().double(),
        "rejected": found.rejected_N.sum().double(),
        "weight": weight_N.sum(),
        "weight_squared": weight_N.square().sum(),
        "sequence_weight": sequence_weight,
        "sequence_weight_squared": sequence_weight_squared,
        "sequences": sequences,
        "logprob": logprobs_N.sum(),
        "entropy": _number(0) if tokens.entropy_N is None else tokens.entropy_N.detach().double().sum(),
        "kl": _divergence(tokens, objective),
        "gap": gap_N.sum(),
        "gap_tokens": gap_tokens,
    }
    maxima = {"weight": _largest(weight_N), "gap": _largest(gap_N)}
    return torch.stack([sums[name] for name in SUMS]), torch.stack([maxima[name] for name in MAXIMA])


def gap_sums(logprobs_N: Tensor, targets: Targets, version: int) -> StepSums:
    """The statistics of the gap alone: all others are 0."""
    gap_N, gap_tokens = _gap(logprobs_N.detach().double(), targets, version)
    sums = {"gap": gap_N.sum(), "gap_tokens": gap_tokens}
    maxima = {"gap": _largest(gap_N)}
    return (
        torch.stack([sums.get(name, _number(0)) for name in SUMS]),
        torch.stack([maxima.get(name, _number(0)) for name in MAXIMA]),
    )


def reduce_sums(found: Many[StepSums]) -> tuple[dict[str, float], dict[str, float]]:
    """Reduce the statistics over micro-batches and ranks: (sums, maxima) by name."""
    sums, maxima = torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)
    if found and is_counting_rank():
        sums = torch.stack([part for part, _ in found]).sum(0)
        maxima = torch.stack([part for _, part in found]).amax(0)
    return (
        dict(zip(SUMS, sum_over_ranks(sums).tolist(), strict=True)),
        dict(zip(MAXIMA, max_over_ranks(maxima).tolist(), strict=True)),
    )


def _risen(tokens: Tokens, objective: ObjectiveConfig) -> Tensor:
    """bool [N]: the ratio, of the token or of its sequence, is above 1."""
    log_r_N = tokens.log_r_N.detach()
    return tokens.spread(tokens.sum(log_r_N)) > 0 if objective.loss in SEQUENCE_RATIO else log_r_N > 0


def _divergence(tokens: Tokens, objective: ObjectiveConfig) -> Tensor:
    if tokens.reference_N is None:
        return _number(0)
    return token_kl(tokens.logprobs_N.detach(), tokens.reference_N, objective.kl_estimator).double().sum()


def _gap(logprobs_N: Tensor, targets: Targets, version: int | None) -> tuple[Tensor, Tensor]:
    """|behaviour - trainer| where it can be compared, 0 elsewhere; and how many can be."""
    current_N = targets.whole_N == (NO_VERSION if version is None else version)
    return (logprobs_N - targets.behaviour_N).abs() * current_N, current_N.sum().double()


def _largest(values_N: Tensor) -> Tensor:
    return torch.cat([values_N, torch.zeros(1, dtype=torch.float64)]).max()


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)

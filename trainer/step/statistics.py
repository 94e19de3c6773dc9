"""The statistics of a step: each micro-batch adds to them, then ranks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo.algorithms import Objective, Tokens, ess_sums, token_kl
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.telemetry.metrics import MAXIMA, SUMS
from async_grpo.wire import Batch
from trainer.batch.sequences import TrainedTokens
from trainer.ranks.distributed import is_counting_rank, max_over_ranks, sum_over_ranks

NO_VERSION = -2
"""Neither a version nor MIXED."""

MIN_ZERO_TOKENS, MIN_SAME_TOKENS, SAME_STEPS = 256, 64, 4
"""Tokens with a gap of exactly 0, and steps with an identical gap, that no two programs share by accident."""

StepSums = tuple[Tensor, Tensor]
"""(SUMS, MAXIMA), float64."""

SEQUENCE_RATIO = ("gspo", "topr")
"""Losses whose trust region is around the ratio of a sequence."""


def micro_batch_sums(
    tokens: Tokens,
    columns: TrainedTokens,
    result: Objective,
    loss: Tensor,
    objective: ObjectiveConfig,
    version: int | None,
) -> StepSums:
    """The statistics of one micro-batch.

    `version`: that of the weights that evaluated it; None between the updates of a step.
    """
    logprobs_N = tokens.logprobs_N.detach().double()
    weight_N = tokens.log_rho_N.exp().double()
    gap_N, gap_tokens = _gap(logprobs_N, columns, version)
    risen_N = _risen(tokens, objective)
    sequence_weight, sequence_weight_squared, sequences = ess_sums(tokens.detached())
    sums = {
        "loss": loss.detach().double(),
        "tokens": _number(len(logprobs_N)),
        "clipped": result.clipped_N.sum().double(),
        "clipped_low": (result.clipped_N & ~risen_N).sum().double(),
        "clipped_high": (result.clipped_N & risen_N).sum().double(),
        "rejected": result.rejected_N.sum().double(),
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


def gap_sums(logprobs_N: Tensor, columns: TrainedTokens, version: int) -> StepSums:
    """The statistics of the gap alone: all others are 0."""
    gap_N, gap_tokens = _gap(logprobs_N.detach().double(), columns, version)
    sums = {"gap": gap_N.sum(), "gap_tokens": gap_tokens}
    maxima = {"gap": _largest(gap_N)}
    return (
        torch.stack([sums.get(name, _number(0)) for name in SUMS]),
        torch.stack([maxima.get(name, _number(0)) for name in MAXIMA]),
    )


def reduce_sums(found: Sequence[StepSums]) -> tuple[dict[str, float], dict[str, float]]:
    """Reduce the statistics over micro-batches and ranks: (sums, maxima) by name."""
    sums, maxima = torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)
    if found and is_counting_rank():
        sums = torch.stack([part for part, _ in found]).sum(0)
        maxima = torch.stack([part for _, part in found]).amax(0)
    return (
        dict(zip(SUMS, sum_over_ranks(sums).tolist(), strict=True)),
        dict(zip(MAXIMA, max_over_ranks(maxima).tolist(), strict=True)),
    )


class GapWatch:
    """Finds gaps that trainer and engine, which compute in different ways, are unlikely to have.

    none      all samples were trained, those of the present version included, and the gap covers no token
    zero      exactly 0 over MIN_ZERO_TOKENS tokens, in one step or several, whose log-probabilities are not 0 (those of
              a policy that has become certain are 0 on both sides)
    constant  mean and maximum are those of the step before, to the last digit, SAME_STEPS times in a row

    It warns once. A run must not end for it: with batch-invariant kernels on both sides a gap of exactly 0 is the aim.
    """

    def __init__(self) -> None:
        self._warned = False
        self._zero_tokens = 0
        self._last: tuple[float, float] | None = None
        self._same = 1

    def check_step(self, batch: Batch, values: Mapping[str, Any]) -> str | None:
        """The warning about a finished step, if any. A step without a token of the present version has no gap."""
        whole = values["updates"] == 1 and not values["overlong_samples"]
        return self._warn_once(values, _present_logprobs(batch, judged=True), f"step {batch.version + 1}", whole=whole)

    def check_probe(self, batch: Batch, values: Mapping[str, Any]) -> str | None:
        """The warning about the probe of the final version, which nobody grades."""
        place = f"the probe of version {batch.version}"
        return self._warn_once(values, _present_logprobs(batch, judged=False), place, whole=True)

    def _warn_once(
        self, values: Mapping[str, Any], present: npt.NDArray[np.float32], place: str, *, whole: bool
    ) -> str | None:
        if self._warned:
            return None
        reason = self._find_reason(values, present, place, whole=whole)
        if reason is None:
            return None
        self._warned = True
        return f"logprob_gap may measure nothing: {reason}. {_CAUSES}"

    def _find_reason(
        self, values: Mapping[str, Any], present: npt.NDArray[np.float32], place: str, *, whole: bool
    ) -> str | None:
        tokens = values["gap_tokens"]
        if not tokens:
            if whole and len(present):
                return f"{place} has {len(present)} tokens of the present version, and the gap covers none of them"
            return None
        gap = values["logprob_gap_mean"], values["logprob_gap_max"]
        uncertain_tokens = min(tokens, int((present < -1e-3).sum()))
        return self._find_zero(gap, uncertain_tokens, place) or self._find_constant(gap, tokens, place)

    def _find_zero(self, gap: tuple[float, float], tokens: int, place: str) -> str | None:
        self._zero_tokens = 0 if gap[1] else self._zero_tokens + tokens
        if self._zero_tokens < MIN_ZERO_TOKENS:
            return None
        return f"it is exactly 0 over {self._zero_tokens} tokens up to {place}"

    def _find_constant(self, gap: tuple[float, float], tokens: int, place: str) -> str | None:
        if tokens < MIN_SAME_TOKENS or not gap[1]:
            return None
        self._same = self._same + 1 if gap == self._last else 1
        self._last = gap
        if self._same < SAME_STEPS:
            return None
        return (
            f"it is {gap[0]:.9g} (largest {gap[1]:.9g}) for the {self._same}th time in a row at {place}, over "
            "different tokens"
        )


_CAUSES = (
    "With batch-invariant kernels in engine and trainer a gap of exactly 0 is right. Otherwise a sum over ranks may be "
    "lost, or the samples carry the trainer's own log-probabilities: run `async-grpo doctor`, and compare the "
    "installed releases with docs/platforms.md"
)


def _present_logprobs(batch: Batch, *, judged: bool) -> npt.NDArray[np.float32]:
    """Behaviour log-probabilities of the trained tokens of completions that `batch.version` sampled whole."""
    found = [np.empty(0, np.float32)]
    for sample in (sample for group in batch.groups for sample in group.samples):
        versions = {span.version for span in sample.spans}
        if versions == {batch.version} and (sample.reward is not None or not judged):
            found.append(sample.token_logprobs()[sample.written_by_policy()])
    return np.concatenate(found)


def _risen(tokens: Tokens, objective: ObjectiveConfig) -> Tensor:
    """bool [N]: the ratio, of the token or of its sequence, is above 1."""
    log_r_N = tokens.log_r_N.detach()
    return tokens.spread(tokens.sum(log_r_N)) > 0 if objective.loss in SEQUENCE_RATIO else log_r_N > 0


def _divergence(tokens: Tokens, objective: ObjectiveConfig) -> Tensor:
    if tokens.reference_N is None:
        return _number(0)
    return token_kl(tokens.logprobs_N.detach(), tokens.reference_N, objective.kl_estimator).double().sum()


def _gap(logprobs_N: Tensor, columns: TrainedTokens, version: int | None) -> tuple[Tensor, Tensor]:
    """|behaviour - trainer| where it can be compared, 0 elsewhere; and how many can be."""
    current_N = columns.whole_N == (NO_VERSION if version is None else version)
    return (logprobs_N - columns.behaviour_N).abs() * current_N, current_N.sum().double()


def _largest(values_N: Tensor) -> Tensor:
    return torch.cat([values_N, torch.zeros(1, dtype=torch.float64)]).max()


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)

"""The statistics of a step: each micro-batch adds to them, then ranks do."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo.algorithms import Objective, Tokens, ess_sums, token_kl
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import GapNotMeasured
from async_grpo.telemetry.metrics import MAXIMA, SUMS
from async_grpo.wire import Batch
from trainer.batch.sequences import Targets
from trainer.distributed import is_counting_rank, max_over_ranks, sum_over_ranks

NO_VERSION = -2
"""Neither a version nor MIXED."""

LEAST_ZERO_TOKENS, LEAST_SAME_TOKENS, SAME_STEPS = 256, 64, 4
"""Of a gap of exactly 0, and of one that stays the same: as many as no two programs agree on by accident."""

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


class GapWatch:
    """Refuses gaps that trainer and engine, which compute in different ways, cannot have.

    none      all samples were trained, those of the present version included, and the gap covers no token
    zero      exactly 0 over LEAST_ZERO_TOKENS tokens, in one step or several, whose log-probabilities are not 0 (those
              of a policy that has become certain are 0 on both sides)
    constant  mean and maximum are those of the step before, to the last digit, SAME_STEPS times in a row

    All ranks see the same figures, so all of them raise GapNotMeasured.
    """

    def __init__(self) -> None:
        self._zero_tokens = 0
        self._last: tuple[float, float] | None = None
        self._same = 1

    def step(self, batch: Batch, found: Mapping[str, Any]) -> None:
        """Check a finished step; steps without a token of the present version have no gap."""
        whole = found["updates"] == 1 and not found["overlong_samples"]
        self._see(found, _present_logprobs(batch, judged=True), f"step {batch.version + 1}", whole=whole)

    def probe(self, batch: Batch, found: Mapping[str, Any]) -> None:
        """Check the probe of the final version, which is graded by nobody."""
        self._see(found, _present_logprobs(batch, judged=False), f"the probe of version {batch.version}", whole=True)

    def _see(self, found: Mapping[str, Any], present: npt.NDArray[np.float32], place: str, *, whole: bool) -> None:
        if not found["gap_tokens"]:
            if whole and len(present):
                raise GapNotMeasured(
                    f"{place} has {len(present)} tokens of the present version, and the gap covers none of them. "
                    f"{_DOUBT}"
                )
            return
        gap = found["logprob_gap_mean"], found["logprob_gap_max"]
        self._check_zero(gap, min(found["gap_tokens"], int((present < -1e-3).sum())), place)
        self._check_constant(gap, found["gap_tokens"], place)

    def _check_zero(self, gap: tuple[float, float], tokens: int, place: str) -> None:
        self._zero_tokens = 0 if gap[1] else self._zero_tokens + tokens
        if self._zero_tokens >= LEAST_ZERO_TOKENS:
            raise GapNotMeasured(
                f"the gap is exactly 0 over {self._zero_tokens} tokens up to {place}: trainer and engine are different "
                f"programs and do not agree to the last bit. {_DOUBT}"
            )

    def _check_constant(self, gap: tuple[float, float], tokens: int, place: str) -> None:
        if tokens < LEAST_SAME_TOKENS or not gap[1]:
            return
        self._same = self._same + 1 if gap == self._last else 1
        self._last = gap
        if self._same >= SAME_STEPS:
            raise GapNotMeasured(
                f"the gap is {gap[0]:.9g} (largest {gap[1]:.9g}) for the {self._same}th time in a row at {place}, over "
                f"different tokens. {_DOUBT}"
            )


_DOUBT = (
    "So the figure that should show wrong log-probabilities measures nothing: a sum over ranks may be lost, or the "
    "samples carry the trainer's own log-probabilities. Run `async-grpo doctor`, and compare the installed releases "
    "with docs/platforms.md; the newest checkpoint is intact"
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


def _gap(logprobs_N: Tensor, targets: Targets, version: int | None) -> tuple[Tensor, Tensor]:
    """|behaviour - trainer| where it can be compared, 0 elsewhere; and how many can be."""
    current_N = targets.whole_N == (NO_VERSION if version is None else version)
    return (logprobs_N - targets.behaviour_N).abs() * current_N, current_N.sum().double()


def _largest(values_N: Tensor) -> Tensor:
    return torch.cat([values_N, torch.zeros(1, dtype=torch.float64)]).max()


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)

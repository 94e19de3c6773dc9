"""The input of an objective: the N trained tokens of a micro-batch with M sequences, flattened.

    token     0  1  2  3  4  5  6        every array has one number per token;
    segment_N 0  0  0  1  1  2  2        a sequence is never split over micro-batches

Log-ratios of tokens and of sequences are clamped to +-20 before exp, so that no weight overflows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of the absolute log-ratio: weights stay within e^-20 ... e^20."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of a micro-batch. Only `logprobs_N` and `entropy_N` carry a gradient."""

    logprobs_N: Tensor
    """log pi_theta of the sampled tokens."""
    prox_N: Tensor
    """log pi_prox: the policy at the centre of the trust region."""
    behaviour_N: Tensor
    """log pi_behaviour: the policy that sampled the token, as computed by its inference engine."""
    advantages_N: Tensor
    segment_N: Tensor
    """int64: the sequence of each token, in [0, segments)."""
    segments: int
    """M. Counting a sequence without trained tokens does not change the results."""
    reference_N: Tensor | None = None
    """log pi_ref, for the KL term."""
    entropy_N: Tensor | None = None
    """Entropy of pi_theta at each position, for the entropy bonus."""
    multiplier_N: Tensor | None = None
    """Product of all corrections, if computed before the step; None: the objective computes it."""

    @property
    def log_r_N(self) -> Tensor:
        """log r = log pi_theta - log pi_prox, with the gradient of pi_theta."""
        return log_ratio(self.logprobs_N, self.prox_N)

    @property
    def log_w_N(self) -> Tensor:
        """log w = log pi_prox - log pi_behaviour, constant."""
        return log_ratio(self.prox_N.detach(), self.behaviour_N)

    @property
    def log_rho_N(self) -> Tensor:
        """log rho = log pi_theta - log pi_behaviour, constant: the current against the sampling policy."""
        return log_ratio(self.logprobs_N.detach(), self.behaviour_N)

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum over each sequence, [M]."""
        return values_N.new_zeros(self.segments).index_add(0, self.segment_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Mean over the trained tokens of each sequence, [M]; 0 for sequences without any."""
        return self.sum(values_N) / self.sum(torch.ones_like(values_N)).clamp(min=1)

    def max(self, values_N: Tensor) -> Tensor:
        """Largest value of the trained tokens of each sequence, [M]; 0 where there is none."""
        empty_M = values_N.new_zeros(self.segments)
        return empty_M.index_reduce(0, self.segment_N, values_N, "amax", include_self=False)

    def spread(self, values_M: Tensor) -> Tensor:
        """Broadcast the values of sequences to their tokens, [N]."""
        return values_M[self.segment_N]

    def detached(self) -> Tokens:
        """Return the same tokens without gradient."""
        return replace(self, logprobs_N=self.logprobs_N.detach(), prox_N=self.prox_N.detach())


def log_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """Log-ratio from two log-probabilities, clamped to +-20; no gradient through `denominator_N`."""
    return clamp_log_ratio(numerator_N - denominator_N.detach())


def clamp_log_ratio(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def required(setting: float | None) -> float:
    """Value of an optional setting that the configuration has checked to be set for this rule."""
    assert setting is not None
    return setting

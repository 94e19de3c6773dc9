"""What an objective sees of a micro-batch: N trained tokens of M sequences, flat.

    token     0  1  2  3  4  5  6        every array has one number a token;
    segment_N 0  0  0  1  1  2  2        a sequence is whole: never split over micro-batches

Log-ratios are clamped to +-20 before exp, those of a token and those of a sequence, so that no weight overflows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of every log-ratio: weights stay within e^-20 ... e^20."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of a micro-batch. Only `logprobs_N` and `entropy_N` carry a gradient."""

    logprobs_N: Tensor
    """log pi_theta of the sampled tokens."""
    prox_N: Tensor
    """log pi_prox: the policy at the centre of the trust region."""
    behaviour_N: Tensor
    """log pi_behaviour: of the policy and the engine that sampled."""
    advantages_N: Tensor
    segment_N: Tensor
    """int64: the sequence of each token, in [0, segments)."""
    segments: int
    """M. A sequence without a trained token may be counted or not: it changes nothing."""
    reference_N: Tensor | None = None
    """log pi_ref, for the KL term."""
    entropy_N: Tensor | None = None
    """Entropy of pi_theta at each position, for the entropy bonus."""
    multiplier_N: Tensor | None = None
    """Product of all corrections where it was computed before the step; None: the objective computes it."""

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
        """log rho = log pi_theta - log pi_behaviour, constant: how far the present policy is from the samples'."""
        return log_ratio(self.logprobs_N.detach(), self.behaviour_N)

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum over each sequence, [M]."""
        return values_N.new_zeros(self.segments).index_add(0, self.segment_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Mean over the trained tokens of each sequence, [M]; 0 where there is none."""
        return self.sum(values_N) / self.sum(torch.ones_like(values_N)).clamp(min=1)

    def spread(self, values_M: Tensor) -> Tensor:
        """Each token gets the value of its sequence, [N]."""
        return values_M[self.segment_N]

    def detached(self) -> Tokens:
        """The same numbers without gradient."""
        return replace(self, logprobs_N=self.logprobs_N.detach(), prox_N=self.prox_N.detach())


def log_ratio(over_N: Tensor, under_N: Tensor) -> Tensor:
    """log of over / under, within +-20; `under_N` is constant."""
    return bounded(over_N - under_N.detach())


def bounded(log_ratios: Tensor) -> Tensor:
    """The log-ratios, clamped to +-20."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def required(dial: float | None) -> float:
    """The value of a dial that the configuration guarantees to be set."""
    assert dial is not None
    return dial

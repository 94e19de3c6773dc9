"""How long completions are: the distributions that a simulation draws from.

    constant    every completion has `mean` tokens
    lognormal   by two of mean, median, p99 and sigma, cut at `cap` (as sampling.max_tokens does)
    recorded    the groups of a run in their order, again and again; drawn one by one where groups are too small

A lognormal is the field's usual description of reasoning lengths. The samples of one prompt are more alike than those
of two: `within` is the share of the variance of the logarithm that lies within a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from async_grpo.config.base import PositiveInt, StrictModel

Positive = Annotated[float, Field(gt=0)]
NORMAL = NormalDist()
P99 = NORMAL.inv_cdf(0.99)
Lengths = npt.NDArray[np.float64]


class LengthModel(StrictModel):
    """The lengths of completions in tokens: `recorded`, or `mean` alone (constant), or a lognormal by two of `mean`,
    `median`, `p99` and `sigma`."""

    kind: Literal["constant", "lognormal", "recorded"] = "constant"
    """The distribution."""
    mean: Positive | None = None
    """Mean number of tokens, after the cut at `cap`."""
    median: Positive | None = None
    """lognormal: half of the completions are shorter."""
    p99: Positive | None = None
    """lognormal: one in a hundred is longer, were it not for `cap`."""
    sigma: Positive | None = None
    """lognormal: standard deviation of the logarithm."""
    cap: PositiveInt | None = None
    """Most tokens of a completion. None: sampling.max_tokens."""
    within: Annotated[float, Field(ge=0, le=1)] = 1.0
    """lognormal: share of the logarithm's variance within a group; the rest is between prompts."""
    recorded: list[list[int]] = []
    """recorded: lengths of the completions of each group; a group may hold one."""

    def find_problems(self) -> Iterator[str]:
        given = [name for name in ("mean", "median", "p99", "sigma") if getattr(self, name) is not None]
        if self.kind == "recorded" and not any(self.recorded):
            yield "kind is recorded, but there are no recorded lengths. Give them, or calibrate with --from RUN"
        if self.kind == "constant" and given != ["mean"]:
            yield f"constant lengths need `mean` and nothing else, but {given or 'nothing'} is given"
        if self.kind == "lognormal" and len(given) != 2:
            yield f"a lognormal needs exactly two of mean, median, p99 and sigma, but {given or 'nothing'} is given"

    def at_most(self, cap: int) -> LengthModel:
        """The same distribution with a cap, if it has none."""
        return self if self.cap is not None else self.model_copy(update={"cap": cap})

    def groups(self, generator: np.random.Generator, count: int, size: int, *, first: int = 0) -> Lengths:
        """Lengths of `count` groups of `size` samples, float [count, size], each at least 1. `first`: how many groups
        came before, since recorded groups come in their order."""
        if self.kind == "recorded":
            drawn = self._recorded_groups(generator, count, size, first)
        elif self.kind == "constant":
            drawn = np.full((count, size), self.mean)
        else:
            mu, sigma = self._parameters
            shared = generator.standard_normal((count, 1)) * math.sqrt(1 - self.within)
            own = generator.standard_normal((count, size)) * math.sqrt(self.within)
            drawn = np.exp(mu + sigma * (shared + own))
        return np.clip(np.rint(drawn), 1, self.cap or math.inf)

    def _recorded_groups(self, generator: np.random.Generator, count: int, size: int, first: int) -> Lengths:
        """The recorded groups in their order, again and again, if all are large enough; else lengths drawn one by one,
        as if those of a group had nothing in common."""
        if all(len(group) >= size for group in self.recorded):
            places = (np.arange(first, first + count) % len(self.recorded)).tolist()
            return np.array([self.recorded[place][:size] for place in places], np.float64)
        pool = np.array([length for group in self.recorded for length in group], np.float64)
        return pool[generator.integers(0, len(pool), (count, size))]

    @cached_property
    def _parameters(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        if self.median is not None:
            mu = math.log(self.median)
            if self.sigma is not None:
                return mu, self.sigma
            if self.p99 is not None:
                return mu, max(1e-6, math.log(self.p99) - mu) / P99
            return mu, _solve(lambda sigma: self._mean(mu, sigma), self._target, 1e-3, 4.0)
        if self.sigma is not None:
            sigma = self.sigma
            return _solve(lambda mu: self._mean(mu, sigma), self._target, -5.0, 25.0), sigma
        log_p99 = math.log(self.p99 or 1)
        sigma = _solve(lambda sigma: -self._mean(log_p99 - P99 * sigma, sigma), -self._target, 1e-3, P99)
        return log_p99 - P99 * sigma, sigma

    @property
    def _target(self) -> float:
        assert self.mean is not None
        return self.mean

    def _mean(self, mu: float, sigma: float) -> float:
        """Mean of a lognormal that is cut at the cap: E[min(X, c)]."""
        whole = math.exp(mu + sigma * sigma / 2)
        if self.cap is None:
            return whole
        beyond = (math.log(self.cap) - mu) / sigma
        return whole * NORMAL.cdf(beyond - sigma) + self.cap * NORMAL.cdf(-beyond)


def tail(lengths: Lengths) -> float:
    """Mean of the groups' longest sample over the mean length; `lengths` is [groups, samples]."""
    return float(lengths.max(axis=1).mean() / lengths.mean())


def _solve(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a rising function reaches `target`; the nearer end if it does not."""
    from scipy.optimize import brentq

    if function(low) >= target:
        return low
    if function(high) <= target:
        return high
    return float(brentq(lambda at: function(at) - target, low, high))

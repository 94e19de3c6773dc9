"""Distributions of completion lengths, from which a simulation draws.

    constant    every completion has `mean` tokens
    lognormal   given by two of mean, median, p99 and sigma, cut at `cap` (as sampling.max_tokens does)
    recorded    the groups of a run in their order, repeated; drawn one by one if a group has too few samples

A lognormal is the usual description of reasoning lengths. Samples of one prompt are more alike than those of two:
`within` is the fraction of the logarithm's variance that lies within a group.
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
"""Standard deviations between median and p99 of a normal distribution."""
Lengths = npt.NDArray[np.float64]


class LengthModel(StrictModel):
    """Completion lengths in tokens: `recorded`, or `mean` alone (constant), or a lognormal given by two of `mean`,
    `median`, `p99` and `sigma`."""

    kind: Literal["constant", "lognormal", "recorded"] = "constant"
    """The distribution."""
    mean: Positive | None = None
    """Mean number of tokens, after the cut at `cap`."""
    median: Positive | None = None
    """lognormal: half of the completions are shorter."""
    p99: Positive | None = None
    """lognormal: one in a hundred completions is longer, before the cut at `cap`."""
    sigma: Positive | None = None
    """lognormal: standard deviation of the logarithm."""
    cap: PositiveInt | None = None
    """Maximum tokens per completion. None: sampling.max_tokens."""
    within: Annotated[float, Field(ge=0, le=1)] = 1.0
    """lognormal: fraction of the logarithm's variance within a group; the rest lies between prompts."""
    recorded: list[list[int]] = []
    """recorded: lengths of the completions of each group; a group may have one."""

    def find_problems(self) -> Iterator[str]:
        given = [name for name in ("mean", "median", "p99", "sigma") if getattr(self, name) is not None]
        if self.kind == "recorded" and not any(self.recorded):
            yield "kind is recorded, but there are no recorded lengths. Set `recorded`, or calibrate with --from RUN"
        if self.kind == "constant" and given != ["mean"]:
            yield f"constant lengths need `mean` and nothing else, but {given or 'nothing'} is given"
        if self.kind == "lognormal" and len(given) != 2:
            yield f"a lognormal needs exactly two of mean, median, p99 and sigma, but {given or 'nothing'} is given"

    def with_default_cap(self, cap: int) -> LengthModel:
        """Copy with this cap if there is none yet."""
        return self if self.cap is not None else self.model_copy(update={"cap": cap})

    def draw_groups(self, generator: np.random.Generator, count: int, size: int, *, first: int = 0) -> Lengths:
        """Draw the lengths of `count` groups of `size` samples: float [count, size], each at least 1.

        `first` is the number of groups drawn before, because recorded groups are returned in their order.
        """
        if self.kind == "recorded":
            drawn = self._draw_recorded(generator, count, size, first)
        elif self.kind == "constant":
            drawn = np.full((count, size), self.mean)
        else:
            mu, sigma = self._lognormal_parameters
            between = generator.standard_normal((count, 1)) * math.sqrt(1 - self.within)
            within = generator.standard_normal((count, size)) * math.sqrt(self.within)
            drawn = np.exp(mu + sigma * (between + within))
        return np.clip(np.rint(drawn), 1, self.cap or math.inf)

    def _draw_recorded(self, generator: np.random.Generator, count: int, size: int, first: int) -> Lengths:
        if all(len(group) >= size for group in self.recorded):
            indices = (np.arange(first, first + count) % len(self.recorded)).tolist()
            return np.array([self.recorded[index][:size] for index in indices], np.float64)

        # Some groups are too small. Draw single lengths, as if samples of a group had nothing in common.
        pool = np.array([length for group in self.recorded for length in group], np.float64)
        return pool[generator.integers(0, len(pool), (count, size))]

    @cached_property
    def _lognormal_parameters(self) -> tuple[float, float]:
        """Mean mu and standard deviation sigma of the logarithm.

        Without `mean` they follow directly. With it they are solved for numerically, because of the cut at `cap`.
        """
        if self.median is not None:
            mu = math.log(self.median)
            if self.sigma is not None:
                return mu, self.sigma
            if self.p99 is not None:
                return mu, max(1e-6, math.log(self.p99) - mu) / P99
            return mu, _solve(lambda sigma: self._mean_of(mu, sigma), self._given_mean, 1e-3, 4.0)

        if self.sigma is not None:
            sigma = self.sigma
            return _solve(lambda mu: self._mean_of(mu, sigma), self._given_mean, -5.0, 25.0), sigma

        # At a fixed p99 the mean falls with sigma, but `_solve` needs a rising function.
        log_p99 = math.log(self.p99 or 1)
        sigma = _solve(lambda sigma: -self._mean_of(log_p99 - P99 * sigma, sigma), -self._given_mean, 1e-3, P99)
        return log_p99 - P99 * sigma, sigma

    @property
    def _given_mean(self) -> float:
        assert self.mean is not None
        return self.mean

    def _mean_of(self, mu: float, sigma: float) -> float:
        """Mean of a lognormal X cut at the cap c: E[min(X, c)]."""
        uncut_mean = math.exp(mu + sigma * sigma / 2)
        if self.cap is None:
            return uncut_mean
        cap_z = (math.log(self.cap) - mu) / sigma
        return uncut_mean * NORMAL.cdf(cap_z - sigma) + self.cap * NORMAL.cdf(-cap_z)


def tail_ratio(lengths: Lengths) -> float:
    """Mean over the groups of their longest sample, divided by the mean length. `lengths` is [groups, samples]."""
    return float(lengths.max(axis=1).mean() / lengths.mean())


def _solve(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return where a rising function reaches `target` in [low, high]; the nearer end if it does not."""
    from scipy.optimize import brentq

    if function(low) >= target:
        return low
    if function(high) <= target:
        return high
    return float(brentq(lambda x: function(x) - target, low, high))

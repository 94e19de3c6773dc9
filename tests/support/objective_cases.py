"""Random batches for the proofs of the objectives: plain numbers for the references, tensors for the code."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from async_grpo.algorithms import Tokens

STEP = 1e-6
"""Of the central differences: their error is about 1e-9 of the value."""


@dataclass(frozen=True)
class Row:
    """One sequence: log-probabilities of its trained tokens under each policy."""

    logprobs: list[float]
    prox: list[float]
    behaviour: list[float]
    reference: list[float]
    weights: list[float]
    """Of each token in the sum that is differentiated."""
    advantage: float

    def __len__(self) -> int:
        return len(self.logprobs)


def random_rows(seed: int, *, sequences: int = 6, longest: int = 7, spread: float = 0.4) -> list[Row]:
    """Advantages of both signs and 0; lengths 1 ... longest; policies that differ by about `spread` in log."""
    generator = random.Random(seed)

    def near(values: Sequence[float]) -> list[float]:
        return [min(-1e-3, value + generator.gauss(0.0, spread)) for value in values]

    rows = []
    for number in range(sequences):
        logprobs = [-generator.expovariate(0.8) - 0.05 for _ in range(generator.randint(1, longest))]
        advantage = [generator.uniform(0.2, 2.0), -generator.uniform(0.2, 2.0), 0.0][
            number % 3 if number < 3 else number % 2
        ]
        weights = [generator.uniform(0.1, 1.0) for _ in logprobs]
        rows.append(Row(logprobs, near(logprobs), near(logprobs), near(logprobs), weights, advantage))
    return rows


def tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def joined(parts: Sequence[Sequence[float]]) -> torch.Tensor:
    return tensor([value for part in parts for value in part])


def tokens_of(rows: Sequence[Row]) -> Tokens:
    """float64; `logprobs_N` is a leaf that wants its gradient."""
    return Tokens(
        logprobs_N=joined([row.logprobs for row in rows]).requires_grad_(),
        prox_N=joined([row.prox for row in rows]),
        behaviour_N=joined([row.behaviour for row in rows]),
        advantages_N=joined([[row.advantage] * len(row) for row in rows]),
        segment_N=torch.tensor([number for number, row in enumerate(rows) for _ in range(len(row))], dtype=torch.int64),
        segments=len(rows),
        reference_N=joined([row.reference for row in rows]),
    )


def weights_of(rows: Sequence[Row]) -> torch.Tensor:
    return joined([row.weights for row in rows])


def log_ratio(over: float, under: float) -> float:
    return max(-20.0, min(20.0, over - under))


def slopes(row: Row, losses: Callable[[list[float]], list[float]]) -> list[float]:
    """d (sum of weight * loss over the sequence) / d logprob of each token, by central differences.

    `losses` takes the log-probabilities that are differentiated; what is constant it takes from the row.
    """

    def total(present: list[float]) -> float:
        return math.fsum(weight * loss for weight, loss in zip(row.weights, losses(present), strict=True))

    def moved(place: int, step: float) -> list[float]:
        return [value + step if place == here else value for here, value in enumerate(row.logprobs)]

    return [(total(moved(place, STEP)) - total(moved(place, -STEP))) / (2 * STEP) for place in range(len(row))]

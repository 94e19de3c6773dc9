"""The loss of a batch equals its definition, however its sequences fall into micro-batches and ranks."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
import torch

from async_grpo.algorithms import AGGREGATIONS, aggregation_denominator
from async_grpo.config.presets import AGGREGATIONS as NAMES

LENGTHS = [3, 0, 5, 1, 8, 2, 0, 7]
"""Tokens of each sequence; 0: no verifier could judge it."""
GROUPS = [0, 0, 0, 1, 1, 2, 3, 3]
"""Group of each sequence."""
LONGEST = 11


def losses() -> list[list[float]]:
    generator = random.Random(4)
    return [[generator.uniform(-2, 2) for _ in range(length)] for length in LENGTHS]


def definition(rule: str, values: list[list[float]]) -> float:
    kept = [sequence for sequence in values if sequence]
    return {
        "token_mean": sum(map(sum, kept)) / sum(map(len, kept)),
        "seq_mean_token_mean": fmean(fmean(sequence) for sequence in kept),
        "seq_mean_token_sum_norm": sum(map(sum, kept)) / (len(kept) * LONGEST),
        "token_sum": sum(map(sum, kept)),
        "seq_mean_token_sum": fmean(sum(sequence) for sequence in kept),
        "prompt_mean": prompt_mean(values),
    }[rule]


def prompt_mean(values: list[list[float]]) -> float:
    """The mean over prompts of the mean over all tokens of their completions."""
    means = []
    for group in set(GROUPS):
        tokens = [loss for sequence, own in zip(values, GROUPS, strict=True) if own == group for loss in sequence]
        if tokens:
            means.append(fmean(tokens))
    return fmean(means)


def test_every_rule_of_the_configuration_exists() -> None:
    assert tuple(AGGREGATIONS) == NAMES


@pytest.mark.parametrize("rule", AGGREGATIONS)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_value_and_gradient_do_not_depend_on_the_split_of_the_batch(rule: str, parts: int) -> None:
    weights = AGGREGATIONS[rule](torch.tensor(LENGTHS), torch.tensor(GROUPS), LONGEST)
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for part in range(parts):
        for index in range(part, len(LENGTHS), parts):
            total = total + (weights[index] * scale * torch.tensor(losses()[index], dtype=torch.float64)).sum()
    total.backward()
    assert total.item() == pytest.approx(1.7 * definition(rule, losses()), rel=1e-12)
    assert scale.grad.item() == pytest.approx(definition(rule, losses()), rel=1e-12)


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_a_batch_without_trained_tokens_has_zero_weights(rule: str) -> None:
    nothing = torch.zeros(3, dtype=torch.int64)
    assert AGGREGATIONS[rule](nothing, torch.arange(3), LONGEST).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_weight_times_denominator_depends_on_the_own_group_only(rule: str) -> None:
    tokens, groups = torch.tensor(LENGTHS), torch.tensor(GROUPS)
    whole = AGGREGATIONS[rule](tokens, groups, LONGEST) * aggregation_denominator(rule, tokens, groups)
    parts = [
        AGGREGATIONS[rule](part, own, LONGEST) * aggregation_denominator(rule, part, own)
        for part, own in zip(tokens.split([3, 2, 3]), groups.split([3, 2, 3]), strict=True)
    ]
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-12)
    total = aggregation_denominator(rule, tokens, groups)
    assert torch.allclose(whole / total, AGGREGATIONS[rule](tokens, groups, LONGEST), rtol=1e-12)

"""Advantages equal plain float64 arithmetic, and samples that nobody could judge have no part in them."""

from __future__ import annotations

import statistics

import pytest
import torch

from async_grpo.algorithms import ADVANTAGES

REWARDS = [[1.0, 0.0, 0.5, 1.0], [0.25, 0.25, 0.75, 0.0], [2.0, -1.0, 0.0, 3.5]]
VALID = [[True, True, True, True], [True, False, True, True], [False, True, True, False]]


def reference(rule: str, rewards: list[float]) -> list[float]:
    """One group of valid samples, written out."""
    mean = statistics.fmean(rewards)
    if rule == "grpo":
        return [(reward - mean) / (statistics.stdev(rewards) + 1e-6) for reward in rewards]
    if rule == "dr_grpo":
        return [reward - mean for reward in rewards]
    others = len(rewards) - 1
    return [reward - (sum(rewards) - reward) / others for reward in rewards]


@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "rloo"])
def test_each_rule_equals_its_formula_over_the_valid_samples(rule: str) -> None:
    found = ADVANTAGES[rule](torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(VALID))
    for rewards, valid, advantages in zip(REWARDS, VALID, found.tolist(), strict=True):
        kept = [advantage for advantage, ok in zip(advantages, valid, strict=True) if ok]
        expected = reference(rule, [reward for reward, ok in zip(rewards, valid, strict=True) if ok])
        assert kept == pytest.approx(expected, rel=1e-6)
        assert all(advantage == 0.0 for advantage, ok in zip(advantages, valid, strict=True) if not ok)


@pytest.mark.parametrize("rule", ADVANTAGES)
def test_what_stands_at_an_invalid_sample_does_not_matter(rule: str) -> None:
    valid = torch.tensor([[True, True, False]])
    with_nan = ADVANTAGES[rule](torch.tensor([[1.0, 0.0, float("nan")]]), valid)
    with_number = ADVANTAGES[rule](torch.tensor([[1.0, 0.0, 9.0]]), valid)
    assert torch.equal(with_nan, with_number)


@pytest.mark.parametrize("rule", ADVANTAGES)
def test_equal_rewards_give_no_signal(rule: str) -> None:
    found = ADVANTAGES[rule](torch.full((1, 4), 0.5), torch.ones(1, 4, dtype=torch.bool))
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize("rule", ADVANTAGES)
def test_a_lone_valid_sample_has_baseline_zero_and_deviation_one(rule: str) -> None:
    found = ADVANTAGES[rule](torch.tensor([[0.5, 7.0]]), torch.tensor([[True, False]]))
    assert found.tolist()[0] == pytest.approx([0.5, 0.0], abs=1e-5)


@pytest.mark.parametrize("rule", ADVANTAGES)
def test_a_group_without_a_valid_sample_is_all_zero(rule: str) -> None:
    found = ADVANTAGES[rule](torch.tensor([[1.0, 7.0]]), torch.zeros(1, 2, dtype=torch.bool))
    assert found.tolist() == [[0.0, 0.0]]

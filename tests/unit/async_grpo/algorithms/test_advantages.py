"""Advantages equal plain float64 arithmetic, and samples that nobody could judge have no part in them."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from async_grpo.algorithms import ADVANTAGES, gdpo, normalise_over_batch
from async_grpo.config.presets import ADVANTAGES as NAMES

SEEDS = range(20)
EPS = 1e-6

Group = list[tuple[float, int] | None]
"""(reward, length) of each sample; None: no verifier could judge it."""


def random_groups(seed: int, groups: int = 5, size: int = 4) -> list[Group]:
    generator = random.Random(seed)

    def sample() -> tuple[float, int] | None:
        if generator.random() < 0.2:
            return None
        return generator.choice([0.0, 1.0, 0.5, generator.gauss(0, 2)]), generator.randint(1, 30)

    return [[sample() for _ in range(size)] for _ in range(groups)]


def centred(rewards: list[float]) -> list[float]:
    baseline = statistics.fmean(rewards) if len(rewards) > 1 else 0.0
    return [reward - baseline for reward in rewards]


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 1.0


def reference(rule: str, groups: list[Group]) -> list[list[float]]:
    """Of the samples that could be judged, group by group, written out."""
    judged = [[sample for sample in group if sample is not None] for group in groups]
    rewards = [[reward for reward, _ in group] for group in judged]
    if rule == "grpo":
        return [[c / (deviation(group) + EPS) for c in centred(group)] for group in rewards]
    if rule == "dr_grpo":
        return [centred(group) for group in rewards]
    if rule == "rloo":
        return [[r - (sum(group) - r) / max(1, len(group) - 1) for r in group] for group in rewards]
    if rule == "opo":
        return [
            [r - sum(n * x for x, n in group) / sum(n for _, n in group) if len(group) > 1 else r for r, _ in group]
            for group in judged
        ]
    if rule == "opob":
        return [
            [
                (r - sum(n * x for x, n in group) / sum(n for _, n in group)) / (deviation([x for x, _ in group]) + EPS)
                if len(group) > 1
                else r
                for r, _ in group
            ]
            for group in judged
        ]
    if rule == "maxrl":
        means = [statistics.fmean(group) if group else 0.0 for group in rewards]
        return [
            [c / mean if mean > 0 else 0.0 for c in centred(group)] for group, mean in zip(rewards, means, strict=True)
        ]
    if rule == "reinforce_pp":
        return rewards
    everything = [reward for group in rewards for reward in group]
    if rule == "lite_ppo":
        return [[c / (deviation(everything) + EPS) for c in centred(group)] for group in rewards]
    assert rule == "reinforce_pp_baseline"
    tokens = [
        c for group in judged for c, (_, n) in zip(centred([r for r, _ in group]), group, strict=True) for _ in range(n)
    ]
    mean, deviation_of_tokens = statistics.fmean(tokens), max(statistics.pvariance(tokens), 1e-8) ** 0.5
    return [[(c - mean) / deviation_of_tokens for c in centred(group)] for group in rewards]


def found(rule: str, groups: list[Group], *, unjudged: float = float("nan")) -> torch.Tensor:
    rewards = [[unjudged if sample is None else sample[0] for sample in group] for group in groups]
    lengths = [[0 if sample is None else sample[1] for sample in group] for group in groups]
    valid = [[sample is not None for sample in group] for group in groups]
    return ADVANTAGES[rule](torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid), torch.tensor(lengths))


def test_every_rule_of_the_configuration_exists() -> None:
    assert {*ADVANTAGES, "gdpo"} == {*NAMES}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", ADVANTAGES)
def test_each_rule_equals_its_formula_over_the_judged_samples(rule: str, seed: int) -> None:
    groups = random_groups(seed)
    for group, row, expected in zip(groups, found(rule, groups).tolist(), reference(rule, groups), strict=True):
        kept = [value for value, sample in zip(row, group, strict=True) if sample is not None]
        assert kept == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert all(value == 0.0 for value, sample in zip(row, group, strict=True) if sample is None)


@pytest.mark.parametrize("rule", ADVANTAGES)
def test_advantages_ignore_padding_group_order_and_rewards_of_invalid_samples(rule: str) -> None:
    groups = random_groups(3)
    expected = found(rule, groups)
    assert torch.equal(found(rule, groups, unjudged=9.0), expected)
    assert torch.allclose(found(rule, [[*group, None, None] for group in groups])[:, :4], expected, rtol=1e-12)
    assert torch.allclose(found(rule, groups[::-1]).flip(0), expected, rtol=1e-12)


@pytest.mark.parametrize("rule", sorted({*ADVANTAGES} - {"reinforce_pp"}))
def test_equal_or_missing_rewards_give_advantage_zero(rule: str) -> None:
    assert found(rule, [[(0.5, 3), (0.5, 9), (0.5, 1)], [(0.5, 4), (0.5, 4), None]]).abs().max() < 1e-6
    assert found(rule, [[None, None], [None, None]]).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("rule", sorted({*ADVANTAGES} - {"reinforce_pp_baseline", "maxrl"}))
def test_a_single_valid_sample_has_baseline_zero_and_deviation_one(rule: str) -> None:
    assert found(rule, [[(0.5, 7), None]]).tolist()[0] == pytest.approx([0.5, 0.0], abs=1e-5)


def test_opob_minimises_the_second_moment_of_the_weighted_gradient() -> None:
    """E |w g (R - b)|^2 with |g|^2 = len, for weights from 1e-6 to 1e4: no other b has less."""
    rewards, lengths, weights = [1.0, 0.0, 0.0, 1.0, 0.5], [10, 40, 5, 22, 9], [1e-6, 0.3, 1e4, 2.0, 40.0]
    counts = torch.tensor([[n * w**2 for n, w in zip(lengths, weights, strict=True)]], dtype=torch.float64)
    rewards_BG = torch.tensor([rewards], dtype=torch.float64)
    advantages = ADVANTAGES["opob"](rewards_BG, torch.ones(1, 5, dtype=torch.bool), counts)[0]
    baselines = (rewards_BG[0] - advantages * (statistics.stdev(rewards) + EPS)).tolist()
    assert baselines == pytest.approx([baselines[0]] * 5)

    def moment(b: float) -> float:
        return sum(w**2 * n * (r - b) ** 2 for r, n, w in zip(rewards, lengths, weights, strict=True))

    best = min((place / 1e7 for place in range(2000)), key=moment)
    assert baselines[0] == pytest.approx(best, abs=2e-7)
    tiny = ADVANTAGES["opob"](rewards_BG, torch.ones(1, 5, dtype=torch.bool), counts * 1e-30)[0]
    assert tiny.tolist() == pytest.approx(advantages.tolist())


def test_whitening_weights_samples_by_length() -> None:
    """D = +-1/2 on 30 tokens and on 10: mean 1/4, variance 3/16."""
    first, second = found("reinforce_pp_baseline", [[(1.0, 30), (0.0, 10)]])[0].tolist()
    assert (first, second) == pytest.approx((0.25 / (3 / 16) ** 0.5, -0.75 / (3 / 16) ** 0.5))


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalises_each_reward_function_within_its_group(seed: int) -> None:
    generator = random.Random(seed)
    parts = [[[generator.gauss(0, scale) for _ in range(4)] for _ in range(3)] for scale in (1.0, 0.01)]
    weights = [1.0, 0.5]
    valid = torch.ones(3, 4, dtype=torch.bool)
    result = gdpo(torch.tensor(parts, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64), valid)
    for group in range(3):
        normalised = [[c / (deviation(part[group]) + EPS) for c in centred(part[group])] for part in parts]
        expected = [
            sum(w * a for w, a in zip(weights, values, strict=True)) for values in zip(*normalised, strict=True)
        ]
        assert result[group].tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_normalisation_over_the_batch_counts_tokens(seed: int) -> None:
    generator = random.Random(seed)
    values = [generator.gauss(1, 2) for _ in range(generator.randint(2, 40))]
    expected = [(value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-5) for value in values]
    assert normalise_over_batch(torch.tensor(values, dtype=torch.float64)).tolist() == pytest.approx(expected, rel=1e-9)


def test_normalisation_of_one_token_or_of_equal_ones_gives_zero() -> None:
    assert normalise_over_batch(torch.tensor([0.7])).tolist() == [0.0]
    assert normalise_over_batch(torch.full((5,), 0.25)).tolist() == [0.0] * 5
    assert normalise_over_batch(torch.empty(0)).shape == (0,)

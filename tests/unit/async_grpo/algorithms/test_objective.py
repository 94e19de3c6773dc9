"""The whole objective: its rows put together, the same however a batch is dealt out; KL from a reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithms import (
    AGGREGATIONS,
    CORRECTIONS,
    LOSSES,
    Tokens,
    correction_multiplier,
    ess_sums,
    token_objective,
)
from async_grpo.algorithms.objective import ESTIMATORS, advantages_less_kl, penalise_rewards, policy_kl, token_kl
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.presets import PRESETS
from tests.support.objective_cases import Row, random_rows, tensor, tokens_of

torch.set_num_threads(1)
SEEDS = range(12)
LONGEST = 9
SEQUENCES = 9

OBJECTIVES: dict[str, dict[str, Any]] = {
    **{preset: {"preset": preset} for preset in PRESETS},
    **{loss: {"loss": loss} for loss in ("sapo", "gmpo", "dppo_tv", "topr")},
    "token_tis and geo_rs": {
        "loss": "ppo_clip",
        "prox": "recompute",
        "corrections": ["token_tis", {"kind": "geo_rs", "low": 0.8, "high": 1.3}],
    },
    "seq_tis and opsm": {"loss": "cispo", "prox": "loglinear", "corrections": ["seq_tis", "opsm"]},
    "decoupled, seq_mis and ess_lr": {"corrections": ["seq_mis", "ess_lr"]},
    "gspo and icepop": {"preset": "gspo", "prox": "recompute", "corrections": ["icepop"]},
    "m2po over the batch": {"preset": "dapo", "corrections": [{"kind": "m2po", "limit": 0.1}, "seq_mis"]},
    "token sum": {"aggregation": "token_sum"},
    "mean of sums": {"aggregation": "seq_mean_token_sum"},
    "mean of prompts": {"aggregation": "prompt_mean"},
    "unbiased k3": {"loss": "cispo", "kl_beta": 0.1, "kl_estimator": "unbiased_k3"},
    "weight and reject": {
        "loss": "ppo_clip",
        "prox": "recompute",
        "corrections": [{"kind": "weight", "level": "geo"}, {"kind": "reject", "high": 0.05}, "kpop"],
    },
}


def bonus_config(**keys: Any) -> ObjectiveConfig:
    """With a divergence or an entropy bonus; no reference model exists yet, so validation would refuse the former."""
    return ObjectiveConfig(loss="ppo_clip").model_copy(update=keys)


def batch_loss(rows: list[Row], bins: list[list[int]], config: ObjectiveConfig) -> tuple[torch.Tensor, list[Any]]:
    """What ranks and micro-batches add up: the loss, and the gradient of every token by sequence.

    Weights, and multipliers that need the whole batch, are computed once, over the batch in the order of the bins.
    """
    order = [index for members in bins for index in members]
    lengths = torch.tensor([len(row) for row in rows])
    weights = AGGREGATIONS[config.aggregation](lengths, torch.arange(len(rows)) // 3, LONGEST)
    multiplier_N = correction_multiplier(tokens_of([rows[index] for index in order]), config)
    multiplier_of = dict(zip(order, multiplier_N.split([len(rows[index]) for index in order]), strict=True))
    needs_whole_batch = any(correction.needs_whole_batch for correction in config.corrections)
    total, gradients = torch.zeros((), dtype=torch.float64), [None] * len(rows)
    for members in bins:
        tokens = tokens_of([rows[index] for index in members])
        if needs_whole_batch and members:
            tokens = replace(tokens, multiplier_N=torch.cat([multiplier_of[index] for index in members]))
        weights_N = tokens.spread(weights[members])
        loss = (token_objective(tokens, config).loss_N * weights_N).sum()
        loss.backward()
        total = total + loss.detach()
        for index, gradient in zip(members, tokens.logprobs_N.grad.split([len(rows[i]) for i in members]), strict=True):
            gradients[index] = gradient
    return total, gradients


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 50),
    homes=st.lists(st.integers(0, 4), min_size=SEQUENCES, max_size=SEQUENCES),
    order=st.permutations(range(SEQUENCES)),
)
def test_loss_and_gradient_ignore_micro_batches_packing_order_and_ranks(
    name: str, seed: int, homes: list[int], order: list[int]
) -> None:
    """A bin is a micro-batch of some rank; some are empty."""
    rows, config = random_rows(seed, sequences=SEQUENCES), ObjectiveConfig(**OBJECTIVES[name])
    whole, expected = batch_loss(rows, [list(range(SEQUENCES))], config)
    bins = [[index for index in order if homes[index] == home] for home in range(5)]
    loss, gradients = batch_loss(rows, bins, config)
    assert torch.allclose(loss, whole, rtol=1e-9, atol=1e-12)
    for gradient, alone in zip(gradients, expected, strict=True):
        assert torch.allclose(gradient, alone, rtol=1e-9, atol=1e-12)


@given(homes=st.lists(st.integers(0, 4), min_size=SEQUENCES, max_size=SEQUENCES))
@settings(max_examples=25, deadline=None)
def test_ess_sums_add_up_over_micro_batches(homes: list[int]) -> None:
    rows = random_rows(7, sequences=SEQUENCES)
    parts = [[row for row, home in zip(rows, homes, strict=True) if home == number] for number in range(5)]
    added = torch.stack([ess_sums(tokens_of(part).detached()) for part in parts]).sum(0)
    assert torch.allclose(added, ess_sums(tokens_of(rows).detached()), rtol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_is_the_loss_times_every_multiplier(name: str) -> None:
    rows, config = random_rows(11), ObjectiveConfig(**OBJECTIVES[name])
    tokens = tokens_of(rows)
    expected = LOSSES[config.loss](tokens, config).loss_N
    for correction in config.corrections:
        if correction.kind != "ess_lr":
            expected = expected * CORRECTIONS[correction.kind](tokens.detached(), correction)
    if config.kl_beta > 0:
        expected = expected + config.kl_beta * policy_kl(tokens, config)
    (slope,) = torch.autograd.grad(expected.sum(), tokens.logprobs_N)
    found = token_objective(tokens, config)
    found.loss_N.sum().backward()
    assert torch.allclose(found.loss_N, expected, rtol=1e-12)
    assert torch.allclose(tokens.logprobs_N.grad, slope, rtol=1e-12)


def test_rejected_tokens_do_not_change_the_gradient_of_the_others() -> None:
    """Above all, the denominator still counts them."""
    rows = random_rows(5)
    without, gradients = batch_loss(rows, [[*range(6)]], ObjectiveConfig(loss="ppo_clip"))
    config = ObjectiveConfig(loss="ppo_clip", corrections=["seq_mis"])
    rejected = token_objective(tokens_of(rows), config).rejected_N.split([len(row) for row in rows])
    assert 0 < sum(bool(one.all()) for one in rejected) < len(rows)
    with_rejection, kept = batch_loss(rows, [[*range(6)]], config)
    assert with_rejection != without
    for gradient, before, out in zip(kept, gradients, rejected, strict=True):
        assert torch.equal(gradient, torch.zeros_like(before) if out.all() else before)


def test_a_fully_rejected_batch_has_zero_loss_and_gradient() -> None:
    config = ObjectiveConfig(corrections=[{"kind": "seq_mis", "low": 1e6, "high": 1e7}])
    loss, gradients = batch_loss(random_rows(1), [[*range(6)]], config)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_divergence_is_added_for_every_token_rejected_or_not(estimator: str) -> None:
    config = bonus_config(kl_beta=0.3, kl_estimator=estimator)
    rejecting = ObjectiveConfig(loss="ppo_clip", corrections=[{"kind": "seq_mis", "low": 1e6, "high": 1e7}])
    tokens = tokens_of(random_rows(2))
    divergence = 0.3 * token_kl(tokens.logprobs_N, tokens.reference_N, estimator)
    policy = LOSSES["ppo_clip"](tokens, config).loss_N
    assert torch.allclose(token_objective(tokens, config).loss_N, policy + divergence, rtol=1e-12)
    config = rejecting.model_copy(update={"kl_beta": 0.3, "kl_estimator": estimator})
    assert torch.allclose(token_objective(tokens, config).loss_N, divergence, rtol=1e-12)


def test_kl_in_the_reward_is_not_in_the_loss() -> None:
    tokens, config = tokens_of(random_rows(2)), bonus_config(kl_beta=0.3, kl_in="reward")
    assert torch.equal(token_objective(tokens, config).loss_N, LOSSES["ppo_clip"](tokens, config).loss_N)


def test_the_entropy_bonus_is_subtracted_with_its_gradient() -> None:
    tokens, config = tokens_of(random_rows(2)), bonus_config(entropy_coef=0.01)
    entropy_N = torch.linspace(0.1, 2.0, len(tokens.logprobs_N), dtype=torch.float64, requires_grad=True)
    found = token_objective(replace(tokens, entropy_N=entropy_N), config).loss_N
    found.sum().backward()
    assert torch.allclose(found, LOSSES["ppo_clip"](tokens, config).loss_N - 0.01 * entropy_N, rtol=1e-12)
    assert torch.allclose(entropy_N.grad, torch.full_like(entropy_N, -0.01))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_float32_tensors_stay_float32(name: str) -> None:
    config, tokens = ObjectiveConfig(**OBJECTIVES[name]), tokens_of(random_rows(0))
    narrow = Tokens(
        *(tensor.float() for tensor in (tokens.logprobs_N, tokens.prox_N, tokens.behaviour_N, tokens.advantages_N)),
        segment_N=tokens.segment_N,
        segments=tokens.segments,
        reference_N=tokens.reference_N.float(),
    )
    found = token_objective(narrow, config)
    assert found.loss_N.dtype == torch.float32


def reference_kl(estimator: str, d: float) -> tuple[float, float]:
    """(value, slope in d). k3 goes on along its tangent from the d < 0 at which it is 10."""
    at = max(d, KNEE)
    slope = 1 - math.exp(-at)
    k3 = math.exp(-at) - 1 + at + slope * (d - at)
    values = {"k1": d, "k2": d * d / 2, "k3": k3, "k3+": k3}
    slopes = {"k1": 1.0, "k2": d, "k3": slope, "k3+": d}
    return values[estimator], slopes[estimator]


def knee() -> float:
    """By bisection."""
    low, high = -4.0, -1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(-middle) - 1 + middle > 10 else (low, middle)
    return high


KNEE = knee()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_divergence_and_gradient_equal_the_formula(estimator: str, seed: int) -> None:
    tokens = tokens_of(random_rows(seed, spread=1.5))
    found = token_kl(tokens.logprobs_N, tokens.reference_N, estimator)
    found.sum().backward()
    expected = [reference_kl(estimator, d) for d in (tokens.logprobs_N.detach() - tokens.reference_N).tolist()]
    assert found.tolist() == pytest.approx([value for value, _ in expected], rel=1e-6, abs=1e-12)
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("d", [-500.0, -25.0, -20.0, -3.0, KNEE, -2.5, 11.0, 20.0, 25.0, 500.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_most_diverged_token_has_the_gradient_of_the_formula(estimator: str, d: float, dtype: torch.dtype) -> None:
    present = torch.tensor([-1.0 + min(d, 0.0)], dtype=dtype, requires_grad=True)
    found = token_kl(present, present.detach() - d, estimator)
    found.sum().backward()
    value, slope = reference_kl(estimator, d)
    assert found.item() == pytest.approx(value, rel=1e-5)
    assert present.grad.item() == pytest.approx(slope, rel=1e-5)
    assert abs(slope) > 0.9


def test_only_k2_has_the_true_gradient_of_the_divergence() -> None:
    """Over all tokens of a distribution, weighted by their probability, which is what sampling estimates."""
    logits = tensor([0.3, -1.0, 0.8]).requires_grad_()
    reference = tensor([0.1, 0.4, -0.5]).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)

    def estimated(estimator: str) -> torch.Tensor:
        sampled = (logprobs.detach().exp() * token_kl(logprobs, reference, estimator)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        return gradient

    right = {name for name in ESTIMATORS if torch.allclose(estimated(name), true, rtol=1e-9)}
    assert right == {"k2", "k3+"}
    assert estimated("k1").abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_in_the_reward_sums_the_sampling_policys_divergence(estimator: str) -> None:
    rows = random_rows(3)
    tokens = tokens_of(rows)
    rewards = tensor([float(number) for number in range(len(rows))])
    found = penalise_rewards(rewards, tokens, tokens.reference_N, beta=0.1, estimator=estimator)
    differences = [[b - r for b, r in zip(row.behaviour, row.reference, strict=True)] for row in rows]
    expected = [
        number - 0.1 * math.fsum(reference_kl(estimator, d)[0] for d in row) for number, row in enumerate(differences)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert not found.requires_grad


@pytest.mark.parametrize("seed", SEEDS)
def test_unbiased_k3_is_the_weighted_divergence_with_the_gradient_of_both_factors(seed: int) -> None:
    rows = random_rows(seed)
    tokens = tokens_of(rows)
    config = bonus_config(kl_beta=1.0, kl_estimator="unbiased_k3")
    result = policy_kl(tokens, config)
    result.sum().backward()
    values, slopes = [], []
    for row in rows:
        for now, old, reference in zip(row.logprobs, row.behaviour, row.reference, strict=True):
            rho = math.exp(now - old)
            value, slope = reference_kl("k3", now - reference)
            values.append(rho * value)
            slopes.append(rho * value + rho * slope)
    assert result.tolist() == pytest.approx(values, rel=1e-6)
    assert tokens.logprobs_N.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)


def test_unbiased_k3_estimates_the_divergence_from_samples_of_an_older_policy() -> None:
    """Over all tokens of a distribution, weighted by the probability under the policy that sampled."""
    now, old, reference = (tensor(logits).log_softmax(0) for logits in ([0.3, -1.0, 0.8], [0.0, 0.5, 0.2], [0.1] * 3))
    tokens = replace(
        tokens_of([]), logprobs_N=now, behaviour_N=old, reference_N=reference, segment_N=torch.arange(3), segments=3
    )
    estimate = (old.exp() * policy_kl(tokens, bonus_config(kl_beta=1.0, kl_estimator="unbiased_k3"))).sum()
    assert estimate.item() == pytest.approx((now.exp() * (now - reference)).sum().item(), rel=1e-9)


def test_the_divergence_from_the_behaviour_policy_needs_no_reference() -> None:
    tokens = replace(tokens_of(random_rows(2)), reference_N=None)
    config = bonus_config(kl_beta=2e-3, kl_estimator="k2", kl_to="behaviour")
    policy = LOSSES["ppo_clip"](tokens, config).loss_N
    expected = policy + 1e-3 * (tokens.logprobs_N - tokens.behaviour_N).square()
    assert torch.allclose(token_objective(tokens, config).loss_N, expected, rtol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_in_the_advantage_each_token_pays_for_itself_and_those_after_it(estimator: str) -> None:
    rows = random_rows(3)
    tokens = tokens_of(rows)
    result = advantages_less_kl(tokens.advantages_N, tokens, tokens.reference_N, beta=0.1, estimator=estimator)
    expected = []
    for row in rows:
        costs = [reference_kl(estimator, b - r)[0] for b, r in zip(row.behaviour, row.reference, strict=True)]
        expected += [row.advantage - 0.1 * math.fsum(costs[index:]) for index in range(len(costs))]
    assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert not result.requires_grad

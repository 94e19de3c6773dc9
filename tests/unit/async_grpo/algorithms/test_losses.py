"""Policy losses equal independent float64 arithmetic, in value and in gradient.

The references are plain loops over sequences and tokens. They take the log-probabilities that are differentiated as an
argument of their own, and everything that a formula holds constant from the row; gradients are central differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from async_grpo.algorithms import LOSSES, token_objective
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.presets import LOSSES as RULES
from tests.support.objective_cases import Row, joined, log_ratio, random_rows, slopes, tensor, tokens_of, weights_of

torch.set_num_threads(1)
SEEDS = range(12)

Reference = Callable[[Row, list[float], ObjectiveConfig], list[float]]


def clip_term(ratio: float, advantage: float, config: ObjectiveConfig) -> float:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if config.dual_clip is not None and advantage < 0:
        loss = min(loss, config.dual_clip * -advantage)
    return loss


def ppo_clip(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    ratios = [math.exp(log_ratio(now, prox)) for now, prox in zip(present, row.prox, strict=True)]
    return [clip_term(ratio, row.advantage, config) for ratio in ratios]


def decoupled(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    weights = [math.exp(log_ratio(prox, old)) for prox, old in zip(row.prox, row.behaviour, strict=True)]
    over = {"mask": 0.0, "clamp": config.behaviour_cap}[config.behaviour_cap_mode]
    kept = [weight if weight <= config.behaviour_cap else over for weight in weights]
    return [weight * loss for weight, loss in zip(kept, ppo_clip(row, present, config), strict=True)]


def gspo(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    mean = math.fsum(log_ratio(now, prox) for now, prox in zip(present, row.prox, strict=True)) / len(row)
    return [clip_term(math.exp(mean), row.advantage, config)] * len(row)


def cispo(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    losses = []
    for now, frozen, prox in zip(present, row.logprobs, row.prox, strict=True):
        ratio = min(math.exp(log_ratio(frozen, prox)), 1 + config.clip_high)
        if config.clip_low is not None:
            ratio = max(ratio, 1 - config.clip_low)
        losses.append(-ratio * row.advantage * now)
    return losses


def sapo(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    tau = config.sapo_tau_positive if row.advantage >= 0 else config.sapo_tau_negative
    ratios = [math.exp(log_ratio(now, prox)) for now, prox in zip(present, row.prox, strict=True)]
    return [-4 / tau / (1 + math.exp(-tau * (ratio - 1))) * row.advantage for ratio in ratios]


def gmpo(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    sign = 1 if row.advantage >= 0 else -1
    product = 1.0
    for now, prox in zip(present, row.prox, strict=True):
        signed = sign * log_ratio(now, prox)
        limit = config.clip_high if sign > 0 else config.clip_low
        product *= math.exp(sign * min(signed, limit)) ** (1 / len(row))
    return [-product * row.advantage] * len(row)


def dppo_tv(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    losses = []
    for now, frozen, old in zip(present, row.logprobs, row.behaviour, strict=True):
        moved = math.exp(frozen) - math.exp(old)
        inside = moved <= config.clip_high if row.advantage > 0 else moved >= -config.clip_low
        weight = min(math.exp(log_ratio(frozen, old)), config.behaviour_cap)
        losses.append(-row.advantage * weight * now if inside else 0.0)
    return losses


def topr(row: Row, present: list[float], config: ObjectiveConfig) -> list[float]:
    rho = math.exp(log_ratio(math.fsum(row.logprobs) - math.fsum(row.behaviour), 0.0))
    weight = 1.0 if row.advantage >= 0 else min(rho, 1.0)
    return [-weight * row.advantage * now for now in present]


REFERENCES: dict[str, Reference] = {
    one.__name__: one for one in (ppo_clip, decoupled, gspo, cispo, sapo, gmpo, dppo_tv, topr)
}

CASES = {
    **{name: {"loss": name} for name in REFERENCES},
    "cispo": {"loss": "cispo", "clip_high": 0.28},
    "ppo_clip, dual": {"loss": "ppo_clip", "dual_clip": 1.4},
    "decoupled, tight cap, dual": {"loss": "decoupled", "behaviour_cap": 1.1, "dual_clip": 1.4},
    "decoupled, clamped": {"loss": "decoupled", "behaviour_cap": 1.1, "behaviour_cap_mode": "clamp"},
    "gspo, wide": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.2},
    "gmpo, unequal bounds": {"loss": "gmpo", "clip_low": 0.1, "clip_high": 0.3},
    "cispo, both bounds": {"loss": "cispo", "clip_low": 0.2, "clip_high": 0.28},
    "dppo_tv, narrow": {"loss": "dppo_tv", "clip_low": 0.02, "clip_high": 0.03, "behaviour_cap": 1.2},
}


def test_every_loss_of_the_configuration_exists() -> None:
    assert LOSSES.keys() == RULES.keys() == REFERENCES.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_the_formula(case: str, seed: int) -> None:
    config = ObjectiveConfig(**CASES[case])
    rows, reference = random_rows(seed), REFERENCES[config.loss]
    tokens = tokens_of(rows)
    token = LOSSES[config.loss](tokens, config)
    (token.loss_N * weights_of(rows)).sum().backward()
    expected = joined([reference(row, row.logprobs, config) for row in rows])
    slope = joined([slopes(row, lambda present, row=row: reference(row, present, config)) for row in rows])
    assert torch.allclose(token.loss_N.detach(), expected, rtol=1e-6, atol=1e-12)
    assert torch.allclose(tokens.logprobs_N.grad, slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_the_random_batches_reach_both_sides_of_every_bound(case: str) -> None:
    config = ObjectiveConfig(**CASES[case])
    clipped = torch.cat([LOSSES[config.loss](tokens_of(random_rows(seed)), config).clipped_N for seed in SEEDS])
    assert clipped.any() == (config.loss != "sapo")  # which has no bound
    assert not clipped.all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", ["ppo_clip", "gspo, wide", "dppo_tv, narrow"])
def test_exactly_the_tokens_outside_the_trust_region_have_no_gradient(case: str, seed: int) -> None:
    rows = [row for row in random_rows(seed) if row.advantage]
    config = ObjectiveConfig(**CASES[case])
    tokens = tokens_of(rows)
    token = LOSSES[config.loss](tokens, config)
    token.loss_N.sum().backward()
    assert torch.equal(tokens.logprobs_N.grad == 0, token.clipped_N)


@pytest.mark.parametrize(
    ("mode", "loss", "rejected"), [({}, 0.0, True), ({"behaviour_cap_mode": "clamp"}, -5.0, False)]
)
def test_weights_above_the_cap_are_masked_or_clamped(mode: dict[str, str], loss: float, rejected: bool) -> None:
    """w = e^2 > 5, r = 1, A = 1. AReaL as its examples configure it (level token, action mask, upper 5) gives 0."""
    config = ObjectiveConfig.model_validate({"preset": "areal", **mode})
    one = tokens_of(random_rows(0, sequences=1, longest=1))
    far = replace(
        one, prox_N=one.logprobs_N.detach(), behaviour_N=one.logprobs_N.detach() - 2, advantages_N=tensor([1.0])
    )
    found = token_objective(far, config)
    found.loss_N.sum().backward()
    assert (found.loss_N.item(), one.logprobs_N.grad.item()) == pytest.approx((loss, loss))
    assert found.rejected_N.tolist() == [rejected]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_stay_finite_for_very_different_policies(case: str, dtype: torch.dtype) -> None:
    config = ObjectiveConfig(**CASES[case])
    far = tensor([-1e-3, -800.0, -1e-3, -800.0]).to(dtype)
    tokens = tokens_of(random_rows(0, sequences=2, longest=1))
    tokens = replace(
        tokens,
        logprobs_N=far.clone().requires_grad_(),
        prox_N=far.flip(0),
        behaviour_N=far.flip(0),
        advantages_N=tensor([1.0, 1.0, -1.0, -1.0]).to(dtype),
        segment_N=torch.tensor([0, 0, 1, 1]),
    )
    token = LOSSES[config.loss](tokens, config)
    token.loss_N.sum().backward()
    assert token.loss_N.isfinite().all()
    assert tokens.logprobs_N.grad.isfinite().all()
    assert token.loss_N.dtype == dtype


def test_the_largest_ratio_is_e_to_the_20() -> None:
    tokens = replace(tokens_of(random_rows(0, sequences=1, longest=1)), prox_N=tensor([-900.0]))
    loss = LOSSES["ppo_clip"](replace(tokens, advantages_N=tensor([-1.0])), ObjectiveConfig(loss="ppo_clip"))
    assert loss.loss_N.item() == pytest.approx(math.exp(20.0), rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tokens_or_advantage_zero_give_no_gradient(loss: str) -> None:
    for rows in ([], [replace(row, advantage=0.0) for row in random_rows(2)]):
        tokens = tokens_of(rows)
        token = LOSSES[loss](tokens, ObjectiveConfig(loss=loss))
        token.loss_N.sum().backward()
        assert token.loss_N.shape == token.clipped_N.shape == tokens.logprobs_N.shape
        assert not tokens.logprobs_N.grad.any()

"""pi_prox and the divergence from a reference equal their formulas, in value and in gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from async_grpo.algorithms import PROXIMALS
from async_grpo.algorithms.objective import ESTIMATORS, rewards_less_kl, token_kl
from tests.support.objective_cases import random_rows, tensor, tokens_of

torch.set_num_threads(1)
SEEDS = range(12)


@pytest.mark.parametrize("age", range(5))
def test_loglinear_goes_from_the_sampling_policy_to_the_present_one_by_version(age: int) -> None:
    """v_theta = 9, v_prox = 8, v_behaviour = 9 - age."""
    alpha = (8 - (9 - age)) / (9 - (9 - age)) if age else 1.0
    found = PROXIMALS["loglinear"](tensor([-1.0, -0.2]), tensor([-3.0, -0.1]), torch.tensor([age, age]))
    assert found.tolist() == pytest.approx([-3.0 + alpha * 2.0, -0.1 - alpha * 0.1], rel=1e-12)


def test_loglinear_takes_every_token_by_its_own_version() -> None:
    found = PROXIMALS["loglinear"](tensor([-1.0] * 3), tensor([-3.0] * 3), torch.tensor([0, 1, 4]))
    assert found.tolist() == [-1.0, -3.0, -1.5]


@pytest.mark.parametrize("choice", PROXIMALS)
def test_pi_prox_is_constant(choice: str) -> None:
    present = tensor([-1.0, -2.0]).requires_grad_()
    assert not PROXIMALS[choice](present, tensor([-1.5, -1.5]), torch.tensor([2, 3])).requires_grad


@pytest.mark.parametrize("choice", PROXIMALS)
def test_pi_prox_keeps_the_precision_of_the_log_probabilities(choice: str) -> None:
    present = torch.tensor([-1.0], dtype=torch.float32)
    assert PROXIMALS[choice](present, present - 1, torch.tensor([2])).dtype == torch.float32


def test_recompute_is_the_present_policy_and_behaviour_the_sampling_one() -> None:
    present, sampling, age = tensor([-1.0]), tensor([-2.0]), torch.tensor([3])
    assert PROXIMALS["recompute"](present, sampling, age).item() == -1.0
    assert PROXIMALS["behaviour"](present, sampling, age).item() == -2.0


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
    assert tokens.reference_N is not None
    found = token_kl(tokens.logprobs_N, tokens.reference_N, estimator)
    found.sum().backward()
    expected = [reference_kl(estimator, d) for d in (tokens.logprobs_N.detach() - tokens.reference_N).tolist()]
    assert found.tolist() == pytest.approx([value for value, _ in expected], rel=1e-6, abs=1e-12)
    assert tokens.logprobs_N.grad is not None
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("d", [-500.0, -25.0, -20.0, -3.0, KNEE, -2.5, 11.0, 20.0, 25.0, 500.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_token_that_moved_furthest_is_pulled_as_the_formula_says(
    estimator: str, d: float, dtype: torch.dtype
) -> None:
    present = torch.tensor([-1.0 + min(d, 0.0)], dtype=dtype, requires_grad=True)
    found = token_kl(present, present.detach() - d, estimator)
    found.sum().backward()
    value, slope = reference_kl(estimator, d)
    assert found.item() == pytest.approx(value, rel=1e-5)
    assert present.grad is not None
    assert present.grad.item() == pytest.approx(slope, rel=1e-5)
    assert abs(slope) > 0.9


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_slope_is_the_derivative_of_the_value(estimator: str) -> None:
    d, step = torch.linspace(-40, 40, 333, dtype=torch.float64), 1e-6
    present = d.clone().requires_grad_()
    ESTIMATORS[estimator](present).sum().backward()
    rise = (ESTIMATORS[estimator](d + step) - ESTIMATORS[estimator](d - step)) / (2 * step)
    assert present.grad is not None
    assert torch.allclose(present.grad, rise, rtol=1e-6, atol=1e-6)


def test_k3_and_its_corrected_form_are_never_negative() -> None:
    d = torch.linspace(-30, 30, 601, dtype=torch.float64)
    assert (ESTIMATORS["k3"](d) >= 0).all()
    assert torch.allclose(ESTIMATORS["k3+"](d), ESTIMATORS["k3"](d), rtol=1e-12)


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
def test_in_the_reward_the_divergence_of_the_sampling_policy_is_summed_over_the_sequence(estimator: str) -> None:
    rows = random_rows(3)
    tokens = tokens_of(rows)
    assert tokens.reference_N is not None
    rewards = tensor([float(number) for number in range(len(rows))])
    found = rewards_less_kl(rewards, tokens, tokens.reference_N, beta=0.1, estimator=estimator)
    differences = [[b - r for b, r in zip(row.behaviour, row.reference, strict=True)] for row in rows]
    expected = [
        number - 0.1 * math.fsum(reference_kl(estimator, d)[0] for d in row) for number, row in enumerate(differences)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert not found.requires_grad


def test_a_reference_equal_to_the_policy_costs_nothing() -> None:
    tokens = tokens_of(random_rows(1))
    tokens = replace(tokens, reference_N=tokens.logprobs_N.detach())
    assert tokens.reference_N is not None
    for estimator in ESTIMATORS:
        assert not token_kl(tokens.logprobs_N, tokens.reference_N, estimator).any()

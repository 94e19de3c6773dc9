"""Policy losses equal independent float64 arithmetic, in value and in gradient."""

from __future__ import annotations

import math

import pytest
import torch

from async_grpo.algorithms import decoupled, importance_weight, ppo_clip

LOW, HIGH, CAP = 0.2, 0.28, 5.0
LOGPROBS = [-0.5, -1.0, -2.0, -0.1, -3.0, -1.5]
PROX = [-0.5, -1.5, -1.2, -0.3, -3.1, -1.5]
BEHAVIOUR = [-0.7, -1.1, -4.0, -0.2, -3.0, -0.2]
ADVANTAGES = [1.0, 1.0, -1.0, -0.5, 0.0, 2.0]


def reference_clip(logprob: float, prox: float, advantage: float) -> tuple[float, float]:
    """(loss, d loss / d logprob) of one token, by cases."""
    ratio = math.exp(logprob - prox)
    if (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW):
        return -(1 + HIGH if advantage > 0 else 1 - LOW) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def tensors(*columns: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def test_ppo_clip_equals_its_formula_in_value_and_gradient() -> None:
    logprobs, prox, advantages = tensors(LOGPROBS, PROX, ADVANTAGES)
    logprobs.requires_grad_()
    token = ppo_clip(logprobs, prox, advantages, clip_low=LOW, clip_high=HIGH)
    token.loss_N.sum().backward()
    expected = [reference_clip(*row) for row in zip(LOGPROBS, PROX, ADVANTAGES, strict=True)]
    assert token.loss_N.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-6)


def test_decoupled_multiplies_by_the_capped_weight_exactly_once() -> None:
    logprobs, prox, behaviour, advantages = tensors(LOGPROBS, PROX, BEHAVIOUR, ADVANTAGES)
    logprobs.requires_grad_()
    token = decoupled(logprobs, prox, behaviour, advantages, clip_low=LOW, clip_high=HIGH, behaviour_cap=CAP)
    token.loss_N.sum().backward()
    weights = [min(CAP, math.exp(p - b)) for p, b in zip(PROX, BEHAVIOUR, strict=True)]
    assert CAP in weights  # the cap is exercised
    expected = [reference_clip(*row) for row in zip(LOGPROBS, PROX, ADVANTAGES, strict=True)]
    values = [w * loss for w, (loss, _) in zip(weights, expected, strict=True)]
    slopes = [w * slope for w, (_, slope) in zip(weights, expected, strict=True)]
    assert token.loss_N.tolist() == pytest.approx(values, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-6)


def test_only_tokens_whose_gradient_the_clip_removed_count_as_clipped() -> None:
    logprobs, prox, advantages = tensors(LOGPROBS, PROX, ADVANTAGES)
    clipped = ppo_clip(logprobs, prox, advantages, clip_low=LOW, clip_high=HIGH).clipped_N
    assert clipped.tolist() == [False, True, True, False, False, False]


def test_with_prox_at_the_present_policy_the_gradient_is_that_of_the_weighted_policy_gradient() -> None:
    logprobs, behaviour, advantages = tensors(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    logprobs.requires_grad_()
    prox = logprobs.detach()
    token = decoupled(logprobs, prox, behaviour, advantages, clip_low=LOW, clip_high=HIGH, behaviour_cap=CAP)
    token.loss_N.sum().backward()
    assert logprobs.grad is not None
    expected = -importance_weight(prox, behaviour).clamp(max=CAP) * advantages
    assert torch.allclose(logprobs.grad, expected, rtol=1e-6)
    assert not token.clipped_N.any()


def test_weights_carry_no_gradient_and_never_overflow() -> None:
    logprobs = torch.tensor([0.0, -800.0], requires_grad=True)
    weights = importance_weight(logprobs, torch.tensor([-800.0, 0.0]))
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0)], rel=1e-6)

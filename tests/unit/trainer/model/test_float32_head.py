"""Logits of a float32 output layer, with their gradients, against the same bfloat16 numbers in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.float32_head import float32_logits
from trainer.model.policy import divide_in_place

ROWS, HIDDEN, VOCABULARY = 40, 64, 512


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_logits_are_exact_to_float32_digits_and_bfloat16_ones_are_not() -> None:
    hidden, weight = numbers(1, ROWS, HIDDEN, seed=1), numbers(VOCABULARY, HIDDEN, seed=2)
    expected = hidden.double() @ weight.double().t()
    assert (float32_logits(hidden, weight) - expected).abs().max() < 1e-4
    assert (hidden @ weight.t() - expected).abs().max() > 1e-2


def test_gradients_are_those_of_the_rounded_gradient_of_the_logits() -> None:
    hidden = numbers(1, ROWS, HIDDEN, seed=1).requires_grad_()
    weight = numbers(VOCABULARY, HIDDEN, seed=2).requires_grad_()
    upstream = torch.randn(1, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))

    found = torch.autograd.grad(float32_logits(hidden, weight), (hidden, weight), upstream)

    rounded = upstream.bfloat16().double()
    expected = rounded @ weight.double(), rounded[0].t() @ hidden[0].double()
    for gradient, exact in zip(found, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - exact).abs().max() < 0.01 * exact.abs().max()


def test_frozen_weights_get_no_gradient() -> None:
    hidden, weight = numbers(1, ROWS, HIDDEN, seed=1).requires_grad_(), numbers(VOCABULARY, HIDDEN, seed=2)
    float32_logits(hidden, weight).sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_logits_may_be_divided_where_they_lie() -> None:
    hidden, weight = numbers(1, ROWS, HIDDEN, seed=1).requires_grad_(), numbers(VOCABULARY, HIDDEN, seed=2)
    logits = float32_logits(hidden, weight)
    divided = divide_in_place(logits, 0.5)
    assert divided.data_ptr() == logits.data_ptr()
    (gradient,) = torch.autograd.grad((divided**2).sum(), hidden)
    (expected,) = torch.autograd.grad(((float32_logits(hidden, weight) * 2) ** 2).sum(), hidden)
    torch.testing.assert_close(gradient, expected)

"""Log-probabilities over kept tokens, with their gradients, against a mask over the whole vocabulary in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trainer.batch.sequences import KeptTokens
from trainer.model.masked_logprobs import masked_logprobs

ROWS, VOCABULARY, TEMPERATURE, PENALTY = 6, 12, 0.8, 1.05
IDS = torch.tensor([[3, 7, 0], [11, -1, -1], [5, 6, -1], [0, 1, 2], [8, 3, 11], [4, 9, 10]])
LABELS = torch.tensor([7, 11, 5, 2, 8, 10])
PENALISED = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.bool)
WEIGHTS = torch.arange(1.0, ROWS + 1, dtype=torch.float64)


def expected(logits_NV: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """A mask over the vocabulary, in the order of vLLM's sampler."""
    penalised_NV, kept_NV = torch.zeros(2, ROWS, VOCABULARY, dtype=torch.bool)
    for row in range(ROWS):
        for token, is_penalised in zip(IDS[row].tolist(), PENALISED[row].tolist(), strict=True):
            if token >= 0:
                kept_NV[row, token] = True
                penalised_NV[row, token] = is_penalised
    scaled_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    logits_NV = torch.where(penalised_NV, scaled_NV, logits_NV) / TEMPERATURE
    distribution = torch.distributions.Categorical(logits=logits_NV.masked_fill(~kept_NV, -1e9))
    return distribution.log_prob(LABELS), distribution.entropy()


class Slices:
    """Two tensor-parallel ranks, one after the other: all_reduce adds what the other rank has gathered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self._others: list[Tensor] = []
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: self.rank)
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, tensor: Tensor, **_: Any) -> None:
        tensor += self._others[self.rank]

    def gather_others(self, slices: list[Tensor], kept: KeptTokens) -> None:
        """Compute what each rank gathers alone, and exchange it."""
        self._others = [torch.zeros(kept.ids_NW.shape, dtype=torch.float64)] * 2
        alone = []
        for self.rank, part in enumerate(slices):
            size = part.shape[-1]
            local = kept.ids_NW - self.rank * size
            inside = (local >= 0) & (local < size) & (kept.ids_NW >= 0)
            alone.append(part.detach().gather(1, local.clamp(0, size - 1)).masked_fill(~inside, 0.0))
        self._others = alone[::-1]


@pytest.mark.parametrize("penalty", [1.0, PENALTY])
def test_values_and_gradients_are_those_of_a_mask_over_the_vocabulary(
    penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCABULARY, dtype=torch.float64, generator=generator).mul_(3).requires_grad_()
    kept = KeptTokens(IDS, PENALISED)
    logprobs, entropy = expected(logits, penalty)
    (wanted,) = torch.autograd.grad(((logprobs + 2 * entropy) * WEIGHTS).sum(), logits)

    slices = Slices(monkeypatch)
    halves = [half.detach().clone().requires_grad_() for half in logits.chunk(2, dim=-1)]
    slices.gather_others(halves, kept)
    for slices.rank, half in enumerate(halves):
        own_logprobs, own_entropy = masked_logprobs(
            half, LABELS, kept, temperature=TEMPERATURE, repetition_penalty=penalty
        )
        torch.testing.assert_close(own_logprobs, logprobs)
        torch.testing.assert_close(own_entropy, entropy)
        (gradient,) = torch.autograd.grad(((own_logprobs + 2 * own_entropy) * WEIGHTS).sum(), half)
        torch.testing.assert_close(gradient, wanted.chunk(2, dim=-1)[slices.rank])


def test_a_single_kept_token_has_probability_one_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    logits = torch.randn(1, VOCABULARY, requires_grad=True)
    logprobs, entropy = masked_logprobs(
        logits,
        torch.tensor([4]),
        KeptTokens(torch.tensor([[4, -1]]), torch.zeros(1, 2, dtype=torch.bool)),
        temperature=TEMPERATURE,
    )
    assert logprobs.item() == 0 and entropy.item() == 0
    (gradient,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert not gradient.any() and math.isfinite(float(gradient.sum()))

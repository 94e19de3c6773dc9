"""The step that one would write without this trainer: plain PyTorch and the Hugging Face model, padded micro-batches.

    sequences --in the order of the batch, or by length--> rows of a micro-batch, padded to its longest at the right
              --> hidden states --trained positions alone--> logits --> log-probabilities --> loss, backward
    after the last micro-batch: clip, AdamW

What makes such a step fast is done: padding is that of the micro-batch and not of the whole batch, the output layer
computes the trained positions only, gradients accumulate in place, the optimizer is fused. The attention mask may be
left out, because rows are padded at their end and attention is causal: no real token sees a padded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_grpo.config import RunConfig
from trainer import sequences as ours
from trainer.bench.rounds import Done

Attention = Literal["sdpa", "sdpa without mask", "eager"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How the baseline cuts its batch."""

    rows: int
    """Sequences of a micro-batch."""
    attention: Attention = "sdpa"
    by_length: bool = False
    """Sequences of similar length share a micro-batch, as with a sorted data loader."""

    def __str__(self) -> str:
        return f"{self.rows} rows, {'sorted by length, ' if self.by_length else ''}{self.attention}"


class PlainModel:
    """The Hugging Face model and torch's AdamW, for all the baselines: the learning rate is 0, so none disturbs
    another."""

    def __init__(self, model: Any, config: RunConfig) -> None:
        self.model = model
        self.config = config
        optimizer = config.trainer.optimizer
        self._adam = torch.optim.AdamW(
            model.parameters(),
            lr=0.0,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    @property
    def parameters(self) -> int:
        """How many there are; a tied one counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def update(self) -> float:
        """Clip, step, forget the gradients; returns their norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.optimizer.clip_grad)
        self._adam.step()
        self._adam.zero_grad(set_to_none=False)
        return float(norm)

    def forget(self) -> float:
        """Forget the gradients without a step; returns their norm."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        self._adam.zero_grad(set_to_none=False)
        return float(norm)

    def logprobs(self, hidden_NH: Tensor, labels_N: Tensor) -> Tensor:
        """Of these tokens, under the distribution that is sampled from."""
        logits_NV = self.model.lm_head(hidden_NH).float() / self.config.sampling.temperature
        return -F.cross_entropy(logits_NV, labels_N, reduction="none")

    def loss(self, logprobs_N: Tensor, members: Sequence[ours.Sequence]) -> Tensor:
        """Decoupled PPO with the weights before the step as proximal policy, summed with the batch's weights."""
        rule = self.config.trainer.objective
        assert rule.clip_low is not None and rule.clip_high is not None and rule.behaviour_cap is not None
        constant_N = logprobs_N.detach()
        behaviour_N = _joined(members, lambda m: torch.from_numpy(m.behaviour_C[m.places_N]))
        advantage_N = _joined(members, lambda m: torch.full((m.trained_tokens,), m.advantage))
        weight_N = _joined(members, lambda m: torch.full((m.trained_tokens,), m.weight))
        ratio_N = (logprobs_N - constant_N).exp()
        clipped_N = ratio_N.clamp(1 - rule.clip_low, 1 + rule.clip_high)
        importance_N = (constant_N - behaviour_N).exp()
        importance_N = importance_N.masked_fill(importance_N > rule.behaviour_cap, 0.0)
        return (weight_N * importance_N * -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)).sum()


def padded_step(plain: PlainModel, members: Sequence[ours.Sequence], setting: Setting) -> Done:
    """One step over the whole batch."""
    loss, cells = padded_gradients(plain, members, setting)
    return Done(loss, plain.update(), sum(member.length for member in members) / cells)


def padded_gradients(plain: PlainModel, members: Sequence[ours.Sequence], setting: Setting) -> tuple[float, int]:
    """Forward and backward over the whole batch; returns the loss, and the positions that were computed."""
    plain.model.set_attn_implementation("eager" if setting.attention == "eager" else "sdpa")
    loss, cells = 0.0, 0
    for rows in _micro_batches(members, setting):
        value, width = _padded_loss(plain, rows, masked=setting.attention != "sdpa without mask")
        value.backward()
        loss += value.item()
        cells += len(rows) * width
    return loss, cells


def _micro_batches(members: Sequence[ours.Sequence], setting: Setting) -> Iterator[list[ours.Sequence]]:
    ordered = sorted(members, key=lambda member: member.length) if setting.by_length else list(members)
    for start in range(0, len(ordered), setting.rows):
        yield ordered[start : start + setting.rows]


def _padded_loss(plain: PlainModel, rows: Sequence[ours.Sequence], *, masked: bool) -> tuple[Tensor, int]:
    """B rows, padded to L."""
    tokens_BL = pad_sequence([torch.from_numpy(row.tokens[:-1]).long() for row in rows], batch_first=True)
    mask_BL = torch.arange(tokens_BL.shape[1]) < torch.tensor([row.length for row in rows])[:, None]
    hidden_BLH = plain.model.model(
        input_ids=tokens_BL, attention_mask=mask_BL if masked else None, use_cache=False
    ).last_hidden_state
    width = tokens_BL.shape[1]
    places_N = torch.cat(
        [torch.from_numpy(i * width + row.prompt_tokens - 1 + row.places_N) for i, row in enumerate(rows)]
    )
    labels_N = torch.cat([torch.from_numpy(row.tokens[row.prompt_tokens + row.places_N]).long() for row in rows])
    logprobs_N = plain.logprobs(hidden_BLH.flatten(0, 1).index_select(0, places_N), labels_N)
    return plain.loss(logprobs_N, rows), width


def _joined(members: Sequence[ours.Sequence], part: Callable[[ours.Sequence], Tensor]) -> Tensor:
    return torch.cat([part(member) for member in members])

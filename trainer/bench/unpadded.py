"""Ceilings: the Hugging Face model without a padded position, forward and backward alone.

- one by one   every sequence is a micro-batch of its own, as plain as it can be
- by hand      sequences end to end in one row, each attending to itself: the packing of the trainer's step between
               the layers of Hugging Face, so that what is left between the two is what Megatron-core costs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from trainer import sequences as ours
from trainer.bench.padded import PlainModel, Setting, padded_gradients
from trainer.bench.rounds import Done

_BY_HAND = "packed_by_hand"


def one_by_one(plain: PlainModel, members: Sequence[ours.Sequence]) -> Done:
    """No padding, and as many micro-batches as sequences."""
    loss, _ = padded_gradients(plain, members, Setting(1, "sdpa without mask"))
    return Done(loss, plain.forget(), 1.0)


def packed_by_hand(plain: PlainModel, packs: Sequence[Sequence[ours.Sequence]]) -> Done:
    """`packs`: the sequences of each micro-batch."""
    AttentionInterface.register(_BY_HAND, _attention)
    plain.model.set_attn_implementation(_BY_HAND)
    total = 0.0
    for members in packs:
        batch = ours.micro_batch(members)
        hidden_1TH = plain.model.model(
            input_ids=batch.tokens_1T,
            position_ids=batch.positions_1T,
            attention_mask={"full_attention": None},
            use_cache=False,
            lengths=[member.length for member in members],
        ).last_hidden_state
        logprobs_N = plain.logprobs(hidden_1TH[0].index_select(0, batch.trained_N), batch.labels_N)
        loss = plain.loss(logprobs_N, members)
        loss.backward()
        total += loss.item()
    return Done(total, plain.forget(), 1.0)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, lengths: list[int], **_: Any
) -> tuple[Tensor, None]:
    """[1, heads, T, d] -> [1, T, heads, d]"""
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2), None

"""Queries and keys are rotated exactly as Megatron rotates them, on every context-parallel rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

from trainer.batch.context_parallel import rank_positions
from trainer.batch.layout import ContextRank, Rotation, lay_out_sequences

LENGTHS = [8, 4, 12, 40]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_rotation_equals_megatrons_for_packed_sequences(dtype: torch.dtype, rank: int, ranks: int) -> None:
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    angles = torch.outer(torch.arange(float(max(LENGTHS))), frequencies)
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    heads = torch.randn(sum(LENGTHS) // ranks, 4, 16).to(dtype)
    embedding = torch.cat((angles, angles), -1)[:, None, None]
    expected = _apply_rotary_pos_emb_thd(heads, lay_out_sequences(LENGTHS).cu_seqlens_q, embedding, cp_group=group)
    positions = torch.cat([rank_positions(length, ContextRank(rank, ranks)) for length in LENGTHS])
    assert torch.equal(Rotation.of(positions, frequencies, dtype)(heads), expected)

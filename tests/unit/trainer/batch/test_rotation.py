"""Queries and keys are rotated as Megatron rotates them, to the bit, on every rank that shares the sequences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

from trainer.batch.context_parallel import positions_of
from trainer.batch.packed import ContextRank, Rotation, pack

LENGTHS = [8, 4, 12, 40]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_rotation_equals_megatrons_for_packed_sequences(dtype: torch.dtype, rank: int, ranks: int) -> None:
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    angles = torch.outer(torch.arange(float(max(LENGTHS))), frequencies)
    place = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    heads = torch.randn(sum(LENGTHS) // ranks, 4, 16).to(dtype)
    whole = torch.cat((angles, angles), -1)[:, None, None]
    expected = _apply_rotary_pos_emb_thd(heads, pack(LENGTHS).cu_seqlens_q, whole, cp_group=place)
    positions = torch.cat([positions_of(length, ContextRank(rank, ranks)) for length in LENGTHS])
    assert torch.equal(Rotation.of(positions, frequencies, dtype)(heads), expected)

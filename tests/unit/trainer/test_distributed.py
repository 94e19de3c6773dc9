"""Small exchanges between ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from trainer.ranks.distributed import broadcast_bytes


@pytest.mark.parametrize("payload", [b"", b"batch"])
def test_rank_0_sends_any_bytes_also_none(monkeypatch: pytest.MonkeyPatch, payload: bytes) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: None)
    assert broadcast_bytes(payload) == payload

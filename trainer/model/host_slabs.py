"""Tensors in the host's memory that share page-locked allocations.

torch rounds every page-locked allocation up to a power of two. With one allocation for each tensor that is a third more
memory on average, which for the optimizer of a 32B model is more than 100 GB. Slabs have such a size, and tensors of
any size fill them.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLAB_BYTES = 1 << 30
"""Many tensors of a large model, and not much for a small one."""
_ALIGNMENT_BYTES = 64


class HostSlabs:
    """Allocates tensors that stay for ever: each in the first slab with room for it."""

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self.slabs: list[Tensor] = []
        """uint8, each with a power of two of bytes."""
        self._pinned = pinned
        self._slab_bytes = slab_bytes
        self._used: list[int] = []

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with arbitrary numbers."""
        nbytes = shape.numel() * dtype.itemsize
        for number, slab in enumerate(self.slabs):
            if self._used[number] + nbytes <= len(slab):
                break
        else:
            number = len(self.slabs)
            size = max(self._slab_bytes, 1 << (nbytes - 1).bit_length())
            self.slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            self._used.append(0)
        start = self._used[number]
        self._used[number] = -(-(start + nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self.slabs[number][start : start + nbytes].view(dtype).view(shape)

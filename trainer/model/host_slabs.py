"""Host tensors that share page-locked allocations.

torch rounds every page-locked allocation up to a power of two. With one allocation per tensor that takes a third more
memory on average: more than 100 GB for the optimizer of a 32B model. The sizes of slabs are powers of two, and tensors
of any size fill them.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLAB_BYTES = 1 << 30
"""Large enough for many tensors of a large model, small enough not to waste memory on a small one."""
_ALIGNMENT_BYTES = 64


class HostSlabs:
    """Allocates tensors that are never freed, each in the first slab with enough space."""

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self.slabs: list[Tensor] = []
        """uint8 tensors whose sizes are powers of two."""
        self._pinned = pinned
        self._slab_bytes = slab_bytes
        self._used_bytes: list[int] = []

    def allocate_tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a contiguous, uninitialised tensor."""
        nbytes = shape.numel() * dtype.itemsize
        for index, slab in enumerate(self.slabs):
            if self._used_bytes[index] + nbytes <= len(slab):
                break
        else:
            index = len(self.slabs)
            size = max(self._slab_bytes, 1 << (nbytes - 1).bit_length())
            self.slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            self._used_bytes.append(0)

        start = self._used_bytes[index]
        end = start + nbytes
        self._used_bytes[index] = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self.slabs[index][start:end].view(dtype).view(shape)

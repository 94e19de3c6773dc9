"""Which tensors differ between two versions: lets an engine reload only those."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from async_grpo.weights.chunks import Chunk, Hashes
from async_grpo.weights.manifest import Layout


def changed_tensors(
    layout: Layout, chunks: Sequence[Chunk], old_hashes: Hashes, new_hashes: Hashes, old: memoryview, new: memoryview
) -> list[bool]:
    """One flag a tensor, exact: the bytes decide where a chunk that changed holds several tensors."""
    differs = old_hashes != new_hashes
    starts = [chunk.start for chunk in chunks]
    flags: list[bool] = []
    for spec in layout.tensors:
        begin, end = spec.offset, spec.offset + spec.nbytes
        first = max(0, bisect_left(starts, begin + 1) - 1)
        touched = [index for index in range(first, bisect_left(starts, end)) if differs[index]]
        whole = any(begin <= chunks[index].start and chunks[index].stop <= end for index in touched)
        flags.append(whole or (bool(touched) and not _equal(old[begin:end], new[begin:end])))
    return flags


def pack(flags: Sequence[bool]) -> bytes:
    """A bit a tensor."""
    return np.packbits(np.asarray(flags, np.bool_)).tobytes()


def unpack(packed: bytes, tensors: int) -> list[bool]:
    """The inverse of `pack`."""
    return [bool(bit) for bit in np.unpackbits(np.frombuffer(packed, np.uint8), count=tensors)]


def _equal(old: memoryview, new: memoryview) -> bool:
    return bool(np.array_equal(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)))

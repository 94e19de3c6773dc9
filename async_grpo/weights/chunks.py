"""Cuts the block of all tensors into the chunks that travel, and finds the tensors that differ between two versions.

    tensors   | a: bf16 | b: bf16      | c: fp32 | d: fp8 |
    chunks    |   0   |   1   |   2    |    3    |   4    |

Both sides cut a layout in the same way, so a number names a chunk. All items of a chunk have one size, because a patch
counts in items; otherwise chunks are as long as allowed. `find_changed_tensors` lets an engine reload only what
changed. `ServedVersion` is a block with its chunks and their hashes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from async_grpo.errors import WeightsCorrupt
from async_grpo.weights.manifest import TensorLayout, WeightManifest, WeightVersion, item_bytes_of

Hashes = npt.NDArray[np.uint64]
_HASH_DTYPE = np.dtype("<u8")


class Chunk(NamedTuple):
    """Bytes [start, stop) of the block, with items of `item_bytes` bytes."""

    start: int
    stop: int
    item_bytes: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start

    def view(self, block: memoryview) -> memoryview:
        """These bytes of `block`, in place."""
        return block[self.start : self.stop]


def cut_into_chunks(layout: TensorLayout, chunk_bytes: int) -> list[Chunk]:
    """Cut the block into chunks of at most `chunk_bytes`, each with items of one size.

    >>> from async_grpo.weights.manifest import make_layout
    >>> [tuple(chunk) for chunk in cut_into_chunks(make_layout([("a", "bfloat16", [64]), ("b", "float32", [16])]), 64)]
    [(0, 64, 2), (64, 128, 2), (128, 192, 4)]
    """
    chunks: list[Chunk] = []
    for start, stop, item_bytes in _runs(layout):
        bounds = [*range(start, stop, chunk_bytes), stop]
        chunks += [Chunk(*pair, item_bytes) for pair in pairwise(bounds)]
    return chunks


def hash_chunk(chunk: memoryview) -> int:
    """xxh3_64 of a chunk."""
    return xxhash.xxh3_64_intdigest(chunk)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """The hashes as little-endian uint64, as a manifest carries them."""
    return np.asarray(hashes, _HASH_DTYPE).tobytes()


def read_hashes(manifest: WeightManifest, chunks: Sequence[Chunk]) -> Hashes:
    """The chunk hashes of a manifest, uint64 [chunks]. Raises WeightsCorrupt unless there is one for every chunk."""
    hashes = np.frombuffer(manifest.hashes, _HASH_DTYPE)
    if len(hashes) != len(chunks):
        raise WeightsCorrupt(
            f"the manifest of {manifest.identity} has {len(hashes)} chunk hashes, {manifest.layout.total_bytes} bytes "
            f"in chunks of {manifest.chunk_bytes} need {len(chunks)}."
        )
    return hashes


def digest_hashes(hashes: bytes) -> bytes:
    """xxh3_128 of all chunk hashes. Equal for two versions only if all their chunk hashes are equal."""
    return xxhash.xxh3_128_digest(hashes)


def _runs(layout: TensorLayout) -> list[tuple[int, int, int]]:
    """(start, stop, item bytes) of neighbouring tensors whose items have one size."""
    runs: list[tuple[int, int, int]] = []
    ends = [spec.offset for spec in layout.tensors[1:]] + [layout.total_bytes]
    for spec, end in zip(layout.tensors, ends, strict=True):
        item_bytes = item_bytes_of(spec)
        if runs and runs[-1][2] == item_bytes:
            runs[-1] = (runs[-1][0], end, item_bytes)
        elif end > spec.offset:
            runs.append((spec.offset, end, item_bytes))
    return runs


def find_changed_tensors(
    layout: TensorLayout,
    chunks: Sequence[Chunk],
    old_hashes: Hashes,
    new_hashes: Hashes,
    old: memoryview | None,
    new: memoryview,
) -> list[bool]:
    """Whether each tensor of the layout changed. Exact: if a changed chunk holds several tensors, compares their
    bytes. Without the `old` bytes, all of them count as changed."""
    differs = old_hashes != new_hashes
    starts = [chunk.start for chunk in chunks]
    flags: list[bool] = []
    for spec in layout.tensors:
        begin, end = spec.offset, spec.offset + spec.nbytes
        first = max(0, bisect_left(starts, begin + 1) - 1)
        touched = [index for index in range(first, bisect_left(starts, end)) if differs[index]]
        whole = any(begin <= chunks[index].start and chunks[index].stop <= end for index in touched)
        flags.append(whole or (bool(touched) and (old is None or not _equal(old[begin:end], new[begin:end]))))
    return flags


def pack_bits(flags: Sequence[bool]) -> bytes:
    """Flags as bits, one for each tensor."""
    return np.packbits(np.asarray(flags, np.bool_)).tobytes()


def unpack_bits(packed: bytes, tensors: int) -> list[bool]:
    """The inverse of `pack`."""
    return [bool(bit) for bit in np.unpackbits(np.frombuffer(packed, np.uint8), count=tensors)]


def _equal(old: memoryview, new: memoryview) -> bool:
    return bool(np.array_equal(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)))


@dataclass(slots=True)
class ServedVersion:
    """One version as it lies in a slot. Its state changes through its methods alone:

    arriving --mark_chunk_verified, add_patch, for each chunk--> --complete--> whole --drop_patches--> served dense
    """

    identity: WeightVersion
    key: bytes
    chunks: Sequence[Chunk]
    hashes: Hashes
    digest: bytes
    block: memoryview
    _patches: dict[int, bytes] = field(default_factory=dict)
    _verified: bytearray | None = None
    """A byte for each chunk, 1 once it is verified; None: all are."""

    @classmethod
    def from_block(
        cls,
        manifest: WeightManifest,
        chunks: Sequence[Chunk],
        block: memoryview,
        patches: Mapping[int, bytes] = MappingProxyType({}),
    ) -> ServedVersion:
        """The version of `manifest`, all of which is in `block`; `patches` lead to it from its base. Raises
        WeightsCorrupt unless there is a hash for every chunk."""
        hashes = read_hashes(manifest, chunks)
        return cls(
            manifest.identity, manifest.key, chunks, hashes, digest_hashes(manifest.hashes), block, dict(patches)
        )

    @classmethod
    def from_manifest(cls, manifest: WeightManifest, chunks: Sequence[Chunk], block: memoryview) -> ServedVersion:
        """The version of `manifest`, of which nothing is in `block` yet. Raises as `whole` does."""
        version = cls.from_block(manifest, chunks, block)
        version._verified = bytearray(len(chunks))
        return version

    def has_chunk(self, index: int) -> bool:
        """Chunk `index` can be served."""
        return self._verified is None or bool(self._verified[index])

    def get_patch(self, index: int) -> bytes | None:
        """The patch that makes chunk `index` out of the base; None if it is served dense."""
        return self._patches.get(index)

    def mark_chunk_verified(self, index: int) -> None:
        """Chunk `index` lies in the block and has passed its hash."""
        assert self._verified is not None, "the version is whole already"
        self._verified[index] = 1

    def add_patch(self, index: int, patch: bytes) -> None:
        """Serve chunk `index` as this patch to receivers that have the base."""
        self._patches[index] = patch

    def mark_complete(self) -> None:
        """All chunks are verified."""
        self._verified = None

    def drop_patches(self) -> None:
        """A newer version is served, and patches are kept for the newest only: who still fetches this one gets it
        dense."""
        self._patches = {}

"""Cuts the block of all tensors into chunks for transfer, and finds the tensors that differ between two versions.

    tensors   | a: bf16 | b: bf16      | c: fp32 | d: fp8 |
    chunks    |   0   |   1   |   2    |    3    |   4    |

Both sides cut a layout identically, so a number identifies a chunk. All items of a chunk have the same size, because
patches count in items; within that rule, chunks are as long as `chunk_bytes` allows. `find_changed_tensors` lets an
engine reload only the tensors that changed. `ServedVersion` is a block with its chunks and their hashes.
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
        """Return the chunk's bytes in `block`, without copying."""
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
        for chunk_start, chunk_stop in pairwise(bounds):
            chunks.append(Chunk(chunk_start, chunk_stop, item_bytes))
    return chunks


def hash_chunk(chunk: memoryview) -> int:
    """xxh3_64 of a chunk."""
    return xxhash.xxh3_64_intdigest(chunk)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Encode hashes as little-endian uint64, the format of a manifest."""
    return np.asarray(hashes, _HASH_DTYPE).tobytes()


def read_hashes(manifest: WeightManifest, chunks: Sequence[Chunk]) -> Hashes:
    """Return the chunk hashes of a manifest, uint64 [chunks]. Raises WeightsCorrupt unless there is one per chunk."""
    hashes = np.frombuffer(manifest.hashes, _HASH_DTYPE)
    if len(hashes) != len(chunks):
        raise WeightsCorrupt(
            f"the manifest of {manifest.identity} has {len(hashes)} chunk hashes, but {manifest.layout.total_bytes} "
            f"bytes in chunks of {manifest.chunk_bytes} need {len(chunks)}."
        )
    return hashes


def digest_hashes(hashes: bytes) -> bytes:
    """xxh3_128 of all chunk hashes. Equal for two versions only if all their chunk hashes are equal."""
    return xxhash.xxh3_128_digest(hashes)


def _runs(layout: TensorLayout) -> list[tuple[int, int, int]]:
    """(start, stop, item bytes) of each run of adjacent tensors with the same item size, padding included."""
    runs: list[tuple[int, int, int]] = []
    next_offsets = [spec.offset for spec in layout.tensors[1:]] + [layout.total_bytes]
    for spec, next_offset in zip(layout.tensors, next_offsets, strict=True):
        item_bytes = item_bytes_of(spec)
        if runs and runs[-1][2] == item_bytes:
            run_start = runs[-1][0]
            runs[-1] = (run_start, next_offset, item_bytes)
        elif next_offset > spec.offset:  # not an empty tensor
            runs.append((spec.offset, next_offset, item_bytes))
    return runs


def find_changed_tensors(
    layout: TensorLayout,
    chunks: Sequence[Chunk],
    old_hashes: Hashes,
    new_hashes: Hashes,
    old: memoryview | None,
    new: memoryview,
) -> list[bool]:
    """Return one flag per tensor of the layout, True if its bytes changed.

    A changed chunk that lies inside one tensor decides for that tensor. If it covers several tensors, their bytes are
    compared; without the `old` bytes, all of them count as changed.
    """
    chunk_changed = old_hashes != new_hashes
    starts = [chunk.start for chunk in chunks]
    flags: list[bool] = []
    for spec in layout.tensors:
        start, stop = spec.offset, spec.offset + spec.nbytes
        first = max(0, bisect_left(starts, start + 1) - 1)
        last = bisect_left(starts, stop)
        changed = [chunks[index] for index in range(first, last) if chunk_changed[index]]

        if any(start <= chunk.start and chunk.stop <= stop for chunk in changed):
            flags.append(True)
        elif not changed:
            flags.append(False)
        else:
            flags.append(old is None or not _equal(old[start:stop], new[start:stop]))
    return flags


def pack_bits(flags: Sequence[bool]) -> bytes:
    """Encode one flag per tensor as bits."""
    return np.packbits(np.asarray(flags, np.bool_)).tobytes()


def unpack_bits(packed: bytes, tensors: int) -> list[bool]:
    """Decode the result of `pack_bits`."""
    return [bool(bit) for bit in np.unpackbits(np.frombuffer(packed, np.uint8), count=tensors)]


def _equal(old: memoryview, new: memoryview) -> bool:
    return bool(np.array_equal(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)))


@dataclass(slots=True)
class ServedVersion:
    """One version in a slot of a store, complete or arriving. Its state changes only through its methods:

    from_manifest --> arriving --mark_chunk_verified, add_patch--> arriving --mark_complete--> complete
    from_block ----------------------------------------------------------------------------------^  |
                                                           complete, dense only <--drop_patches-----+
    """

    identity: WeightVersion
    key: bytes
    chunks: Sequence[Chunk]
    hashes: Hashes
    digest: bytes
    block: memoryview
    _patches: dict[int, bytes] = field(default_factory=dict)
    _verified: bytearray | None = None
    """One byte per chunk, 1 once it is verified. None: all chunks are."""

    @classmethod
    def from_block(
        cls,
        manifest: WeightManifest,
        chunks: Sequence[Chunk],
        block: memoryview,
        patches: Mapping[int, bytes] = MappingProxyType({}),
    ) -> ServedVersion:
        """Create a complete version. `patches` turn chunks of its base into its own, by chunk number.

        Raises WeightsCorrupt unless the manifest has one hash per chunk.
        """
        return cls(
            identity=manifest.identity,
            key=manifest.key,
            chunks=chunks,
            hashes=read_hashes(manifest, chunks),
            digest=digest_hashes(manifest.hashes),
            block=block,
            _patches=dict(patches),
        )

    @classmethod
    def from_manifest(cls, manifest: WeightManifest, chunks: Sequence[Chunk], block: memoryview) -> ServedVersion:
        """Create an arriving version without any chunk yet. Raises WeightsCorrupt like `from_block`."""
        version = cls.from_block(manifest, chunks, block)
        version._verified = bytearray(len(chunks))
        return version

    def has_chunk(self, index: int) -> bool:
        """True if chunk `index` is verified and can be served."""
        return self._verified is None or bool(self._verified[index])

    def get_patch(self, index: int) -> bytes | None:
        """Return the patch from the base's chunk `index` to this one. None if the chunk is served dense."""
        return self._patches.get(index)

    def mark_chunk_verified(self, index: int) -> None:
        """Record that chunk `index` is in the block and its hash matches."""
        assert self._verified is not None, "the version is complete already"
        self._verified[index] = 1

    def add_patch(self, index: int, patch: bytes) -> None:
        """Serve chunk `index` as this patch to receivers that request patches."""
        self._patches[index] = patch

    def mark_complete(self) -> None:
        """Record that all chunks are verified."""
        self._verified = None

    def drop_patches(self) -> None:
        """Serve all chunks dense from now on. Patches are retained only for the newest version, to save memory."""
        self._patches = {}

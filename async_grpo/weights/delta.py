"""Lossless patches between two versions of one chunk: which items changed, and by how much.

    patch = header | gaps (zstd) | differences (zstd) | tail

An optimizer step with a small learning rate leaves most bfloat16 values unchanged and moves most of the others to a
neighbouring value. So both streams are small and compress well.

- `gaps`         one byte per changed item: its distance from the previous changed item (the first counts from -1). A
                 byte of 255 adds 255 to the distance and stands for no item
- `differences`  new - old per changed item, as little-endian integers with wrap-around, zigzag-encoded (0, -1, 1, -2,
                 ... become 0, 1, 2, 3, ...) and stored as byte planes, low bytes first
- `tail`         the last `block_bytes % item_bytes` bytes of the new block, copied

Items are treated as integers, not floating-point numbers, so every bit pattern is restored exactly. A patch is
validated completely before the first byte of the block is written. Applying it needs less than 30 times the memory of
the block.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from async_grpo.errors import WeightsCorrupt, WeightsError

FORMAT = 1
"""Format number of patches. Incremented when an older reader would misread a newer one."""

ITEM_BYTES = (1, 2, 4, 8)
_ENTROPY_CODING = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
"""The streams have no repeated sequences, so the smallest match search is fastest and even gives shorter output."""
_SKIP = 255
_HEADER = struct.Struct("<BBxxxxxxQQQQ")  # format, item bytes, then the four numbers of _Header

Integers = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class _Header(NamedTuple):
    item_bytes: int
    block_bytes: int
    changed: int
    """Number of items that differ."""
    gaps_bytes: int
    """Length of the gaps before compression."""
    packed_gaps_bytes: int
    """Length of the gaps after compression."""

    @property
    def items(self) -> int:
        return self.block_bytes // self.item_bytes

    @property
    def tail_bytes(self) -> int:
        return self.block_bytes % self.item_bytes


def make_patch(base: memoryview, new: memoryview, item_bytes: int) -> bytes:
    """Return the patch that turns `base` into `new`. It may be longer than the chunk; then the caller sends the chunk.

    Raises WeightsError if the two lengths differ, or if items do not have 1, 2, 4 or 8 bytes.

    >>> block = bytearray(b"abcd")
    >>> apply_patch(memoryview(block), make_patch(memoryview(b"abcd"), memoryview(b"abXd"), 2))
    >>> block
    bytearray(b'abXd')
    """
    if item_bytes not in ITEM_BYTES or base.nbytes != new.nbytes:
        raise WeightsError(
            f"cannot make a patch from {base.nbytes} to {new.nbytes} bytes with items of {item_bytes} bytes: the "
            f"lengths must be equal, and items must have {', '.join(map(str, ITEM_BYTES))} bytes."
        )
    old_items = _view_items(base, item_bytes)
    new_items = _view_items(new, item_bytes)
    positions = np.flatnonzero(old_items != new_items)
    differences = new_items.take(positions) - old_items.take(positions)

    gaps = _encode_gaps(positions)
    packed_gaps = _compress(gaps)
    packed_differences = _compress(_to_planes(_zigzag(differences)))

    header = _Header(item_bytes, new.nbytes, len(positions), len(gaps), len(packed_gaps))
    tail = new.cast("B")[new.nbytes - header.tail_bytes :]
    return b"".join((_HEADER.pack(FORMAT, *header), packed_gaps, packed_differences, tail))


def apply_patch(block: memoryview, patch: bytes | memoryview) -> None:
    """Turn `block` from the base into the new chunk, in place.

    Raises WeightsCorrupt, leaving the block unchanged, if the patch is malformed or made for a block of another length.
    Does not check that the block is the right base; the caller checks the hash of the result.
    """
    patch = memoryview(patch)
    header = _read_header(patch, block.nbytes)
    body = patch[_HEADER.size : patch.nbytes - header.tail_bytes]
    gaps = _decompress(body[: header.packed_gaps_bytes], header.gaps_bytes, "gaps")
    planes = _decompress(body[header.packed_gaps_bytes :], header.changed * header.item_bytes, "differences")
    positions = _decode_gaps(gaps, header)
    differences = _unzigzag(_from_planes(planes, header.item_bytes))

    # Everything has been validated: only now is the block written.
    items = _view_items(block, header.item_bytes)
    items[positions] = items.take(positions) + differences
    block.cast("B")[block.nbytes - header.tail_bytes :] = patch[patch.nbytes - header.tail_bytes :]


def _read_header(patch: memoryview, block_bytes: int) -> _Header:
    """Read and check the header. Raises WeightsCorrupt for implausible numbers, before memory is allocated for them."""
    if patch.nbytes < _HEADER.size:
        raise _corrupt(f"it has {patch.nbytes} bytes, a header alone has {_HEADER.size}")
    version, item_bytes, *numbers = _HEADER.unpack_from(patch)
    if version != FORMAT or item_bytes not in ITEM_BYTES:
        raise _corrupt(f"it has format {version} and items of {item_bytes} bytes, this reader supports format {FORMAT}")

    header = _Header(item_bytes, *numbers)
    if header.block_bytes != block_bytes:
        raise _corrupt(f"it is for a block of {header.block_bytes} bytes, this one has {block_bytes}")
    skips = header.gaps_bytes - header.changed
    if header.changed > header.items or not 0 <= skips <= header.items // _SKIP:
        raise _corrupt(f"{header.changed} changes in {header.gaps_bytes} gaps cannot be among {header.items} items")
    if header.packed_gaps_bytes > patch.nbytes - _HEADER.size - header.tail_bytes:
        raise _corrupt(f"its gaps ({header.packed_gaps_bytes} bytes) would reach beyond its end ({patch.nbytes})")
    return header


def _view_items(block: memoryview, item_bytes: int) -> Integers:
    """View all complete items of a block as unsigned integers."""
    return np.frombuffer(block, f"<u{item_bytes}", block.nbytes // item_bytes)


def _encode_gaps(positions: npt.NDArray[np.intp]) -> Bytes:
    distances = np.diff(positions, prepend=-1)
    gaps = distances.astype(np.uint8)
    far = np.flatnonzero(distances >= _SKIP)
    if not len(far):
        return gaps
    skips, gaps[far] = np.divmod(distances[far], _SKIP)
    return np.insert(gaps, np.repeat(far, skips), _SKIP)


def _decode_gaps(gaps: Bytes, header: _Header) -> npt.NDArray[np.intp]:
    """Return the positions of the changed items.

    Raises WeightsCorrupt unless they ascend, are within the block and match the header's count.
    """
    positions = (np.cumsum(gaps, dtype=np.intp) - 1)[gaps != _SKIP]
    if len(positions) != header.changed:
        raise _corrupt(f"its gaps name {len(positions)} items, its header {header.changed}")
    if header.changed and not (positions[0] >= 0 and positions[-1] < header.items and np.diff(positions).all()):
        raise _corrupt(f"its positions do not ascend within [0, {header.items})")
    return positions


def _zigzag(differences: Integers) -> Integers:
    """Map wrapped differences to unsigned numbers that are small for small steps up or down."""
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _unzigzag(numbers: Integers) -> Integers:
    one = numbers.dtype.type(1)
    return (numbers >> one) ^ (~(numbers & one) + one)


def _to_planes(numbers: Integers) -> Bytes:
    """Byte planes, uint8 [item bytes, numbers]: all lowest bytes first. The high planes are almost all zero."""
    planes = np.empty((numbers.itemsize, len(numbers)), np.uint8)
    columns = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T
    for plane, column in zip(planes, columns, strict=True):
        plane[:] = column
    return planes


def _from_planes(planes: Bytes, item_bytes: int) -> Integers:
    numbers = np.empty(planes.size // item_bytes, f"<u{item_bytes}")
    columns = numbers.view(np.uint8).reshape(-1, item_bytes).T
    for column, plane in zip(columns, planes.reshape(item_bytes, -1), strict=True):
        column[:] = plane
    return numbers


def _compress(stream: Bytes) -> bytes:
    return zstandard.ZstdCompressor(compression_params=_ENTROPY_CODING).compress(stream.data)


def _decompress(packed: memoryview, length: int, stream_name: str) -> Bytes:
    """Decompress a zstd frame. Raises WeightsCorrupt unless it is one frame that declares and has `length` bytes."""
    try:
        # zstandard allocates the size that the frame declares, ignoring max_output_size, so we check that size first.
        declared = zstandard.frame_content_size(packed)
        if declared != length:
            raise _corrupt(f"its {stream_name} claim {declared} bytes, its header says {length}")
        stream = zstandard.ZstdDecompressor().decompress(packed, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _corrupt(f"its {stream_name} cannot be decompressed ({error})") from error
    return np.frombuffer(stream, np.uint8)


def _corrupt(reason: str) -> WeightsCorrupt:
    return WeightsCorrupt(f"a patch cannot be applied: {reason}. Nothing was written; fetch the chunk itself.")

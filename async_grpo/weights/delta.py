"""Lossless difference between two versions of one chunk: which items changed, and by how much.

    patch = header | gaps (zstd) | differences (zstd) | tail

An optimizer step with a small learning rate leaves most bfloat16 values unchanged and moves most of the others to a
neighbouring value. So both streams are small, and compress well.

- `gaps`         one byte for each changed item: its distance from the changed item before it (for the first: from -1).
                 A byte of 255 adds 255 to the distance, and names no item
- `differences`  new - old of the items as little-endian integers, wrapping around, in zigzag order (0, -1, 1, -2, ...
                 become 0, 1, 2, 3, ...), stored as byte planes: all low bytes first
- `tail`         the last `block_bytes % item_bytes` bytes, unchanged

Items are integers here, not floating-point numbers, so any bytes are restored exactly. A patch is checked completely
before the first byte of the block is written. Applying it takes less memory than 30 times the block.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from async_grpo.errors import WeightsCorrupt, WeightsError

FORMAT = 1
"""Incremented when a patch changes in a way that an older reader would misread."""

ITEM_BYTES = (1, 2, 4, 8)
_ENTROPY_CODING = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
"""These streams have no repeated sequences: searching for them costs time and makes the output longer."""
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
    """The patch that turns `base` into `new`, which have the same length. The patch may be longer than the chunk: the
    caller sends whichever is shorter.

    Raises WeightsError if the lengths differ, or if items do not have 1, 2, 4 or 8 bytes.

    >>> block = bytearray(b"abcd")
    >>> apply_patch(memoryview(block), make_patch(memoryview(b"abcd"), memoryview(b"abXd"), 2))
    >>> block
    bytearray(b'abXd')
    """
    if item_bytes not in ITEM_BYTES or base.nbytes != new.nbytes:
        raise WeightsError(
            f"a difference of {base.nbytes} and {new.nbytes} bytes in items of {item_bytes}: lengths must be equal "
            f"and items have {', '.join(map(str, ITEM_BYTES))} bytes."
        )
    old_items, new_items = _items(base, item_bytes), _items(new, item_bytes)
    positions = np.flatnonzero(old_items != new_items)
    gaps = _gaps(positions)
    packed_gaps = _pack(gaps)
    differences = _pack(_planes(_zigzag(new_items.take(positions) - old_items.take(positions))))
    header = _Header(item_bytes, new.nbytes, len(positions), len(gaps), len(packed_gaps))
    tail = new.cast("B")[new.nbytes - header.tail_bytes :]
    return b"".join((_HEADER.pack(FORMAT, *header), packed_gaps, differences, tail))


def apply_patch(block: memoryview, patch: bytes | memoryview) -> None:
    """Turn `block`, which holds the base, into the new chunk, in place.

    Raises WeightsCorrupt, and leaves the block unchanged, if the patch is malformed or for a block of another length.
    Does not check that the block holds the right base; the caller knows by its hash.
    """
    patch = memoryview(patch)
    header = _read_header(patch, block.nbytes)
    body = patch[_HEADER.size : patch.nbytes - header.tail_bytes]
    gaps = _unpack(body[: header.packed_gaps_bytes], header.gaps_bytes, "gaps")
    planes = _unpack(body[header.packed_gaps_bytes :], header.changed * header.item_bytes, "differences")
    positions = _positions(gaps, header)
    items = _items(block, header.item_bytes)
    items[positions] = items.take(positions) + _unzigzag(_from_planes(planes, header.item_bytes))
    block.cast("B")[block.nbytes - header.tail_bytes :] = patch[patch.nbytes - header.tail_bytes :]


def _read_header(patch: memoryview, block_bytes: int) -> _Header:
    """Raise WeightsCorrupt unless every number in the header is plausible, so that memory may be allocated for it."""
    if patch.nbytes < _HEADER.size:
        raise _corrupt(f"it has {patch.nbytes} bytes, a header alone has {_HEADER.size}")
    version, item_bytes, *numbers = _HEADER.unpack_from(patch)
    if version != FORMAT or item_bytes not in ITEM_BYTES:
        raise _corrupt(f"it has format {version} and items of {item_bytes} bytes, this reader knows format {FORMAT}")
    header = _Header(item_bytes, *numbers)
    if header.block_bytes != block_bytes:
        raise _corrupt(f"it is for a block of {header.block_bytes} bytes, this one has {block_bytes}")
    skips = header.gaps_bytes - header.changed
    if header.changed > header.items or not 0 <= skips <= header.items // _SKIP:
        raise _corrupt(f"{header.changed} changes in {header.gaps_bytes} gaps cannot be among {header.items} items")
    if header.packed_gaps_bytes > patch.nbytes - _HEADER.size - header.tail_bytes:
        raise _corrupt(f"its gaps ({header.packed_gaps_bytes} bytes) would reach beyond its end ({patch.nbytes})")
    return header


def _items(block: memoryview, item_bytes: int) -> Integers:
    """The whole items of a block as unsigned integers, in place."""
    return np.frombuffer(block, f"<u{item_bytes}", block.nbytes // item_bytes)


def _gaps(positions: npt.NDArray[np.intp]) -> Bytes:
    distances = np.diff(positions, prepend=-1)
    gaps = distances.astype(np.uint8)
    far = np.flatnonzero(distances >= _SKIP)
    skips, gaps[far] = np.divmod(distances[far], _SKIP)
    return np.insert(gaps, np.repeat(far, skips), _SKIP) if len(far) else gaps


def _positions(gaps: Bytes, header: _Header) -> npt.NDArray[np.intp]:
    """Raise WeightsCorrupt unless positions ascend, lie in the block and are as many as the header says."""
    positions = (np.cumsum(gaps, dtype=np.intp) - 1)[gaps != _SKIP]
    if len(positions) != header.changed:
        raise _corrupt(f"its gaps name {len(positions)} items, its header {header.changed}")
    if header.changed and not (positions[0] >= 0 and positions[-1] < header.items and np.diff(positions).all()):
        raise _corrupt(f"its positions do not ascend within [0, {header.items})")
    return positions


def _zigzag(differences: Integers) -> Integers:
    """Map unsigned differences to numbers that are small for small steps up or down."""
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _unzigzag(numbers: Integers) -> Integers:
    one = numbers.dtype.type(1)
    return (numbers >> one) ^ (~(numbers & one) + one)


def _planes(numbers: Integers) -> Bytes:
    """The bytes of the numbers, plane by plane."""
    planes = np.empty((numbers.itemsize, len(numbers)), np.uint8)
    for plane, part in zip(planes, numbers.view(np.uint8).reshape(-1, numbers.itemsize).T, strict=True):
        plane[:] = part
    return planes


def _from_planes(planes: Bytes, item_bytes: int) -> Integers:
    numbers = np.empty(planes.size // item_bytes, f"<u{item_bytes}")
    parts = numbers.view(np.uint8).reshape(-1, item_bytes).T
    for part, plane in zip(parts, planes.reshape(item_bytes, -1), strict=True):
        part[:] = plane
    return numbers


def _pack(stream: Bytes) -> bytes:
    return zstandard.ZstdCompressor(compression_params=_ENTROPY_CODING).compress(stream.data)


def _unpack(packed: memoryview, length: int, what: str) -> Bytes:
    """Decompress a zstd frame that must declare, and contain, exactly `length` bytes, with nothing after it."""
    try:
        stated = zstandard.frame_content_size(packed)  # what decompress would allocate, whatever limit it is given
        if stated != length:
            raise _corrupt(f"its {what} claim {stated} bytes, its header says {length}")
        stream = zstandard.ZstdDecompressor().decompress(packed, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _corrupt(f"its {what} cannot be decompressed ({error})") from error
    return np.frombuffer(stream, np.uint8)


def _corrupt(reason: str) -> WeightsCorrupt:
    return WeightsCorrupt(f"a difference cannot be applied: {reason}. Nothing was written; fetch the chunk itself.")

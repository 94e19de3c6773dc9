"""What one version of the weights looks like as bytes.

- `Identity`    (epoch, version), ordered: a restarted trainer is newer whatever its version
- `Layout`      where every tensor lies in one flat, 64-byte aligned block
- `Manifest`    one version of that block, cut into chunks with their hashes

Records are MessagePack maps with named fields; the plain `msgpack` package reads them. Dtypes are
strings ("bfloat16", "float32"): nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import xxhash

from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.wire.records import Record

FORMAT = 1
"""Raised by one when a manifest or a store changes in a way that an older reader would misread."""

ALIGNMENT = 64
"""Tensors start at multiples of this, so that any dtype can be viewed in place."""

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class Identity(NamedTuple):
    """Which weights: compares by epoch first, then by version."""

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of epoch {self.epoch}"


class TensorSpec(Record, frozen=True, kw_only=True, tag="tensor"):
    """One tensor (Hugging Face name) at bytes [offset, offset + nbytes) of the block."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


class Layout(Record, frozen=True, kw_only=True, tag="layout"):
    """All tensors of the model, in the order in which they are loaded."""

    tensors: list[TensorSpec]
    total_bytes: int

    def by_name(self) -> dict[str, TensorSpec]:
        """Tensor specs by name."""
        return {spec.name: spec for spec in self.tensors}


class Manifest(Record, frozen=True, kw_only=True, tag="manifest"):
    """One version: chunk i is bytes [i * chunk_bytes, (i + 1) * chunk_bytes) of the block.

    `base_version` names the version that an encoding other than "dense" builds on.
    """

    format: int = FORMAT
    epoch: int
    version: int
    base_version: int | None = None
    encoding: str = "dense"
    layout: Layout
    chunk_bytes: int
    chunk_hashes: list[int]
    """xxh3_64 of every chunk."""

    @property
    def identity(self) -> Identity:
        """(epoch, version)."""
        return Identity(self.epoch, self.version)

    def chunk(self, index: int) -> slice:
        """Bytes of chunk `index` in the block."""
        return chunk_slice(index, self.chunk_bytes, self.layout.total_bytes)

    def validate(self) -> None:
        """Raise WeightsCorrupt if this reader cannot apply the manifest exactly as it was meant."""
        if (self.format, self.encoding) != (FORMAT, "dense"):
            raise WeightsCorrupt(
                f"the manifest of {self.identity} has format {self.format} and encoding {self.encoding!r}, "
                f"this reader knows format {FORMAT} and 'dense'. Run the same release on both sides."
            )
        expected = count_chunks(self.layout.total_bytes, self.chunk_bytes)
        if len(self.chunk_hashes) != expected:
            raise WeightsCorrupt(
                f"the manifest of {self.identity} has {len(self.chunk_hashes)} chunk hashes, "
                f"{self.layout.total_bytes} bytes in chunks of {self.chunk_bytes} need {expected}."
            )


def layout_of(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Layout:
    """Layout of (name, dtype, shape) triples, in that order.

    >>> layout_of([("a", "bfloat16", [3]), ("b", "float32", [2, 2])]).total_bytes
    128
    """
    specs: list[TensorSpec] = []
    offset = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * _item_bytes(name, dtype)
        specs.append(TensorSpec(name=name, dtype=dtype, shape=list(shape), offset=offset, nbytes=nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if len({spec.name for spec in specs}) != len(specs):
        raise WeightsError("two tensors of the layout have the same name.")
    if not specs:
        raise WeightsError("a layout needs at least one tensor.")
    return Layout(tensors=specs, total_bytes=offset)


def manifest_of(identity: Identity, layout: Layout, block: memoryview, chunk_bytes: int) -> Manifest:
    """The dense manifest of `block`, hashing every chunk."""
    count = count_chunks(layout.total_bytes, chunk_bytes)
    slices = (chunk_slice(index, chunk_bytes, layout.total_bytes) for index in range(count))
    return Manifest(
        epoch=identity.epoch,
        version=identity.version,
        layout=layout,
        chunk_bytes=chunk_bytes,
        chunk_hashes=[hash_chunk(block[part]) for part in slices],
    )


def hash_chunk(chunk: memoryview) -> int:
    """xxh3_64 of a chunk."""
    return xxhash.xxh3_64_intdigest(chunk)


def count_chunks(total_bytes: int, chunk_bytes: int) -> int:
    """Chunks that cover `total_bytes`; the last one may be short."""
    return -(-total_bytes // chunk_bytes)


def chunk_slice(index: int, chunk_bytes: int, total_bytes: int) -> slice:
    """Bytes of chunk `index`."""
    return slice(index * chunk_bytes, min((index + 1) * chunk_bytes, total_bytes))


def _item_bytes(name: str, dtype: str) -> int:
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise WeightsError(f"tensor {name!r} has dtype {dtype!r}, known are {', '.join(DTYPE_BYTES)}.") from None

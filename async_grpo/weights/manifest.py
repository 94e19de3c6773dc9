"""Identity, memory layout and manifest of one version of the weights.

- `WeightVersion`     (epoch, version), ordered by epoch first: a restarted trainer's weights are always newer
- `TensorLayout`      offset of every tensor in one flat, 64-byte aligned block
- `WeightManifest`    chunk hashes of one version of that block, and the version that its patches apply to

Records are MessagePack maps with named fields, readable with the plain `msgpack` package. Dtypes are strings
("bfloat16", "float32"), so this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.wire.records import Record

FORMAT = 2
"""Format number of manifests and stores. Incremented when an older reader would misread a newer one."""

ALIGNMENT = 64
"""Alignment of tensors in bytes, so that any dtype can be viewed in place."""

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


class WeightVersion(NamedTuple):
    """Identifies one version of the weights. Ordered by epoch, then by version."""

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of epoch {self.epoch}"


class Versioned(Record, frozen=True, kw_only=True):
    """Base class of records about one version."""

    epoch: int
    version: int

    @property
    def identity(self) -> WeightVersion:
        """(epoch, version)."""
        return WeightVersion(self.epoch, self.version)


class TensorSpec(Record, frozen=True, kw_only=True, tag="tensor"):
    """One tensor, by its Hugging Face name, at bytes [offset, offset + nbytes) of the block."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


class TensorLayout(Record, frozen=True, kw_only=True, tag="layout"):
    """All tensors of the model, in loading order."""

    tensors: list[TensorSpec]
    total_bytes: int

    def by_name(self) -> dict[str, TensorSpec]:
        """Tensor specs by name."""
        return {spec.name: spec for spec in self.tensors}


class BaseVersion(Versioned, frozen=True, kw_only=True, tag="base"):
    """The version that patches apply to. `digest` proves that a receiver has exactly these bytes."""

    digest: bytes


class WeightManifest(Record, frozen=True, kw_only=True, tag="manifest"):
    """One version, cut into chunks by `chunks.cut_into_chunks`. With a `base`, some chunks are available as patches."""

    format: int = FORMAT
    epoch: int
    version: int
    layout: TensorLayout
    chunk_bytes: int
    hashes: bytes
    """xxh3_64 of every chunk, little-endian uint64."""
    key: bytes
    """Signs every request for a chunk of this version (`messages.sign`)."""
    base: BaseVersion | None = None

    @property
    def identity(self) -> WeightVersion:
        """(epoch, version)."""
        return WeightVersion(self.epoch, self.version)

    def validate(self) -> None:
        """Raise WeightsCorrupt if this reader cannot apply the manifest exactly."""
        if self.format != FORMAT:
            raise WeightsCorrupt(
                f"the manifest of {self.identity} has format {self.format}, this reader supports {FORMAT}. "
                "Run the same release on both sides."
            )
        if self.chunk_bytes < ALIGNMENT or self.chunk_bytes % ALIGNMENT:
            raise WeightsCorrupt(
                f"the manifest of {self.identity} has chunks of {self.chunk_bytes} bytes, which must be a multiple of "
                f"{ALIGNMENT}."
            )
        # Offsets follow from dtypes and shapes. A manifest with other offsets would let tensors overlap or be read
        # beyond the block.
        if make_layout((spec.name, spec.dtype, spec.shape) for spec in self.layout.tensors) != self.layout:
            raise WeightsCorrupt(f"the tensor offsets of {self.identity} do not follow from their shapes.")


def make_layout(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> TensorLayout:
    """Lay out (name, dtype, shape) triples in the given order. Raises WeightsError for duplicates or unknown dtypes.

    >>> make_layout([("a", "bfloat16", [3]), ("b", "float32", [2, 2])]).total_bytes
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
        raise WeightsError("the layout has no tensors; it needs at least one.")
    return TensorLayout(tensors=specs, total_bytes=offset)


def item_bytes_of(spec: TensorSpec) -> int:
    """Bytes of one element of the tensor."""
    return _item_bytes(spec.name, spec.dtype)


def _item_bytes(name: str, dtype: str) -> int:
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise WeightsError(
            f"tensor {name!r} has dtype {dtype!r}; supported dtypes are {', '.join(DTYPE_BYTES)}."
        ) from None

"""Interfaces between the weight transports and the engines.

    trainer --WeightSender.publish_weights--> transport --WeightReceiver.hold_newest--> HeldWeights
                                                                                            |
                                              engine worker <--TensorReader-- SourceReader <+

A transport (`weights.transport`) provides a sender and a receiver. The receiver passes weights to the engine's workers
as `HeldWeights`, and every engine reads them through a `TensorReader`. So E engines and T transports need E + T
modules, not E * T.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from async_grpo.weights.manifest import TensorLayout, TensorSpec, Versioned, WeightVersion
from async_grpo.wire.board import PublisherAddress
from async_grpo.wire.records import Record

Resolve = Callable[[], Awaitable[PublisherAddress | None]]
"""Looks up the publisher's address on the run board; None before the trainer has set it."""


class StoreSource(Record, frozen=True, kw_only=True, tag="store_source"):
    """Weights in this machine's shared-memory store."""

    path: str


class CheckpointSource(Record, frozen=True, kw_only=True, tag="checkpoint_source"):
    """Weights in a Hugging Face folder on this machine."""

    folder: str
    dtype: str
    """Dtype that the tensors are converted to, "bfloat16" or "float32"."""
    flipped: bool = False
    """True to negate every second row. Gives a different policy with weights of the same magnitude, for tests."""


class MergeBase(Record, frozen=True, kw_only=True, tag="merge_base"):
    """The frozen weights that adapters (`model.lora`) are added to: a Hugging Face folder on this machine."""

    folder: str
    dtype: str
    """Dtype of the sum, "bfloat16" or "float32"."""
    scale: float


class HeldWeights(Versioned, frozen=True, kw_only=True, tag="held_weights"):
    """One version that is not overwritten while the receiver's hold lasts. Sent to the engine's workers."""

    source: StoreSource | CheckpointSource
    base: MergeBase | None = None
    """Set by the engine if the weights are adapters. None: they are the whole model."""

    @classmethod
    def in_store(cls, path: Path, *, epoch: int, version: int) -> HeldWeights:
        """Return a version that is in the shared-memory store at `path`."""
        return cls(epoch=epoch, version=version, source=StoreSource(path=str(path)))


class WeightReceiver(Protocol):
    """The newest weights, as one rollout server sees them."""

    @property
    def last_transfer_s(self) -> float:
        """Transfer time of the newest weights in seconds, from the manifest to the last chunk."""
        ...

    async def wait_for_newer_version(self, after: WeightVersion, timeout_s: float) -> WeightVersion:
        """Wait for weights newer than `after`. Versions in between may be skipped; older epochs are ignored.

        Raises WaitTimeout if none arrive in time, PublisherLost if the publisher is silent, and WeightsCorrupt if
        chunks keep failing their hash or belong to another model.
        """
        ...

    def hold_newest(self) -> AbstractAsyncContextManager[HeldWeights]:
        """Protect the newest weights from being overwritten inside the block. Raises WaitTimeout if there are none."""
        ...

    async def close(self) -> None:
        """Stop receiving. Safe to call twice."""
        ...


class TensorReader(Protocol):
    """Read access to the tensors of one version."""

    @property
    def layout(self) -> TensorLayout:
        """Name, dtype, shape and offset of every tensor."""
        ...

    def changed_since(self, base: WeightVersion) -> list[TensorSpec] | None:
        """Tensors whose bytes differ from `base`. None if unknown: the engine must load all tensors."""
        ...

    def read(self, spec: TensorSpec) -> memoryview:
        """Return the bytes of one tensor."""
        ...

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield every tensor with its bytes."""
        ...

    def verify(self) -> None:
        """Raise WeightsCorrupt if the data may have been overwritten since it was opened.

        Call it after the last read: bytes are read in place, so nothing that was read is valid before this check.
        """
        ...

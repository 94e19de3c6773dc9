"""The seam of the weights' path: what a transport offers to the trainer and to a rollout server.

    trainer --WeightSender.publish--> transport --WeightReceiver.hold--> HeldWeights --SourceReader--> tensors

A transport (`weights.transport`) makes senders and receivers. What it holds crosses into the engine's workers as
`HeldWeights`, and every engine reads it through a `TensorReader`; so E engines and T transports are E + T modules.
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
"""Asks the run board where the weights are published; None if nobody has said so yet."""


class StoreSource(Record, frozen=True, kw_only=True, tag="store_source"):
    """Weights that lie in the shared-memory store of this machine."""

    path: str


class CheckpointSource(Record, frozen=True, kw_only=True, tag="checkpoint_source"):
    """Weights of a Hugging Face folder of this machine, read from its files."""

    folder: str
    dtype: str
    """Of every tensor that is read, "bfloat16" or "float32"."""
    flipped: bool = False
    """True for another policy with weights of the same magnitudes: the sign of every second row is changed."""


class MergeBase(Record, frozen=True, kw_only=True, tag="merge_base"):
    """What held adapters (`model.lora`) are added to: the weights of a Hugging Face folder of this machine."""

    folder: str
    dtype: str
    """Of the sum, "bfloat16" or "float32"."""
    scale: float


class HeldWeights(Versioned, frozen=True, kw_only=True, tag="held_weights"):
    """One version that stays readable while it is held; crosses into the engine's workers."""

    source: StoreSource | CheckpointSource
    base: MergeBase | None = None
    """Set by an engine for weights that are adapters. None: they are the whole model."""

    @classmethod
    def in_store(cls, path: Path, *, epoch: int, version: int) -> HeldWeights:
        """Weights of the shared-memory store at `path`."""
        return cls(epoch=epoch, version=version, source=StoreSource(path=str(path)))


class WeightReceiver(Protocol):
    """The newest weights, as one rollout server sees them."""

    @property
    def last_transfer_s(self) -> float:
        """Seconds that the newest weights took to this machine, from their manifest until everything was received."""
        ...

    async def wait_for_newer_version(self, after: WeightVersion, timeout_s: float) -> WeightVersion:
        """Wait for weights newer than `after`; versions in between may be skipped, older epochs are refused.

        Raises WaitTimeout if none come in time, PublisherLost if that is because the sender is gone, and
        WeightsCorrupt for bytes that keep failing their hash or belong to another model.
        """
        ...

    def hold_newest(self) -> AbstractAsyncContextManager[HeldWeights]:
        """The newest weights, unchanged for the length of the block. Raises WaitTimeout if there are none."""
        ...

    async def close(self) -> None:
        """Stop receiving. Safe to call twice."""
        ...


class TensorReader(Protocol):
    """The tensors of one version, in place."""

    @property
    def layout(self) -> TensorLayout:
        """Name, dtype, shape and place of every tensor."""
        ...

    def changed_since(self, base: WeightVersion) -> list[TensorSpec] | None:
        """The tensors whose bytes differ from those of `base`; None if that is not known, so that all must be
        loaded."""
        ...

    def read(self, spec: TensorSpec) -> memoryview:
        """The bytes of one tensor of the layout."""
        ...

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Every tensor with its bytes."""
        ...

    def verify(self) -> None:
        """Raise WeightsCorrupt if anything that was read may have been overwritten meanwhile."""
        ...

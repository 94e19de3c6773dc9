"""The seam of the weights' path: what a transport offers to the trainer and to a rollout server.

    trainer --WeightSender.publish--> transport --WeightReceiver.hold--> HeldWeights --> engine --open_source--> tensors

A sender publishes what lies in a slot of its store. One process fills it (`publish`), or several of its machine do
between `begin` and `commit`.

A transport (`weights.transport`) makes senders and receivers. What it holds crosses into the engine's workers as
`HeldWeights`, and every engine reads it through a `TensorReader`; so E engines and T transports are E + T modules.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from async_grpo.errors import WeightsError
from async_grpo.weights.manifest import TensorLayout, TensorSpec, Versioned, WeightVersion
from async_grpo.wire.board import PublisherAddress
from async_grpo.wire.records import Record

Resolve = Callable[[], Awaitable[PublisherAddress | None]]
"""Asks the run board where the weights are published; None if nobody has said so yet."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What publishing one version cost the trainer, in seconds."""

    stall_s: float
    """Seconds from the call to its return."""
    waited_s: float
    """The part of it spent waiting for the encoding of the version before. The rest gathers and copies the tensors."""


class WeightSender(Protocol):
    """Publishes the versions of one epoch, from one rank of the trainer."""

    address: PublisherAddress
    """What receivers are to be told through the run board."""

    @property
    def store(self) -> Path:
        """Path of the trainer's weight store."""
        ...

    def begin(self, version: int) -> int:
        """Clear a slot of the store for `version`, and return its number. Waits while versions before are encoded.

        Raises WeightsError on a version that is not above the last one, PublisherLost if the transport has died,
        WaitTimeout if it does not answer.
        """
        ...

    def commit(self) -> Publication:
        """Publish the slot that was begun, and is now whole. May be called from another thread than `begin`.

        Raises PublisherLost and WaitTimeout.
        """
        ...

    def publish(self, version: int, tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]) -> Publication:
        """Take over all tensors, each name of the layout exactly once, in any order, and have them published.

        Arrays are C-contiguous, of the layout's dtype and shape, or raw bytes (uint8, or uint16 for bfloat16, which
        numpy does not know). When this returns they may change. Raises WeightsError on arrays that do not fit, and
        what `begin` and `commit` raise.
        """
        ...

    def check_publisher(self) -> None:
        """Raise PublisherLost if nothing can be published any more; waits for nothing. From any thread."""
        ...

    def close(self) -> None:
        """End the transport on this side. Safe to call twice."""
        ...


def fill(block: memoryview, layout: TensorLayout, tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]) -> None:
    """Copy all tensors to their places in `block`. Raises WeightsError if they are not those of the layout."""
    target, missing = np.frombuffer(block, np.uint8), layout.by_name()
    for name, array in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            raise WeightsError(f"tensor {name!r} is not in the layout, or was given twice.")
        same = array.dtype.name == spec.dtype and list(array.shape) == spec.shape
        raw = array.dtype.kind == "u"
        if not (same or raw) or array.nbytes != spec.nbytes or not array.flags.c_contiguous:
            memory = "contiguous" if array.flags.c_contiguous else "strided"
            raise WeightsError(
                f"tensor {name!r} is {spec.dtype} {spec.shape} ({spec.nbytes} bytes) in the layout, but "
                f"{array.dtype.name} {list(array.shape)} ({array.nbytes} bytes, {memory}) was given."
            )
        target[spec.offset : spec.offset + spec.nbytes] = array.reshape(-1).view(np.uint8)
    if missing:
        raise WeightsError(f"{len(missing)} tensors of the layout were not given: {sorted(missing)[:3]} ...")


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

    async def next_version(self, after: WeightVersion, timeout_s: float) -> WeightVersion:
        """Wait for weights newer than `after`; versions in between may be skipped, older epochs are refused.

        Raises WaitTimeout if none come in time, PublisherLost if that is because the sender is gone, and
        WeightsCorrupt for bytes that keep failing their hash or belong to another model.
        """
        ...

    def hold(self) -> AbstractAsyncContextManager[HeldWeights]:
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

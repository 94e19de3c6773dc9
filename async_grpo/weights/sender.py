"""The trainer's end of every transport: a weight store, whose slots are filled one after the other.

    idle ----begin----> filling --commit--> idle
         waits until a           the transport hashes, encodes
         slot may be written     and announces the version

    idle       slot = sender.begin(7)
    filling    every rank on this machine copies its tensors to sender.store; then sender.commit()

One process that has all tensors does both with `publish`. A transport adds `_clear_slot` and `_publish_stored`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsError
from async_grpo.weights.manifest import TensorLayout, WeightVersion
from async_grpo.weights.shared_memory import store_path
from async_grpo.weights.store import WeightStore
from async_grpo.wire.board import PublisherAddress


@dataclass(frozen=True, slots=True)
class Publication:
    """Cost of publishing one version for the trainer, in seconds."""

    stall_s: float
    """Seconds from the call to its return."""
    waited_s: float
    """The part of it spent waiting for the encoding of the version before. The rest gathers and copies the tensors."""


@dataclass(frozen=True, slots=True)
class _Filling:
    version: WeightVersion
    begun_s: float
    cleared_s: float


class WeightSender(ABC):
    """Publishes the versions of one epoch, from one rank of the trainer, which is the only writer of its store."""

    address: PublisherAddress
    """Address of the publisher, which receivers read from the run board."""

    def __init__(self, layout: TensorLayout, run: str, epoch: int, config: WeightsConfig) -> None:
        """Allocate the store. Raises WeightsError, ConfigError."""
        self.config = config
        self._epoch = epoch
        self._store = WeightStore.create(store_path(run, "trainer"), layout)
        self._newest_given: int | None = None
        self._filling: _Filling | None = None

    @property
    def store(self) -> Path:
        """Path of the trainer's weight store."""
        return self._store.path

    def begin_version(self, version: int) -> int:
        """Clear a slot of the store for `version`, and return its number. Waits while versions before are encoded.

        Raises WeightsError on a version that is not above the last one, PublisherLost if the transport has died,
        WaitTimeout if it does not answer.
        """
        newest = self._newest_given
        if newest is not None and version <= newest:
            raise WeightsError(f"version {version} was published after version {newest}; versions only rise.")
        begun_s = time.monotonic()
        spare = self._clear_slot()
        cleared_s = time.monotonic()
        self._store.begin_write(spare)
        self._filling = _Filling(WeightVersion(self._epoch, version), begun_s, cleared_s)
        return self._store.writing_slot

    def commit_version(self) -> Publication:
        """Publish the slot that was begun, and is now whole. May be called from another thread than `begin`.

        Raises WeightsError if none was begun, PublisherLost and WaitTimeout.
        """
        filling, self._filling = self._filling, None
        if filling is None:
            raise WeightsError("no version was begun, so there is none to publish.")
        self._store.commit_write(filling.version)
        self._newest_given = filling.version.version
        self._publish_stored(filling.version)
        return Publication(time.monotonic() - filling.begun_s, filling.cleared_s - filling.begun_s)

    def publish_weights(self, version: int, tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]) -> Publication:
        """Take over all tensors, each name of the layout exactly once, in any order, and have them published.

        Arrays are C-contiguous, of the layout's dtype and shape, or raw bytes (uint8, or uint16 for bfloat16, which
        numpy does not know). When this returns they may change. Raises WeightsError on arrays that do not fit, and
        what `begin` and `commit` raise.
        """
        copy_tensors(self._store.slot_memory(self.begin_version(version)), self._store.layout, tensors)
        return self.commit_version()

    @abstractmethod
    def check_publisher(self) -> None:
        """Raise PublisherLost if nothing can be published any more; waits for nothing. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """End the transport on this side, and remove the store. Safe to call twice."""

    @abstractmethod
    def _clear_slot(self) -> WeightVersion | None:
        """Wait until a slot may be overwritten. Returns the version that must be spared, if one must."""

    @abstractmethod
    def _publish_stored(self, version: WeightVersion) -> None:
        """Have the version in the store hashed, encoded and announced; need not wait for that."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copy_tensors(
    block: memoryview, layout: TensorLayout, tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]
) -> None:
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

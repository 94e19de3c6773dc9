"""Trainer side of every transport: a weight store whose slots are filled one after the other.

    idle ----begin_version----> filling --commit_version--> idle
         waits until a slot             the transport hashes, encodes
         may be overwritten             and announces the version

    idle       slot = sender.begin_version(7)
    filling    every rank on this machine copies its tensors into `sender.store`; then sender.commit_version()

A process that has all tensors does both with `publish_weights`. A transport implements `_clear_slot` and
`_publish_stored`.
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
    """Time that publishing one version costs the trainer, in seconds."""

    stall_s: float
    """Seconds from `begin_version` to the return of `commit_version`."""
    waited_s: float
    """Part of `stall_s` spent waiting for the previous version to be encoded. The rest is gathering and copying."""


@dataclass(frozen=True, slots=True)
class _BegunVersion:
    version: WeightVersion
    begun_s: float
    cleared_s: float


class WeightSender(ABC):
    """Publishes the versions of one epoch. Runs on one trainer rank, the only writer of its store."""

    address: PublisherAddress
    """The publisher's address, which receivers read from the run board."""

    def __init__(self, layout: TensorLayout, run: str, epoch: int, config: WeightsConfig) -> None:
        """Allocate the store. Raises WeightsError, ConfigError."""
        self.config = config
        self._epoch = epoch
        self._store = WeightStore.create(store_path(run, "trainer"), layout)
        self._last_version: int | None = None
        self._begun: _BegunVersion | None = None

    @property
    def store(self) -> Path:
        """Path of the trainer's weight store."""
        return self._store.path

    def begin_version(self, version: int) -> int:
        """Clear a slot for `version` and return its number. Waits while the previous version is encoded.

        Raises WeightsError if `version` is not above the last one, PublisherLost if the transport has died, and
        WaitTimeout if it does not answer.
        """
        last = self._last_version
        if last is not None and version <= last:
            raise WeightsError(
                f"version {version} cannot be published after version {last}: versions must rise within an epoch."
            )

        # Clear before writing: a slot that is still encoded or fetched would be published with mixed bytes.
        begun_s = time.monotonic()
        protected = self._clear_slot()
        cleared_s = time.monotonic()
        self._store.begin_write(keep=protected)

        self._begun = _BegunVersion(WeightVersion(self._epoch, version), begun_s, cleared_s)
        return self._store.writing_slot

    def commit_version(self) -> Publication:
        """Publish the version that was begun; all its tensors must be in the slot. Callable from another thread.

        Raises WeightsError if none was begun, PublisherLost and WaitTimeout.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            raise WeightsError("commit_version was called without begin_version; there is no version to publish.")

        self._store.commit_write(begun.version)
        self._last_version = begun.version.version
        self._publish_stored(begun.version)
        return Publication(stall_s=time.monotonic() - begun.begun_s, waited_s=begun.cleared_s - begun.begun_s)

    def publish_weights(self, version: int, tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]) -> Publication:
        """Copy and publish all tensors of the layout, each exactly once, in any order.

        Arrays are C-contiguous and have the layout's dtype and shape, or are raw bytes (uint8, or uint16 for bfloat16,
        which numpy does not have). The caller may change them afterwards. Raises WeightsError for arrays that do not
        fit the layout, and the errors of `begin_version` and `commit_version`.
        """
        slot = self.begin_version(version)
        copy_tensors(self._store.slot_memory(slot), self._store.layout, tensors)
        return self.commit_version()

    @abstractmethod
    def check_publisher(self) -> None:
        """Raise PublisherLost if nothing can be published any more. Returns immediately; callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Stop the transport and remove the store. Safe to call twice."""

    @abstractmethod
    def _clear_slot(self) -> WeightVersion | None:
        """Wait until a slot may be overwritten. Returns the version that must not be overwritten, if any."""

    @abstractmethod
    def _publish_stored(self, version: WeightVersion) -> None:
        """Start to hash, encode and announce the version in the store. Need not wait for the result."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copy_tensors(
    block: memoryview, layout: TensorLayout, tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]
) -> None:
    """Copy all tensors to their offsets in `block`. Raises WeightsError if they do not match the layout."""
    target = np.frombuffer(block, np.uint8)
    missing = layout.by_name()
    for name, array in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            raise WeightsError(f"tensor {name!r} is not in the layout, or was given twice.")

        is_same_type = array.dtype.name == spec.dtype and list(array.shape) == spec.shape
        is_raw = array.dtype.kind == "u"
        is_contiguous = array.flags.c_contiguous
        if not (is_same_type or is_raw) or array.nbytes != spec.nbytes or not is_contiguous:
            memory = "contiguous" if is_contiguous else "strided"
            raise WeightsError(
                f"tensor {name!r} is {spec.dtype} {spec.shape} ({spec.nbytes} bytes) in the layout, but "
                f"{array.dtype.name} {list(array.shape)} ({array.nbytes} bytes, {memory}) was given."
            )
        target[spec.offset : spec.offset + spec.nbytes] = array.reshape(-1).view(np.uint8)

    if missing:
        raise WeightsError(f"{len(missing)} tensors of the layout were not given: {sorted(missing)[:3]} ...")

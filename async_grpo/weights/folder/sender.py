"""The trainer's end: copy the weights into shared memory, and have threads write them to the folder.

    publish --copy--> slot --> `_write_versions`: hash and encode --> changes, dense, record --+
                                                                                             v
                               `_beat`: head, every heartbeat and at once <-------------- newest

- `publish` waits while a version is encoded, because that reads both slots (at most encode_wait_s; then its patches are
  given up). It does not wait for writing: a version that comes while one is written waits in the other slot, and is
  replaced by one that comes still later.
- The slot of the version that is written, or was written last, is never overwritten: the next patches build on it.
- A write that fails is repeated every heartbeat, for update_timeout_s. After that the version is given up, and the next
  one is dense.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import structlog
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import PublisherLost, WaitTimeout
from async_grpo.weights.chunks import ServedVersion, cut_into_chunks
from async_grpo.weights.encoder import Encoded, WeightEncoder
from async_grpo.weights.folder.chain import (
    OBJECT_KINDS,
    Entry,
    Head,
    VersionRecord,
    encode_with_digest,
    epoch_folder,
    object_name,
)
from async_grpo.weights.folder.objects import open_objects
from async_grpo.weights.manifest import TensorLayout, WeightVersion
from async_grpo.weights.sender import WeightSender
from async_grpo.wire.board import PublisherAddress

_STOP_TIMEOUT_S = 10.0

log = structlog.get_logger()


class FolderWeightSender(WeightSender):
    """Publishes the versions of one epoch in the folder of the run, and removes those of earlier epochs."""

    def __init__(self, layout: TensorLayout, run: str, epoch: int, config: WeightsConfig) -> None:
        """Allocate the store and start the threads. Raises WeightsError, ConfigError, DependencyError."""
        self.address = PublisherAddress(epoch=epoch, announce=epoch_folder(run, epoch), requests="")
        self._objects = open_objects(config)
        super().__init__(layout, run, epoch, config)
        self._run = run
        self._chunks = cut_into_chunks(layout, config.chunk_bytes)
        self._encoder = WeightEncoder(self._chunks, config.encoding, config.encode_threads)
        self._changed = threading.Condition()
        self._encoding = False
        self._pending: WeightVersion | None = None
        self._spared: WeightVersion | None = None
        """The version that is written now, or was written last."""
        self._newest: VersionRecord | None = None
        self._dense: list[int] = []
        self._chain_bytes = 0
        """What a receiver of the newest version reads beyond the last dense one."""
        self._dense_wanted = False
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._beat_now = threading.Event()
        targets = (self._write_versions, self._beat)
        self._threads = [threading.Thread(target=self._guarded, args=(target,), daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def check_publisher(self) -> None:
        """See `WeightSender.check_publisher`."""
        if self._failure is not None:
            raise PublisherLost(f"the threads that write weights ended: {self._failure}. Restart the trainer.")

    def close(self) -> None:
        """Stop, and remove the versions of this epoch and the store. Safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._beat_now.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_STOP_TIMEOUT_S)
        try:
            self._objects.remove(self._objects.list_names(self.address.announce))
        except OSError as error:
            log.warning("weights of this run are left in weights.location", folder=self._run, error=str(error))
        self._store.unlink()

    def _clear_slot(self) -> WeightVersion | None:
        """Take back the version that waits, and wait until none is encoded."""
        with self._changed:
            self._pending = None
            if not self._changed.wait_for(self._is_free, self.config.encode_wait_s):
                self._encoder.cancel_patches()
            if not self._changed.wait_for(self._is_free, self.config.update_timeout_s):
                raise WaitTimeout("the version before to be encoded", self.config.update_timeout_s)
        self.check_publisher()
        return self._spared

    def _publish_stored(self, version: WeightVersion) -> None:
        with self._changed:
            self._pending = version
            self._changed.notify_all()

    def _is_free(self) -> bool:
        return not self._encoding or self._failure is not None

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            log.exception("weights cannot be published any more")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _write_versions(self) -> None:
        self._insist(self._remove_earlier_epochs)
        while (identity := self._next()) is not None:
            try:
                block = self._store.snapshot(identity).block
                base = self._base()
                self._encoder.start_encoding(identity, block, base)
                encoded = self._encoder.take_result()
            finally:
                with self._changed:
                    self._encoding, self._spared = False, identity
                    self._changed.notify_all()
            record, parts = self._plan_version(encoded, block, base)
            if self._insist(partial(self._write_version, record, parts, block)):
                self._note_written(record, sum(len(part) for part in parts))
            else:
                self._newest = None

    def _next(self) -> WeightVersion | None:
        """The version to write next; None at the end. Meanwhile, dense objects that receivers ask for are written."""
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._dense_wanted or self._closing.is_set())
                if self._pending is not None and not self._closing.is_set():
                    identity, self._pending, self._encoding = self._pending, None, True
                    return identity
            if self._dense_wanted and not self._closing.is_set():
                self._write_wanted()
        return None

    def _insist(self, write: Callable[[], None]) -> bool:
        """Try every heartbeat; False if it did not work in update_timeout_s, or the end came first.

        `write` may fail after some of its objects were written, so it must give the same objects each time: it decides
        nothing, and changes nothing here.
        """
        deadline = time.monotonic() + self.config.update_timeout_s
        while not self._closing.is_set() and time.monotonic() < deadline:
            try:
                write()
                return True
            except OSError as error:
                log.warning("weights.location cannot be written to; trying again", error=str(error))
                self._closing.wait(self.config.heartbeat_s)
        return False

    def _base(self) -> ServedVersion | None:
        """The version that the next one builds on: the one written last."""
        if self._newest is None or self.config.encoding == "dense":
            return None
        manifest = self._newest.manifest
        return ServedVersion.from_block(manifest, self._chunks, self._store.snapshot(manifest.identity).block)

    def _plan_version(
        self, encoded: Encoded, block: memoryview, base: ServedVersion | None
    ) -> tuple[VersionRecord, list[bytes | memoryview]]:
        """The record of this version, and the parts of its object of changes."""
        manifest = encoded.make_manifest(self._store.layout, self.config.chunk_bytes, base, key=b"")
        changes, parts = self._changes(encoded, block, base)
        changed_bytes = sum(len(part) for part in parts)
        dense = base is None or self._is_dense_due(manifest.version, changed_bytes)
        before = base.identity.version if base is not None else None
        return VersionRecord(manifest=manifest, before=before, changes=changes, dense=dense), parts

    def _write_version(self, record: VersionRecord, parts: list[bytes | memoryview], block: memoryview) -> None:
        """Changes and dense block first, then the record, then (by `_beat`) the head. Raises OSError."""
        folder, version = self.address.announce, record.manifest.version
        if parts:
            self._objects.write(object_name(folder, version, "changes"), parts)
        if record.dense:
            pieces = (chunk.view(block) for chunk in self._chunks)
            self._objects.write(object_name(folder, version, "dense"), pieces)
        self._objects.write(object_name(folder, version, "version"), [encode_with_digest(record)])

    def _note_written(self, record: VersionRecord, changed_bytes: int) -> None:
        """Announce a version whose objects are written, and remove what it makes needless."""
        version = record.manifest.version
        self._chain_bytes = 0 if record.dense else self._chain_bytes + changed_bytes
        self._newest = record
        self._beat_now.set()
        if record.dense and version not in self._dense:
            self._dense = [*self._dense[-1:], version]
            self._remove_below(self._dense[0])

    def _changes(
        self, encoded: Encoded, block: memoryview, base: ServedVersion | None
    ) -> tuple[dict[int, Entry], list[bytes | memoryview]]:
        """The chunks that differ from those of `base`, as patches where these are shorter."""
        if base is None:
            return {}, []
        hashes = np.frombuffer(encoded.hashes, "<u8")
        entries: dict[int, Entry] = {}
        parts: list[bytes | memoryview] = []
        at = 0
        for index in np.flatnonzero(hashes != base.hashes).tolist():
            part = encoded.patches.get(index) or self._chunks[index].view(block)
            entries[index] = Entry(at, at + len(part), index in encoded.patches)
            parts.append(part)
            at += len(part)
        return entries, parts

    def _is_dense_due(self, version: int, changed_bytes: int) -> bool:
        """Every `dense_every` versions, and as soon as a late receiver would read more in differences than dense."""
        too_many = version - self._dense[-1] >= self.config.dense_every if self._dense else True
        return too_many or self._chain_bytes + changed_bytes > self._store.layout.total_bytes

    def _write_wanted(self) -> None:
        """A receiver lost a link of the chain: make the newest version one that needs no other."""
        self._dense_wanted = False
        if self._newest is None:
            return
        record = replace(self._newest, dense=True)
        block = self._store.snapshot(record.manifest.identity).block
        if self._insist(partial(self._write_version, record, [], block)):  # its changes are there already
            self._note_written(record, 0)

    def _remove_below(self, version: int) -> None:
        """Remove what no receiver needs: one that holds an older version starts at a dense one.

        If that fails, the next dense version removes it too. The version itself is written, and must not be given up.
        """
        oldest = object_name(self.address.announce, version, "")
        try:
            names = self._objects.list_names(self.address.announce)
            self._objects.remove([name for name in names if name < oldest and name.rpartition(".")[2] in OBJECT_KINDS])
        except OSError as error:
            log.warning("old versions stay in weights.location for now", below=version, error=str(error))

    def _remove_earlier_epochs(self) -> None:
        names = self._objects.list_names(self._run)
        self._objects.remove([name for name in names if f"{self._run}/epoch-" <= name < self.address.announce])

    def _beat(self) -> None:
        """Write the head, and look for receivers that have lost a link."""
        for beat in itertools.count():
            if self._closing.is_set() or self._failure is not None:
                return
            self._beat_now.clear()
            newest = self._newest
            version = newest.manifest.version if newest is not None else None
            head = Head(epoch=self._epoch, version=version, beat=beat)
            try:
                self._objects.write(f"{self.address.announce}/head", [encode_with_digest(head)])
                wanted = self._objects.list_names(f"{self.address.announce}/wanted")
                self._objects.remove(wanted)
            except OSError as error:
                log.warning("weights.location cannot be written to; trying again", error=str(error))
                wanted = []
            if wanted:
                with self._changed:
                    self._dense_wanted = True
                    self._changed.notify_all()
            self._beat_now.wait(self.config.heartbeat_s)

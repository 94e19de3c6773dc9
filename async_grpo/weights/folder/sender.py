"""Trainer side of the folder transports: versions in shared memory, written to the folder by two threads.

    publish_weights --copy--> slot --> `_write_versions`: hash, encode --> changes, dense, record --+
                                                                                                    v
                                       `_write_heads`: head, every heartbeat and immediately <-- newest

- `begin_version` waits while a version is encoded, because encoding reads both slots. After encode_wait_s the patches
  are cancelled. It does not wait for writing: a version published meanwhile waits in the other slot, where a still
  later one replaces it.
- The slot of the version that is being written, or was written last, is never overwritten: the next patches need it.
- A failed write is retried every heartbeat for update_timeout_s. After that the version is skipped, and the next one is
  dense.
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
    """Writes the versions of one epoch into the run's folder, and removes those of earlier epochs."""

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
        """The version that waits to be encoded and written."""
        self._last_encoded: WeightVersion | None = None
        """The version that is being written, or was written last. The next patches apply to it."""
        self._newest: VersionRecord | None = None
        self._dense_versions: list[int] = []
        """The last two versions with a dense object."""
        self._chain_bytes = 0
        """Bytes of changes since the last dense version."""
        self._dense_wanted = False
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._head_changed = threading.Event()

        self._threads: list[threading.Thread] = []
        for target in (self._write_versions, self._write_heads):
            thread = threading.Thread(target=self._run_thread, args=(target,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def check_publisher(self) -> None:
        """Raise PublisherLost if a writing thread has failed. Callable from any thread."""
        if self._failure is not None:
            raise PublisherLost(f"a thread that writes weights has failed: {self._failure}. Restart the trainer.")

    def close(self) -> None:
        """Stop the threads, and remove this epoch's versions and the store. Safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._head_changed.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_STOP_TIMEOUT_S)
        try:
            self._objects.remove(self._objects.list_names(self.address.announce))
        except OSError as error:
            log.warning(
                "the weights of this run could not be removed from weights.location", folder=self._run, error=str(error)
            )
        self._store.unlink()

    def _clear_slot(self) -> WeightVersion | None:
        """Discard the pending version, and wait until none is being encoded."""
        with self._changed:
            # The pending version's slot is the one that will be overwritten, so it must not be encoded any more.
            self._pending = None
            if not self._changed.wait_for(self._is_encoder_idle, self.config.encode_wait_s):
                self._encoder.cancel_patches()
            if not self._changed.wait_for(self._is_encoder_idle, self.config.update_timeout_s):
                raise WaitTimeout("the previous version to be encoded", self.config.update_timeout_s)
        self.check_publisher()
        return self._last_encoded

    def _publish_stored(self, version: WeightVersion) -> None:
        with self._changed:
            self._pending = version
            self._changed.notify_all()

    def _is_encoder_idle(self) -> bool:
        return not self._encoding or self._failure is not None

    def _run_thread(self, target: Callable[[], None]) -> None:
        """Run a thread's loop. An error is stored for `check_publisher`, and wakes whoever waits for the encoder."""
        try:
            target()
        except BaseException as error:
            log.exception("weights cannot be published any more")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _write_versions(self) -> None:
        self._retry_until_timeout(self._remove_earlier_epochs)
        while (identity := self._wait_for_pending()) is not None:
            try:
                block = self._store.snapshot(identity).block
                base = self._next_base()
                self._encoder.start_encoding(identity, block, base)
                encoded = self._encoder.take_result()
            finally:
                # From here on the trainer may overwrite the other slot. Writing only reads this one.
                with self._changed:
                    self._encoding = False
                    self._last_encoded = identity
                    self._changed.notify_all()

            record, parts = self._plan_version(encoded, block, base)
            if self._retry_until_timeout(partial(self._write_version, record, parts, block)):
                self._announce_written(record, sum(len(part) for part in parts))
            else:
                self._newest = None  # skipped: no later version may build on it

    def _wait_for_pending(self) -> WeightVersion | None:
        """Wait for the next version to write; None after `close`. Writes requested dense objects meanwhile."""
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._dense_wanted or self._closing.is_set())
                if self._pending is not None and not self._closing.is_set():
                    identity = self._pending
                    self._pending = None
                    self._encoding = True
                    return identity
            if self._dense_wanted and not self._closing.is_set():
                self._write_wanted()
        return None

    def _retry_until_timeout(self, write: Callable[[], None]) -> bool:
        """Retry `write` every heartbeat. Returns False after update_timeout_s or `close`.

        `write` may fail after some of its objects were written, so it must write the same objects each time: it makes
        no decisions and changes no state.
        """
        deadline = time.monotonic() + self.config.update_timeout_s
        while not self._closing.is_set() and time.monotonic() < deadline:
            try:
                write()
                return True
            except OSError as error:
                log.warning("weights.location cannot be written to; retrying", error=str(error))
                self._closing.wait(self.config.heartbeat_s)
        return False

    def _next_base(self) -> ServedVersion | None:
        """The version that the next patches apply to: the one written last. None: the next version is dense."""
        if self._newest is None or self.config.encoding == "dense":
            return None
        manifest = self._newest.manifest
        return ServedVersion.from_block(manifest, self._chunks, self._store.snapshot(manifest.identity).block)

    def _plan_version(
        self, encoded: Encoded, block: memoryview, base: ServedVersion | None
    ) -> tuple[VersionRecord, list[bytes | memoryview]]:
        """Return the version's record and the parts of its `.changes` object."""
        manifest = encoded.make_manifest(self._store.layout, self.config.chunk_bytes, base, key=b"")
        changes, parts = self._list_changes(encoded, block, base)
        changed_bytes = sum(len(part) for part in parts)
        dense = base is None or self._is_dense_due(manifest.version, changed_bytes)
        before = base.identity.version if base is not None else None
        return VersionRecord(manifest=manifest, before=before, changes=changes, dense=dense), parts

    def _write_version(self, record: VersionRecord, parts: list[bytes | memoryview], block: memoryview) -> None:
        """Write a version's objects. Raises OSError."""
        # The record last: a reader that finds it must find the objects that it refers to. The head, which makes readers
        # look for the record, follows in `_write_heads`.
        folder = self.address.announce
        version = record.manifest.version
        if parts:
            self._objects.write(object_name(folder, version, "changes"), parts)
        if record.dense:
            pieces = (chunk.view(block) for chunk in self._chunks)
            self._objects.write(object_name(folder, version, "dense"), pieces)
        self._objects.write(object_name(folder, version, "version"), [encode_with_digest(record)])

    def _announce_written(self, record: VersionRecord, changed_bytes: int) -> None:
        """Announce a version whose objects are written, and remove versions that are no longer needed."""
        version = record.manifest.version
        self._chain_bytes = 0 if record.dense else self._chain_bytes + changed_bytes
        self._newest = record
        self._head_changed.set()
        if record.dense and version not in self._dense_versions:
            # Keep the dense version before this one: a receiver may be reading it right now.
            self._dense_versions = [*self._dense_versions[-1:], version]
            self._remove_below(self._dense_versions[0])

    def _list_changes(
        self, encoded: Encoded, block: memoryview, base: ServedVersion | None
    ) -> tuple[dict[int, Entry], list[bytes | memoryview]]:
        """Return the chunks that differ from `base`, as patches where there are some: the index and the parts."""
        if base is None:
            return {}, []
        hashes = np.frombuffer(encoded.hashes, "<u8")
        entries: dict[int, Entry] = {}
        parts: list[bytes | memoryview] = []
        offset = 0
        for index in np.flatnonzero(hashes != base.hashes).tolist():
            part = encoded.patches.get(index) or self._chunks[index].view(block)
            entries[index] = Entry(start=offset, stop=offset + len(part), patch=index in encoded.patches)
            parts.append(part)
            offset += len(part)
        return entries, parts

    def _is_dense_due(self, version: int, changed_bytes: int) -> bool:
        """True every `dense_every` versions, and if a late receiver would read more in changes than dense."""
        if not self._dense_versions or version - self._dense_versions[-1] >= self.config.dense_every:
            return True
        return self._chain_bytes + changed_bytes > self._store.layout.total_bytes

    def _write_wanted(self) -> None:
        """Add a dense object to the newest version, for a receiver that cannot follow the chain."""
        self._dense_wanted = False
        if self._newest is None:
            return
        record = replace(self._newest, dense=True)
        block = self._store.snapshot(record.manifest.identity).block
        if self._retry_until_timeout(partial(self._write_version, record, [], block)):  # its changes are there already
            self._announce_written(record, 0)

    def _remove_below(self, version: int) -> None:
        """Remove versions below `version`, which no receiver needs: it would start at a newer dense version.

        If that fails, the objects are removed with the next dense version. No error is raised, because that would
        discard the version that has just been written.
        """
        oldest = object_name(self.address.announce, version, "")
        try:
            names = self._objects.list_names(self.address.announce)
            self._objects.remove([name for name in names if name < oldest and name.rpartition(".")[2] in OBJECT_KINDS])
        except OSError as error:
            log.warning("old versions cannot be removed from weights.location yet", below=version, error=str(error))

    def _remove_earlier_epochs(self) -> None:
        names = self._objects.list_names(self._run)
        self._objects.remove([name for name in names if f"{self._run}/epoch-" <= name < self.address.announce])

    def _write_heads(self) -> None:
        """Write the head every heartbeat, and check for receivers that need a dense version."""
        for beat in itertools.count():
            if self._closing.is_set() or self._failure is not None:
                return
            # Clear before reading `_newest`: a version announced in between sets the event again and is not missed.
            self._head_changed.clear()
            newest = self._newest
            version = newest.manifest.version if newest is not None else None
            head = Head(epoch=self._epoch, version=version, beat=beat)
            try:
                self._objects.write(f"{self.address.announce}/head", [encode_with_digest(head)])
                wanted = self._objects.list_names(f"{self.address.announce}/wanted")
                self._objects.remove(wanted)
            except OSError as error:
                log.warning("weights.location cannot be written to; retrying", error=str(error))
                wanted = []
            if wanted:
                with self._changed:
                    self._dense_wanted = True
                    self._changed.notify_all()
            self._head_changed.wait(self.config.heartbeat_s)

"""The slots of the receiver's store: which versions they contain, and when one may be overwritten.

With two slots (`weights.receiver_slots`), the next version is written next to the newest one. With one slot, it
replaces the newest in place, as soon as every server of the machine has loaded that one. Until the next version is
complete, the store then contains none.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import structlog
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.chunks import ServedVersion, cut_into_chunks
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.weights.node.fetch import Fetch
from async_grpo.weights.node.local_socket import LocalClients
from async_grpo.weights.node.stats import ReceiverStats
from async_grpo.weights.store import StoreSnapshot, WeightStore

log = structlog.get_logger()


class OfferedVersions(Protocol):
    """The versions of the store that other receivers may fetch. Implemented by `ChunkServer`."""

    def offer_version(self, served: ServedVersion) -> None: ...
    def withdraw_version(self, identity: WeightVersion) -> None: ...
    def get_version(self, identity: WeightVersion | None) -> ServedVersion | None: ...
    def in_use_since(self, identity: WeightVersion) -> float | None: ...


class StoreSlots:
    """Owns the store, and offers its versions to other receivers through `server`."""

    def __init__(
        self, path: Path, config: WeightsConfig, server: OfferedVersions, servers: LocalClients, stats: ReceiverStats
    ) -> None:
        self._path = path
        self._config = config
        self._server = server
        self._servers = servers
        self._stats = stats
        self._store: WeightStore | None = None
        self.last_complete: WeightVersion | None = None
        """The version that was completed last. Its slot may have been overwritten since."""
        self._committed_s = 0.0
        self._torn = False
        """True if the only slot contains chunks of versions that were never completed."""

    @property
    def newest(self) -> WeightVersion | None:
        """The newest complete version; None while the only slot is being written."""
        return self._servers.newest

    def is_newer(self, identity: WeightVersion | None) -> bool:
        """True if this version is newer than all versions that were completed here."""
        return identity is not None and (self.last_complete is None or identity > self.last_complete)

    def is_next_slot_in_use(self) -> bool:
        """True if the slot of the next version is in use: an engine loads from it, or a receiver fetches from it.

        A single slot also counts as in use until every server has loaded its version, for at most request_timeout_s.
        """
        if self._store is None:
            return False
        overwritten = self._store.version_to_overwrite()
        if overwritten is None:
            return False
        if self._servers.is_held(overwritten) or self._server.in_use_since(overwritten) is not None:
            return True

        if overwritten != self.newest:
            return False
        waited_s = time.monotonic() - self._committed_s
        return waited_s < self._config.request_timeout_s and self._servers.has_outdated_server

    def open_store(self, manifest: WeightManifest) -> None:
        """Adopt or create the store for versions with this layout. Does nothing if it is open.

        Raises WeightsError if there is no room for it, WeightsCorrupt if the model has changed.
        """
        # If servers of this machine loaded from a killed receiver's store, continue with it: their mappings stay valid.
        if self._store is None and self._servers.store_in_use:
            self._store = self._adopt_store(manifest)
        if self._store is None:
            chunks = cut_into_chunks(manifest.layout, manifest.chunk_bytes)
            slots = self._config.receiver_slots
            self._store = WeightStore.create(self._path, manifest.layout, chunks=len(chunks), slots=slots)
        if self._store.layout != manifest.layout:
            raise WeightsCorrupt(
                "the publisher's tensors differ from those that this receiver started with; nothing was applied. "
                "To train another model, restart the rollout servers together with the trainer."
            )

    def begin_fetch(self, manifest: WeightManifest, connections: int = 1) -> Fetch:
        """Start to fetch a version into the next slot, over `connections` connections.

        Its chunks are offered to other receivers as they arrive.
        """
        assert self._store is not None
        # Look up the previous version first: with one slot, it is withdrawn below and patched in place.
        before = self._server.get_version(self.newest)

        # Stop serving before the first byte is overwritten; other receivers would get mixed chunks.
        overwritten = self._store.version_to_overwrite()
        if overwritten is not None:
            self._server.withdraw_version(overwritten)
        if overwritten == self.newest:
            self._servers.newest = None

        block = self._store.begin_write()
        fetch = Fetch(manifest, block, before, self._config, self._stats, connections, torn=self._torn)
        self._torn = self._store.slot_count == 1
        self._server.offer_version(fetch.served)
        return fetch

    def commit_fetch(self, fetch: Fetch) -> None:
        """Commit a complete version: engines may load it from now on."""
        assert self._store is not None
        before = self._server.get_version(self.newest)
        self._store.commit_write(fetch.identity, fetch.make_notes())
        fetch.served.mark_complete()
        if before is not None:
            before.drop_patches()
        self._set_newest(fetch.identity)
        self._torn = False

    def abandon_fetch(self, fetch: Fetch) -> None:
        """Stop offering a version that will not be completed."""
        self._server.withdraw_version(fetch.identity)

    def close(self) -> None:
        """Remove the store."""
        if self._store is not None:
            self._store.unlink()
        self._path.unlink(missing_ok=True)

    def _set_newest(self, identity: WeightVersion | None) -> None:
        self._servers.newest = self.last_complete = identity
        self._committed_s = time.monotonic()

    def _adopt_store(self, manifest: WeightManifest) -> WeightStore | None:
        """Continue with the store of a killed receiver, or return None if that is impossible.

        Its newest version need not be fetched again, and can be the base of patches.
        """
        try:
            store = WeightStore.adopt(self._path)
            newest = store.newest_version
            if newest is not None and store.layout == manifest.layout:
                snapshot = store.snapshot(newest)
                if snapshot.notes.hashes and snapshot.notes.chunk_bytes == manifest.chunk_bytes:
                    self._server.offer_version(_restore_served(snapshot, manifest))
                self._set_newest(newest)
            self._torn = newest is None and store.slot_count == 1
            return store
        except WeightsError as error:
            log.warning("the store of an earlier receiver cannot be used", error=str(error))
            return None


def _restore_served(snapshot: StoreSnapshot, manifest: WeightManifest) -> ServedVersion:
    """Rebuild the served version that an earlier receiver committed, from its notes."""
    notes = snapshot.notes
    earlier = replace(manifest, **snapshot.identity._asdict(), hashes=notes.hashes, key=notes.key)
    return ServedVersion.from_block(earlier, cut_into_chunks(manifest.layout, manifest.chunk_bytes), snapshot.block)

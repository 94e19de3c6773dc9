"""The slots of the receiver's store: what they hold, and when one may be overwritten with the next version.

With two slots (`weights.receiver_slots`), the next version is written beside the newest one. With one, it replaces the
newest in place, as soon as every server of the machine has taken that: until the next is whole, there is none.
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
    """The versions of the store that other receivers may fetch (`ChunkServer`)."""

    def offer_version(self, served: ServedVersion) -> None: ...
    def withdraw_version(self, identity: WeightVersion) -> None: ...
    def get_version(self, identity: WeightVersion | None) -> ServedVersion | None: ...
    def in_use_since(self, identity: WeightVersion) -> float | None: ...


class StoreSlots:
    """Owns the store, and offers the versions in it to other receivers through `server`."""

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
        """The version that was whole last, whether it still is or not."""
        self._committed_s = 0.0
        self._torn = False

    @property
    def newest(self) -> WeightVersion | None:
        """The newest whole version; None while the only slot is written."""
        return self._servers.newest

    def is_newer(self, identity: WeightVersion | None) -> bool:
        """Whether this version is newer than all that were whole here."""
        return identity is not None and (self.last_complete is None or identity > self.last_complete)

    def is_next_slot_in_use(self) -> bool:
        """Whether an engine loads, or a receiver fetches, the version that the next one would overwrite."""
        victim = self._store.version_to_overwrite() if self._store is not None else None
        if victim is None:
            return False
        if self._servers.is_held(victim) or self._server.in_use_since(victim) is not None:
            return True
        waited_s = time.monotonic() - self._committed_s
        return victim == self.newest and waited_s < self._config.request_timeout_s and self._servers.has_outdated_server

    def open_store(self, manifest: WeightManifest) -> None:
        """Make sure that there is a store for versions like this one.

        Raises WeightsError if there is no room for it, WeightsCorrupt if the model is another.
        """
        if self._store is None and self._servers.store_in_use:
            self._store = self._adopt(manifest)
        if self._store is None:
            chunks = cut_into_chunks(manifest.layout, manifest.chunk_bytes)
            slots = self._config.receiver_slots
            self._store = WeightStore.create(self._path, manifest.layout, chunks=len(chunks), slots=slots)
        if self._store.layout != manifest.layout:
            raise WeightsCorrupt(
                "the publisher's tensors are not those that this receiver started with; nothing was applied. "
                "Restart the rollout servers together with a trainer of another model."
            )

    def begin_fetch(self, manifest: WeightManifest, connections: int = 1) -> Fetch:
        """Start to fetch this version over so many connections into the slot that may be written; chunks are served as
        they arrive."""
        assert self._store is not None
        before = self._server.get_version(self.newest)
        victim = self._store.version_to_overwrite()
        if victim is not None:
            self._server.withdraw_version(victim)
        if victim == self.newest:
            self._servers.newest = None
        block = self._store.begin_write()
        fetch = Fetch(manifest, block, before, self._config, self._stats, connections, torn=self._torn)
        self._torn = self._store.slot_count == 1
        self._server.offer_version(fetch.served)
        return fetch

    def commit_fetch(self, fetch: Fetch) -> None:
        """Commit a version that is whole: engines may load it from now on."""
        assert self._store is not None
        before = self._server.get_version(self.newest)
        self._store.commit_write(fetch.identity, fetch.make_notes())
        fetch.served.mark_complete()
        if before is not None:
            before.drop_patches()
        self._set_newest(fetch.identity)
        self._torn = False

    def abandon_fetch(self, fetch: Fetch) -> None:
        """Stop serving a version that will not be completed."""
        self._server.withdraw_version(fetch.identity)

    def close(self) -> None:
        """Remove the store."""
        if self._store is not None:
            self._store.unlink()
        self._path.unlink(missing_ok=True)

    def _set_newest(self, identity: WeightVersion | None) -> None:
        self._servers.newest = self.last_complete = identity
        self._committed_s = time.monotonic()

    def _adopt(self, manifest: WeightManifest) -> WeightStore | None:
        """The store that a killed receiver left, which servers use; None if it cannot be used.

        What servers loaded from it stays readable, and its newest version need not be fetched again.
        """
        try:
            store = WeightStore.adopt(self._path)
            newest = store.newest_version
            if newest is not None and store.layout == manifest.layout:
                snapshot = store.snapshot(newest)
                if snapshot.notes.hashes and snapshot.notes.chunk_bytes == manifest.chunk_bytes:
                    self._server.offer_version(_served_again(snapshot, manifest))
                self._set_newest(newest)
            self._torn = newest is None and store.slot_count == 1
            return store
        except WeightsError as error:
            log.warning("the store of an earlier receiver cannot be used", error=str(error))
            return None


def _served_again(snapshot: StoreSnapshot, manifest: WeightManifest) -> ServedVersion:
    """A whole version that an earlier receiver committed, from its notes."""
    notes = snapshot.notes
    earlier = replace(manifest, **snapshot.identity._asdict(), hashes=notes.hashes, key=notes.key)
    return ServedVersion.from_block(earlier, cut_into_chunks(manifest.layout, manifest.chunk_bytes), snapshot.block)

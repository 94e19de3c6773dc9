"""What lies in the two slots of the receiver's store, and when a slot may be taken for the next version."""

from __future__ import annotations

from pathlib import Path

import structlog

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.chunks import cut
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.weights.store import WeightStore
from async_grpo.weights.zmq.chunk_server import ChunkServer
from async_grpo.weights.zmq.fetch import Fetch, served_version
from async_grpo.weights.zmq.local_socket import LocalClients
from async_grpo.weights.zmq.messages import ReceiverStats

log = structlog.get_logger()


class StoreSlots:
    """Owns the store; offers what is in it to other receivers through `server`."""

    def __init__(
        self, path: Path, config: WeightsConfig, server: ChunkServer, servers: LocalClients, stats: ReceiverStats
    ) -> None:
        self._path = path
        self._config = config
        self._server = server
        self._servers = servers
        self._stats = stats
        self._store: WeightStore | None = None

    @property
    def newest(self) -> WeightVersion | None:
        """The newest whole version."""
        return self._servers.newest

    def is_news(self, identity: WeightVersion | None) -> bool:
        """Newer than what is here."""
        return identity is not None and (self.newest is None or identity > self.newest)

    def slot_in_use(self) -> bool:
        """An engine still loads, or a receiver still fetches, what the next version would overwrite."""
        victim = self._store.next_victim() if self._store is not None else None
        if victim is None:
            return False
        return self._servers.holds(victim) or self._server.in_use_since(victim) is not None

    def open(self, manifest: WeightManifest) -> None:
        """Have a store for versions like this one.

        Raises WeightsError if there is no room for it, WeightsCorrupt if the model is another.
        """
        if self._store is None:
            self._store = self._open(manifest)
        if self._store.layout != manifest.layout:
            raise WeightsCorrupt(
                "the publisher's tensors are not those that this receiver started with; nothing was applied. "
                "Restart the rollout servers together with a trainer of another model."
            )

    def begin(self, manifest: WeightManifest) -> Fetch:
        """Take the back slot for this version; it is served as far as it has come."""
        assert self._store is not None
        victim = self._store.next_victim()
        if victim is not None:
            self._server.withdraw(victim)
        block = self._store.begin()
        fetch = Fetch(manifest, block, self._server.served(self.newest), self._config, self._stats)
        self._server.offer(fetch.served)
        return fetch

    def commit(self, fetch: Fetch) -> None:
        """The version is whole: engines may load it."""
        assert self._store is not None
        before = self._server.served(self.newest)
        self._store.commit(fetch.identity, fetch.notes())
        fetch.served.arrived = None
        if before is not None:
            before.patches = {}  # whoever still fetches that one gets it dense
        self._servers.newest = fetch.identity

    def abandon(self, fetch: Fetch) -> None:
        """The slot is taken again by the next version."""
        self._server.withdraw(fetch.identity)

    def close(self) -> None:
        """Remove the store."""
        if self._store is not None:
            self._store.unlink()
        self._path.unlink(missing_ok=True)

    def _open(self, manifest: WeightManifest) -> WeightStore:
        """Go on with what a killed receiver left, if servers use it; else make a store.

        What servers loaded from it must stay readable; and it saves a whole transfer.
        """
        if self._servers.store_is_used:
            try:
                return self._adopt(manifest)
            except WeightsError as error:
                log.warning("the store of an earlier receiver cannot be used", error=str(error))
        return WeightStore.create(self._path, manifest.layout, chunks=len(cut(manifest.layout, manifest.chunk_bytes)))

    def _adopt(self, manifest: WeightManifest) -> WeightStore:
        store = WeightStore.adopt(self._path)
        newest = store.identity
        if newest is not None and store.layout == manifest.layout:
            snapshot = store.snapshot(newest)
            served = served_version(newest, snapshot.notes, manifest, snapshot.block)
            self._servers.newest = newest
            if served is not None:
                self._server.offer(served)
        return store

"""The receiver process of a machine, which fetches for all rollout servers of a run on it: base of every transport's.

    no trainer --FollowPublisher--> idle --a newer version, a free slot--> requesting --manifest--> fetching
                                     ^                                         |                       |
                                     +----------- nothing came, or not news ---+                       |
                                     +----------- every chunk verified, or given up -------------------+

    no trainer   _connect(address)            a server has found where the trainer publishes
    idle         _request_manifest(newest)    a slot is free: no engine loads from it, no other receiver fetches from it
    requesting   _begin_fetch(manifest)       the manifest has come
    fetching     _fetch_chunks(fetch), then   request chunks; every chunk that comes goes to fetch.accept
                 _commit(fetch)               all are there: servers may load the version
                 or _interrupt(reason)        begin again with the newest version

A newer trainer, whose address a server sends, leads from every state to idle. A newer version does not end a fetch: it
is fetched next. So a receiver that is slower than the trainer skips versions, but completes every fetch that it begins.
With one slot, a fetch begins when every server has taken what is in it.

One thread owns everything and never blocks outside `_wait`. The process ends when no server is connected any more.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import structlog
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import AsyncGrpoError, WeightsCorrupt
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.weights.node.fetch import Fetch, FetchInterrupted
from async_grpo.weights.node.local_socket import Failed, LocalClients, ReceiverPaths, ReceiverState
from async_grpo.weights.node.slots import OfferedVersions, StoreSlots
from async_grpo.weights.node.stats import ReceiverStats
from async_grpo.wire.board import PublisherAddress

FIRST_SERVER_S = 5.0

log = structlog.get_logger()


class ReceiverProcess(ABC):
    """The receiver's loop. `run` returns when no rollout server is connected any more."""

    def __init__(self, paths: ReceiverPaths, config: WeightsConfig, offered: OfferedVersions) -> None:
        """`offered`: the versions of the store that other receivers may fetch."""
        self._paths = paths
        self._config = config
        self._stats = ReceiverStats()
        self._servers = LocalClients(paths.socket, config.update_timeout_s)
        self._slots = StoreSlots(paths.store, config, offered, self._servers, self._stats)
        self._node = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._address: PublisherAddress | None = None
        self._heard_s = 0.0
        """When the publisher was last heard, or was first known."""
        self._fetch: Fetch | None = None
        self._next_request_s = self._next_heartbeat_s = 0.0
        self._started_s = time.monotonic()

    def run(self) -> None:
        """Receive until every server has left. Sends an error that ends it to the servers, and raises it."""
        try:
            while not self._is_unused():
                self._follow_publisher()
                self._heartbeat_if_due()
                self._advance()
                self._wait()
        except AsyncGrpoError as error:
            self._servers.broadcast(Failed(message=str(error), corrupt=isinstance(error, WeightsCorrupt)))
            raise
        finally:
            self._servers.close()
            self._slots.close()
            self._close()
            self._paths.remove_lock()  # last: from now on another receiver may start

    @abstractmethod
    def _connect(self, address: PublisherAddress) -> None:
        """Turn to the publisher of the newest epoch; forget that of the epoch before."""

    @abstractmethod
    def _send_heartbeat(self) -> None:
        """Do what is due every heartbeat."""

    @abstractmethod
    def _newest_announced(self) -> WeightVersion | None:
        """The newest version that the publisher has announced; None before the first."""

    @abstractmethod
    def _request_manifest(self, newest: WeightVersion) -> None:
        """Ask for the manifest, which goes to `_begin_fetch`. Sets `_next_request_s`."""

    @abstractmethod
    def _fetch_chunks(self, fetch: Fetch, copied: list[int]) -> None:
        """Request the chunks that are due. `copied` were just copied from the version before.

        Raises FetchInterrupted if the version cannot be completed.
        """

    @abstractmethod
    def _wait(self) -> None:
        """Wait for news, a server or the next heartbeat, `_wait_s` at most, and handle what came."""

    @abstractmethod
    def _close(self) -> None:
        """Leave the publisher."""

    def _begin_fetch(self, manifest: WeightManifest, connections: int = 1) -> bool:
        """Fetch this version over that number of connections. False if it is here, or if its slot is in use now."""
        manifest.validate()
        self._slots.open_store(manifest)
        self._heard_s = time.monotonic()  # making a store takes seconds, and nothing was read meanwhile
        if not self._slots.is_newer(manifest.identity):  # the store of an earlier receiver has this version
            self._send_state()
            return False
        if self._slots.is_next_slot_in_use():
            self._next_request_s = 0.0
            return False
        self._fetch = self._slots.begin_fetch(manifest, connections)
        return True

    def _commit(self, fetch: Fetch) -> None:
        before, took_s = self._slots.last_complete, time.monotonic() - fetch.started_s
        self._slots.commit_fetch(fetch)
        self._fetch = None
        self._next_request_s = 0.0
        stats, (epoch, version) = self._stats, fetch.identity
        stats.versions += 1
        stats.dense_bytes += fetch.manifest.layout.total_bytes
        stats.last_transfer_s = took_s
        if before is not None and before.epoch == epoch:
            stats.skipped += version - before.version - 1
        self._send_state()

    def _interrupt(self, reason: str) -> None:
        """Give the fetch up, and begin again with the newest version."""
        log.warning("a version was given up; beginning again with the newest", reason=reason)
        self._drop_fetch()

    def _drop_fetch(self) -> None:
        if self._fetch is not None:
            self._slots.abandon_fetch(self._fetch)
            self._fetch = None
            self._stats.interrupted += 1
        self._next_request_s = 0.0

    def _describe_publisher(self, address: PublisherAddress) -> str:
        return address.announce

    def _send_state(self) -> None:
        state = ReceiverState(newest=self._slots.newest, servers=len(self._servers), stats=self._stats)
        if (address := self._address) is not None:
            publisher, silent_s = self._describe_publisher(address), time.monotonic() - self._heard_s
            state = replace(state, publisher=publisher, epoch=address.epoch, silent_s=silent_s)
        self._servers.broadcast(state)

    def _wait_s(self) -> float:
        if self._fetch is not None and self._fetch.has_chunks_to_copy:
            return 0.0
        return max(0.001, self._next_heartbeat_s - time.monotonic())

    def _is_unused(self) -> bool:
        if len(self._servers):
            return False
        return self._servers.had_servers or time.monotonic() - self._started_s > FIRST_SERVER_S

    def _follow_publisher(self) -> None:
        address = self._servers.address
        if address is None or address == self._address:
            return
        self._drop_fetch()
        self._address, self._heard_s = address, time.monotonic()
        self._next_heartbeat_s = 0.0
        self._connect(address)

    def _heartbeat_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._config.heartbeat_s
            self._send_heartbeat()
            self._send_state()

    def _advance(self) -> None:
        """Do one step of the work that needs no waiting."""
        if self._address is None:
            return
        now, fetch = time.monotonic(), self._fetch
        if fetch is None:
            newest = self._newest_announced()
            if newest is None or now < self._next_request_s:
                return
            if self._slots.is_newer(newest) and not self._slots.is_next_slot_in_use():
                self._request_manifest(newest)
            return
        try:
            if now - fetch.started_s > self._config.update_timeout_s:
                raise FetchInterrupted(
                    f"{fetch.identity} did not come whole in {self._config.update_timeout_s:g} s. Raise "
                    "weights.update_timeout_s if this repeats."
                )
            self._fetch_chunks(fetch, fetch.copy_unchanged())
            if fetch.is_done:
                self._commit(fetch)
        except FetchInterrupted as error:
            self._interrupt(str(error))


def run_receiver(make: Callable[[ReceiverPaths, WeightsConfig], ReceiverProcess]) -> None:
    """Entry point of the process; started by a rollout server (`start_receiver`), which passes on its lock."""
    store, config_json = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # the servers handle them, and this process ends with the servers
        signal.signal(number, signal.SIG_IGN)
    make(ReceiverPaths(Path(store)), WeightsConfig.model_validate_json(config_json)).run()

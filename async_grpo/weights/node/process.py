"""The receiver process of a machine: fetches weights for all rollout servers of a run on it. Base of both transports.

    no trainer --FollowPublisher--> idle --newer version, free slot--> requesting --manifest--> fetching
                                     ^                                     |                       |
                                     +---------- timeout, or not newer ----+                       |
                                     +---------- every chunk verified, or fetch abandoned ---------+

    no trainer   _connect(address)            a server has sent the publisher's address
    idle         _request_manifest(newest)    a slot is free: no engine loads from it, no receiver fetches from it
    requesting   _begin_fetch(manifest)       the manifest has arrived
    fetching     _fetch_chunks(fetch), then   request chunks; each arrived chunk goes to fetch.accept_chunk
                 _commit(fetch)               all chunks are here: servers may load the version
                 or _interrupt(reason)        start again with the newest version

The address of a newer trainer leads from every state to idle. A newer version does not end a running fetch; it is
fetched next. So a receiver that is slower than the trainer skips versions, but completes every fetch that it starts.
With one slot, a fetch starts when every server has loaded the version in it.

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
"""Seconds that a new process waits for its first server before it ends."""

log = structlog.get_logger()


class ReceiverProcess(ABC):
    """The receiver's loop. `run` returns when no rollout server is connected any more."""

    def __init__(self, paths: ReceiverPaths, config: WeightsConfig, offered: OfferedVersions) -> None:
        """Bind the Unix socket. `offered` contains the versions that other receivers may fetch."""
        self._paths = paths
        self._config = config
        self._stats = ReceiverStats()
        self._servers = LocalClients(paths.socket, config.update_timeout_s)
        self._slots = StoreSlots(paths.store, config, offered, self._servers, self._stats)
        self._node = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._address: PublisherAddress | None = None
        self._heard_s = 0.0
        """Time of the publisher's last message, or of learning its address."""
        self._fetch: Fetch | None = None
        self._next_request_s = 0.0
        """Time before which no manifest is requested again."""
        self._next_heartbeat_s = 0.0
        self._started_s = time.monotonic()

    def run(self) -> None:
        """Receive until every server has disconnected. Sends a fatal error to the servers and raises it."""
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
            # Remove the lock last. If another receiver started before the store is removed, we would remove its store.
            self._paths.remove_lock()

    @abstractmethod
    def _connect(self, address: PublisherAddress) -> None:
        """Connect to the publisher of the newest epoch, and disconnect from the previous one."""

    @abstractmethod
    def _send_heartbeat(self) -> None:
        """Send or check what is due every heartbeat."""

    @abstractmethod
    def _newest_announced(self) -> WeightVersion | None:
        """The newest version that the publisher has announced; None before the first."""

    @abstractmethod
    def _request_manifest(self, newest: WeightVersion) -> None:
        """Request the manifest of the newest version. Sets `_next_request_s`; the answer goes to `_begin_fetch`."""

    @abstractmethod
    def _fetch_chunks(self, fetch: Fetch, copied: list[int]) -> None:
        """Request the chunks that are due. Chunks `copied` have just been copied from the previous version.

        Raises FetchInterrupted if the version cannot be completed.
        """

    @abstractmethod
    def _wait(self) -> None:
        """Wait for a message or the next heartbeat, at most `_wait_s`, and handle what has arrived."""

    @abstractmethod
    def _close(self) -> None:
        """Disconnect from the publisher and free the transport's resources."""

    def _begin_fetch(self, manifest: WeightManifest, connections: int = 1) -> bool:
        """Start to fetch a version. False if it is already here, or if the next slot is in use.

        Raises WeightsCorrupt if the manifest is invalid or of another model, WeightsError if there is no room.
        """
        manifest.validate()
        self._slots.open_store(manifest)
        # Creating a store takes seconds in which no message was read. The publisher was not silent because of that.
        self._heard_s = time.monotonic()

        if not self._slots.is_newer(manifest.identity):  # it was in the store that we have just adopted
            self._send_state()
            return False
        if self._slots.is_next_slot_in_use():  # an engine has started to load while the manifest was on its way
            self._next_request_s = 0.0
            return False
        self._fetch = self._slots.begin_fetch(manifest, connections)
        return True

    def _commit(self, fetch: Fetch) -> None:
        before = self._slots.last_complete
        transfer_s = time.monotonic() - fetch.started_s
        self._slots.commit_fetch(fetch)
        self._fetch = None
        self._next_request_s = 0.0

        stats = self._stats
        stats.versions += 1
        stats.dense_bytes += fetch.manifest.layout.total_bytes
        stats.last_transfer_s = transfer_s
        if before is not None and before.epoch == fetch.identity.epoch:
            stats.skipped += fetch.identity.version - before.version - 1
        self._send_state()

    def _interrupt(self, reason: str) -> None:
        """Abandon the fetch and start again with the newest version."""
        log.warning("fetch abandoned; starting again with the newest version", reason=reason)
        self._drop_fetch()

    def _drop_fetch(self) -> None:
        if self._fetch is not None:
            self._slots.abandon_fetch(self._fetch)
            self._fetch = None
            self._stats.interrupted += 1
        self._next_request_s = 0.0

    def _describe_publisher(self, address: PublisherAddress) -> str:
        """Name of the publisher for error messages."""
        return address.announce

    def _send_state(self) -> None:
        """Send the state to all servers."""
        state = ReceiverState(newest=self._slots.newest, servers=len(self._servers), stats=self._stats)
        if self._address is not None:
            state = replace(
                state,
                publisher=self._describe_publisher(self._address),
                epoch=self._address.epoch,
                silent_s=time.monotonic() - self._heard_s,
            )
        self._servers.broadcast(state)

    def _wait_s(self) -> float:
        """Maximum seconds to wait for messages: none while there are chunks to copy."""
        if self._fetch is not None and self._fetch.has_chunks_to_copy:
            return 0.0
        return max(0.001, self._next_heartbeat_s - time.monotonic())

    def _is_unused(self) -> bool:
        if len(self._servers):
            return False
        return self._servers.had_servers or time.monotonic() - self._started_s > FIRST_SERVER_S

    def _follow_publisher(self) -> None:
        """Connect to the publisher that the servers named last."""
        address = self._servers.address
        if address is None or address == self._address:
            return
        self._drop_fetch()
        self._address = address
        self._heard_s = time.monotonic()
        self._next_heartbeat_s = 0.0  # register immediately
        self._connect(address)

    def _heartbeat_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._config.heartbeat_s
            self._send_heartbeat()
            self._send_state()

    def _advance(self) -> None:
        """Request a manifest if idle, or continue the fetch. Does not wait."""
        if self._address is None:
            return
        if self._fetch is None:
            self._request_newest()
        else:
            self._continue_fetch(self._fetch)

    def _request_newest(self) -> None:
        newest = self._newest_announced()
        if newest is None or time.monotonic() < self._next_request_s:
            return
        if self._slots.is_newer(newest) and not self._slots.is_next_slot_in_use():
            self._request_manifest(newest)

    def _continue_fetch(self, fetch: Fetch) -> None:
        try:
            if time.monotonic() - fetch.started_s > self._config.update_timeout_s:
                raise FetchInterrupted(
                    f"{fetch.identity} did not arrive within {self._config.update_timeout_s:g} s. Raise "
                    "weights.update_timeout_s if this repeats."
                )
            self._fetch_chunks(fetch, fetch.copy_unchanged())
            if fetch.is_done:
                self._commit(fetch)
        except FetchInterrupted as error:
            self._interrupt(str(error))


def run_receiver(make: Callable[[ReceiverPaths, WeightsConfig], ReceiverProcess]) -> None:
    """Entry point of the process. A rollout server starts it with `start_receiver` and passes on the locked file."""
    store, config_json = sys.argv[1:]
    # Ignore signals that the whole job gets: the servers handle them, and this process ends after its last server.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    make(ReceiverPaths(Path(store)), WeightsConfig.model_validate_json(config_json)).run()

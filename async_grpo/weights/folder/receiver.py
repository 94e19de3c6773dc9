"""The receiver process of a machine that reads versions out of the folder into the store that engines map.

    head --every heartbeat--> news? --`Chain.read_links`--> Fetch --chunks, `credits` at a time--> back slot --> engines
    rollout servers <--Unix socket-- LocalClients <---------------------------"version v"---------+

`ReceiverProcess` has the states. Reads are jobs of a thread pool; the result of a job is dropped if the fetch or the
trainer that it was for is no longer the current one. Failures:

- the chain ends without a base, or an object is missing or damaged: ask for a dense version (`wanted/`), and begin
  again with the head; after MAX_ATTEMPTS of damage, WeightsCorrupt in every server
- the folder cannot be reached: try again at the next look; the silence is told to the servers
- a patch does not give the right chunk: that chunk is made of the folder alone
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import structlog
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt
from async_grpo.weights.chunks import ServedVersion
from async_grpo.weights.folder.chain import Chain, Head, decode_with_digest
from async_grpo.weights.folder.objects import open_objects
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.fetch import MAX_ATTEMPTS, Fetch
from async_grpo.weights.node.local_socket import ReceiverPaths
from async_grpo.weights.node.process import ReceiverProcess, run_receiver
from async_grpo.wire.board import PublisherAddress

log = structlog.get_logger()


class StoreVersions(dict[WeightVersion, ServedVersion]):
    """The versions in the store; no other machine fetches them from here."""

    def offer_version(self, served: ServedVersion) -> None:
        """Keep this version as the base of the next."""
        self[served.identity] = served

    def withdraw_version(self, identity: WeightVersion) -> None:
        """Forget a version that will be overwritten."""
        self.pop(identity, None)

    def get_version(self, identity: WeightVersion | None) -> ServedVersion | None:
        """The version, if it is in the store."""
        return self.get(identity) if identity is not None else None

    def in_use_since(self, identity: WeightVersion) -> float | None:
        """None: nobody fetches it."""
        return None


class FolderReceiver(ReceiverProcess):
    """Reads the chain of versions of one epoch at a time."""

    def __init__(self, paths: ReceiverPaths, config: WeightsConfig) -> None:
        """Bind the socket of the machine's servers. Raises ConfigError, DependencyError."""
        self._objects = open_objects(config)
        self._versions = StoreVersions()
        super().__init__(paths, config, self._versions)
        self._pool = ThreadPoolExecutor(config.credits + 1, "read")
        self._done, self._waker = os.pipe()
        os.set_blocking(self._done, False)
        self._jobs: dict[Future[Any], Callable[[Future[Any]], None]] = {}
        self._folder = ""
        self._head: Head | None = None
        self._looking = False
        self._chain: Chain | None = None
        """The chain that the current fetch reads."""
        self._refused: set[int] = set()
        """Chunks of the current fetch whose patches on the held version gave wrong bytes."""
        self._trusts_held = True
        self._damages = 0

    def _connect(self, address: PublisherAddress) -> None:
        self._folder, self._head, self._looking = address.announce, None, False

    def _send_heartbeat(self) -> None:
        if self._address is not None and not self._looking:
            self._looking = True
            self._submit(partial(self._objects.read, f"{self._folder}/head"), partial(self._take_head, self._address))

    def _take_head(self, address: PublisherAddress, job: Future[bytes]) -> None:
        if address != self._address:
            return
        self._looking = False
        try:
            head = decode_with_digest(job.result(), Head, "head")
        except FileNotFoundError:
            return  # not written yet, or removed at the end of the run
        except (OSError, WeightsCorrupt) as error:
            log.warning("weights.location cannot be read; trying again", error=str(error))
            return
        if head.epoch == address.epoch and head != self._head:
            self._head, self._heard_s = head, time.monotonic()

    def _newest_announced(self) -> WeightVersion | None:
        return self._head.identity if self._head is not None else None

    def _request_manifest(self, newest: WeightVersion) -> None:
        self._next_request_s = math.inf  # until `_take_chain`
        held = self._slots.newest if self._trusts_held and self._versions.get_version(self._slots.newest) else None
        self._submit(
            partial(Chain.read_links, self._objects, self._folder, newest, held),
            partial(self._take_chain, self._folder),
        )

    def _take_chain(self, folder: str, job: Future[Chain]) -> None:
        if folder != self._folder:
            return
        self._next_request_s = time.monotonic() + self._config.heartbeat_s
        try:
            chain = job.result()
        except (OSError, WeightsCorrupt) as error:
            self._lose_link(error)
            return
        # A chunk is made whole before the fetch takes it, so the fetch knows no base.
        if self._begin_fetch(replace(chain.newest.manifest, base=None)):
            self._chain, self._refused = chain, set()

    def _fetch_chunks(self, fetch: Fetch, copied: list[int]) -> None:
        for index, _ in fetch.schedule.take_requests(time.monotonic()):
            self._submit(self._chunk_reader(fetch, index), partial(self._take_chunk, fetch, index))

    def _chunk_reader(self, fetch: Fetch, index: int) -> Callable[[], bytearray]:
        """A job. What it reads of the store is not overwritten before its own chunk is taken."""
        chain, before, place = self._chain, fetch.before, fetch.served.chunks[index]
        assert chain is not None
        if before is None or not chain.reaches_base or index in self._refused:
            return partial(chain.read_chunk, index, place, None)
        return partial(chain.read_chunk, index, place, lambda: bytearray(place.view(before.block)))

    def _take_chunk(self, fetch: Fetch, index: int, job: Future[bytearray]) -> None:
        if fetch is not self._fetch:
            return
        try:
            chunk = job.result()
        except FileNotFoundError as error:
            self._lose_link(error)
            return
        except WeightsCorrupt as error:
            log.warning("a patch was refused", chunk=index, error=str(error))
            chunk = bytearray()
        except OSError as error:
            self._interrupt(str(error))
            return
        try:
            if not fetch.accept_chunk(index, memoryview(chunk), patch=False):
                self._refused.add(index)
        except WeightsCorrupt as error:
            self._lose_link(error)

    def _lose_link(self, error: Exception) -> None:
        """A link of the chain is missing or damaged: ask for a dense version, and begin again. Raises WeightsCorrupt
        for damage that stays."""
        if isinstance(error, WeightsCorrupt):
            self._damages += 1
            if self._damages >= MAX_ATTEMPTS:
                raise WeightsCorrupt(f"{error} Check weights.location.")
        self._stats.count_fallback("damaged link" if isinstance(error, WeightsCorrupt) else "lost link")
        self._trusts_held = False
        # If the request cannot be written, it is written at the next attempt.
        self._submit(partial(self._objects.write, f"{self._folder}/wanted/{self._node}", [b"?"]), lambda _: None)
        self._interrupt(str(error))

    def _interrupt(self, reason: str) -> None:
        super()._interrupt(reason)
        self._next_request_s = time.monotonic() + 2 * self._config.heartbeat_s

    def _drop_fetch(self) -> None:
        super()._drop_fetch()
        self._chain = None

    def _commit(self, fetch: Fetch) -> None:
        chain, self._chain = self._chain, None
        if chain is not None:
            self._stats.received_bytes += chain.read_bytes
        self._trusts_held, self._damages = True, 0
        super()._commit(fetch)

    def _describe_publisher(self, address: PublisherAddress) -> str:
        return f"{self._config.location}/{address.announce}"

    def _submit(self, read: Callable[[], Any], take: Callable[[Future[Any]], None]) -> None:
        job = self._pool.submit(read)
        self._jobs[job] = take
        job.add_done_callback(lambda _: os.write(self._waker, b"!"))

    def _wait(self) -> None:
        ready, _, _ = select.select([self._done, *self._servers.descriptors], [], [], self._wait_s())
        if self._done in ready:
            os.read(self._done, 4096)
            for job in [job for job in self._jobs if job.done()]:
                self._jobs.pop(job)(job)
        for descriptor in ready:
            self._servers.handle_readable(descriptor)

    def _close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    run_receiver(FolderReceiver)

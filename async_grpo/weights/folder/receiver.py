"""The receiver process of a machine, folder transports: reads versions into the store that engines map.

    head --every heartbeat--> newer? --`Chain.read_links`--> Fetch --chunks, `credits` at a time--> slot --> engines
    rollout servers <--Unix socket-- LocalClients <-----------------------"version v"----------------+

The states are in `ReceiverProcess`. Reads are jobs of a thread pool. A job's result is dropped if its fetch or its
trainer is no longer the current one. Failures:

- the chain ends without a base, or an object is missing or damaged: request a dense version (`wanted/`) and start again
  with the head; after MAX_ATTEMPTS damaged objects, every server raises WeightsCorrupt
- the folder cannot be reached: retry at the next heartbeat; servers get the time of silence
- a patch gives a wrong chunk: build that chunk from the folder only
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
    """The versions in the store. This transport does not relay, so no other machine fetches them."""

    def offer_version(self, served: ServedVersion) -> None:
        """Record a version, which can be the base of the next."""
        self[served.identity] = served

    def withdraw_version(self, identity: WeightVersion) -> None:
        """Remove a version that will be overwritten."""
        self.pop(identity, None)

    def get_version(self, identity: WeightVersion | None) -> ServedVersion | None:
        """Return the version if it is in the store, else None."""
        return self.get(identity) if identity is not None else None

    def in_use_since(self, identity: WeightVersion) -> float | None:
        """None: no receiver fetches it."""
        return None


class FolderReceiver(ReceiverProcess):
    """Follows the chain of versions of the newest epoch."""

    def __init__(self, paths: ReceiverPaths, config: WeightsConfig) -> None:
        """Bind the Unix socket. Raises ConfigError, DependencyError."""
        self._objects = open_objects(config)
        self._versions = StoreVersions()
        super().__init__(paths, config, self._versions)
        self._pool = ThreadPoolExecutor(config.credits + 1, "read")
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        self._jobs: dict[Future[Any], Callable[[Future[Any]], None]] = {}
        """Running reads, with the method that handles each result in this thread."""
        self._folder = ""
        self._head: Head | None = None
        self._is_reading_head = False
        self._chain: Chain | None = None
        """The chain that the current fetch reads."""
        self._without_base: set[int] = set()
        """Chunks of the current fetch for which patching our own version gave a wrong result."""
        self._use_base = True
        """False after a failure: the next fetch builds all chunks from the folder only."""
        self._damaged_count = 0

    def _connect(self, address: PublisherAddress) -> None:
        self._folder = address.announce
        self._head = None
        self._is_reading_head = False

    def _send_heartbeat(self) -> None:
        # One read of the head at a time: with an unreachable folder, reads would pile up in the pool.
        if self._address is not None and not self._is_reading_head:
            self._is_reading_head = True
            self._submit(partial(self._objects.read, f"{self._folder}/head"), partial(self._take_head, self._address))

    def _take_head(self, address: PublisherAddress, job: Future[bytes]) -> None:
        if address != self._address:
            return
        self._is_reading_head = False
        try:
            head = decode_with_digest(job.result(), Head, "head")
        except FileNotFoundError:
            return  # not written yet, or removed at the end of the run
        except (OSError, WeightsCorrupt) as error:
            log.warning("weights.location cannot be read; retrying", error=str(error))
            return
        if head.epoch == address.epoch and head != self._head:
            self._head = head
            self._heard_s = time.monotonic()

    def _newest_announced(self) -> WeightVersion | None:
        return self._head.identity if self._head is not None else None

    def _request_manifest(self, newest: WeightVersion) -> None:
        self._next_request_s = math.inf  # until `_take_chain`
        base = None
        if self._use_base and self._versions.get_version(self._slots.newest) is not None:
            base = self._slots.newest
        self._submit(
            partial(Chain.read_links, self._objects, self._folder, newest, base),
            partial(self._take_chain, self._folder),
        )

    def _take_chain(self, folder: str, job: Future[Chain]) -> None:
        if folder != self._folder:
            return
        self._next_request_s = time.monotonic() + self._config.heartbeat_s
        try:
            chain = job.result()
        except (OSError, WeightsCorrupt) as error:
            self._fail_chain(error)
            return
        # The jobs apply the patches and pass dense chunks to the fetch, so the fetch gets a manifest without a base.
        if self._begin_fetch(replace(chain.newest.manifest, base=None)):
            self._chain = chain
            self._without_base = set()

    def _fetch_chunks(self, fetch: Fetch, copied: list[int]) -> None:
        for index, _ in fetch.schedule.take_requests(time.monotonic()):
            self._submit(self._chunk_reader(fetch, index), partial(self._take_chunk, fetch, index))

    def _chunk_reader(self, fetch: Fetch, index: int) -> Callable[[], bytearray]:
        """Return a job that builds the chunk.

        The job may read the base from the store in its thread: with one slot, the base's chunk is overwritten only by
        this chunk, after the job.
        """
        chain = self._chain
        assert chain is not None
        before = fetch.before
        chunk = fetch.served.chunks[index]
        if before is None or not chain.reaches_base or index in self._without_base:
            return partial(chain.read_chunk, index, chunk, None)
        return partial(chain.read_chunk, index, chunk, lambda: bytearray(chunk.view(before.block)))

    def _take_chunk(self, fetch: Fetch, index: int, job: Future[bytearray]) -> None:
        if fetch is not self._fetch:
            return
        try:
            chunk = job.result()
        except FileNotFoundError as error:
            self._fail_chain(error)
            return
        except WeightsCorrupt as error:
            log.warning("a patch cannot be applied", chunk=index, error=str(error))
            chunk = bytearray()  # fails its hash below, and is built again without our base
        except OSError as error:
            self._interrupt(str(error))
            return
        try:
            if not fetch.accept_chunk(index, memoryview(chunk), patch=False):
                self._without_base.add(index)
        except WeightsCorrupt as error:
            self._fail_chain(error)

    def _fail_chain(self, error: Exception) -> None:
        """Request a dense version and start again, because a link of the chain is missing or damaged.

        Raises WeightsCorrupt for the MAX_ATTEMPTS-th damage in a row.
        """
        is_damaged = isinstance(error, WeightsCorrupt)
        if is_damaged:
            self._damaged_count += 1
            if self._damaged_count >= MAX_ATTEMPTS:
                raise WeightsCorrupt(f"{error} Check weights.location.")
        self._stats.count_fallback("damaged link" if is_damaged else "lost link")
        self._use_base = False
        # No result is needed: if the request cannot be written, the next failure writes it again.
        self._submit(partial(self._objects.write, f"{self._folder}/wanted/{self._node}", [b"?"]), lambda _: None)
        self._interrupt(str(error))

    def _interrupt(self, reason: str) -> None:
        super()._interrupt(reason)
        # Leave the trainer time to write a dense version.
        self._next_request_s = time.monotonic() + 2 * self._config.heartbeat_s

    def _drop_fetch(self) -> None:
        super()._drop_fetch()
        self._chain = None

    def _commit(self, fetch: Fetch) -> None:
        if self._chain is not None:
            self._stats.received_bytes += self._chain.read_bytes
        self._chain = None
        self._use_base = True
        self._damaged_count = 0
        super()._commit(fetch)

    def _describe_publisher(self, address: PublisherAddress) -> str:
        return f"{self._config.location}/{address.announce}"

    def _submit(self, read: Callable[[], Any], handle_result: Callable[[Future[Any]], None]) -> None:
        """Run `read` in the pool. `_wait` then calls `handle_result` in this thread."""
        job = self._pool.submit(read)
        self._jobs[job] = handle_result
        job.add_done_callback(lambda _: os.write(self._waker, b"!"))

    def _wait(self) -> None:
        ready, _, _ = select.select([self._wake, *self._servers.descriptors], [], [], self._wait_s())
        if self._wake in ready:
            os.read(self._wake, 4096)
            finished = [job for job in self._jobs if job.done()]
            for job in finished:
                handle_result = self._jobs.pop(job)
                handle_result(job)
        for descriptor in ready:
            self._servers.handle_readable(descriptor)

    def _close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    run_receiver(FolderReceiver)

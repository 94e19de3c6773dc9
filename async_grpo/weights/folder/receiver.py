"""The receiver process of a machine, which reads versions out of the folder into the store that engines map.

    head --`look`--> news? --`read the chain`--> Fetch --chunks, `credits` at a time--> back slot --commit--> engines
    rollout servers <--Unix socket-- LocalClients <------------------------------"version v"--------------+

Reads are jobs of a thread pool; one thread owns everything else, and waits for a finished job, a server or the next
look. What can go wrong, and what follows:

- the chain ends without a base, or an object is missing or damaged: ask for a dense version (`wanted/`), and begin
  again with the head; after MAX_ATTEMPTS of damage, WeightsCorrupt in every server
- the folder cannot be reached: try again at the next look; the silence is told to the servers
- a patch does not give the right chunk: that chunk is made of the folder alone
- no server is connected any more: the process ends
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import AsyncGrpoError, WeightsCorrupt
from async_grpo.weights.chunks import ServedVersion
from async_grpo.weights.folder.chain import Chain, Head, unseal
from async_grpo.weights.folder.objects import open_objects
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.fetch import MAX_ATTEMPTS, Fetch
from async_grpo.weights.node.local_socket import Failed, LocalClients, ReceiverPaths, ReceiverState
from async_grpo.weights.node.records import ChunkReply, ReceiverStats, count
from async_grpo.weights.node.slots import StoreSlots
from async_grpo.wire.board import PublisherAddress

FIRST_SERVER_S = 5.0

log = structlog.get_logger()


class KeptVersions(dict[WeightVersion, ServedVersion]):
    """The versions in the store; no other machine fetches them from here."""

    def offer(self, served: ServedVersion) -> None:
        """Keep this version as the base of the next."""
        self[served.identity] = served

    def withdraw(self, identity: WeightVersion) -> None:
        """Forget a version that will be overwritten."""
        self.pop(identity, None)

    def served(self, identity: WeightVersion | None) -> ServedVersion | None:
        """The version, if it is in the store."""
        return self.get(identity) if identity is not None else None

    def in_use_since(self, identity: WeightVersion) -> float | None:
        """None: nobody fetches it."""
        return None


class FolderReceiver:
    """The receiver's loop. `run` returns when no rollout server is connected any more."""

    def __init__(self, paths: ReceiverPaths, config: WeightsConfig) -> None:
        self._paths = paths
        self._config = config
        self._objects = open_objects(config)
        self._stats = ReceiverStats()
        self._locals = LocalClients(paths.socket, config.update_timeout_s)
        self._kept = KeptVersions()
        self._slots = StoreSlots(paths.store, config, self._kept, self._locals, self._stats)
        self._pool = ThreadPoolExecutor(config.credits + 1, "read")
        self._done, self._waker = os.pipe()
        os.set_blocking(self._done, False)
        self._jobs: dict[Future[Any], Callable[[Future[Any]], None]] = {}
        self._node = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._address: PublisherAddress | None = None
        self._head: Head | None = None
        self._heard_s = self._next_look_s = self._begin_s = 0.0
        self._started_s = time.monotonic()
        self._looking = self._planning = False
        self._chain: Chain | None = None
        self._fetch: Fetch | None = None
        self._refused: set[int] = set()
        self._trusts_held = True
        self._damages = 0

    def run(self) -> None:
        """Receive until every server has left. Tells the servers of an error that ends it, and raises it."""
        try:
            while not self._is_unused():
                self._follow()
                self._look_if_due()
                self._advance()
                self._wait()
        except AsyncGrpoError as error:
            self._locals.tell_all(Failed(message=str(error), corrupt=isinstance(error, WeightsCorrupt)))
            raise
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._locals.close()
            self._slots.close()
            self._paths.remove_lock()  # last: from now on another receiver may start

    def _is_unused(self) -> bool:
        if len(self._locals):
            return False
        return self._locals.had_servers or time.monotonic() - self._started_s > FIRST_SERVER_S

    def _follow(self) -> None:
        """Turn to the folder of the newest epoch that the servers have found."""
        address = self._locals.address
        if address is None or address == self._address:
            return
        self._address, self._head, self._heard_s = address, None, time.monotonic()
        self._jobs.clear()  # what they return is for the epoch before
        self._looking = self._planning = False
        self._drop_fetch()
        self._next_look_s = self._begin_s = 0.0

    def _look_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + self._config.heartbeat_s
        if self._address is not None and not self._looking:
            self._looking = True
            self._submit(partial(self._objects.read, f"{self._address.announce}/head"), self._take_head)
        self._tell_servers()

    def _take_head(self, job: Future[bytes]) -> None:
        self._looking = False
        assert self._address is not None
        try:
            head = unseal(job.result(), Head, "head")
        except FileNotFoundError:
            return  # not written yet, or removed at the end of the run
        except (OSError, WeightsCorrupt) as error:
            log.warning("weights.location cannot be read; trying again", error=str(error))
            return
        if head.epoch == self._address.epoch and head != self._head:
            self._head, self._heard_s = head, time.monotonic()

    def _advance(self) -> None:
        """Do one step of the work that needs no waiting."""
        fetch = self._fetch
        if fetch is None:
            self._begin_if_news()
            return
        if time.monotonic() - fetch.started_s > self._config.update_timeout_s:
            self._interrupt(f"it took longer than weights.update_timeout_s ({self._config.update_timeout_s:g} s)")
            return
        if fetch.has_copies:
            fetch.copy_unchanged()
        for request in fetch.requests(time.monotonic()):
            self._submit(self._chunk_reader(fetch, request.index), partial(self._take_chunk, request.index))
        if fetch.done:
            self._commit(fetch)

    def _begin_if_news(self) -> None:
        newest = self._head.identity if self._head is not None else None
        now = time.monotonic()
        if self._planning or now < self._begin_s or not self._slots.is_news(newest) or self._slots.slot_in_use():
            return
        assert self._address is not None
        assert newest is not None
        self._planning, self._begin_s = True, now + self._config.heartbeat_s
        held = self._slots.newest if self._trusts_held and self._kept.served(self._slots.newest) else None
        self._submit(partial(Chain.read, self._objects, self._address.announce, newest, held), self._take_chain)

    def _take_chain(self, job: Future[Chain]) -> None:
        self._planning = False
        try:
            chain = job.result()
        except (OSError, WeightsCorrupt) as error:
            self._lose(error)
            return
        manifest = replace(chain.newest.manifest, base=None)  # a chunk is made whole before the fetch takes it
        manifest.validate()
        self._slots.open(manifest)
        if self._slots.is_news(manifest.identity) and not self._slots.slot_in_use():
            self._chain, self._fetch = chain, self._slots.begin(manifest)

    def _chunk_reader(self, fetch: Fetch, index: int) -> Callable[[], bytearray]:
        """A job. What it reads of the store is not overwritten before its own chunk is taken."""
        chain, before, place = self._chain, fetch.before, fetch.served.chunks[index]
        assert chain is not None
        if before is None or not chain.reaches_held or index in self._refused:
            return partial(chain.chunk, index, place, None)
        return partial(chain.chunk, index, place, lambda: bytearray(place.of(before.block)))

    def _take_chunk(self, index: int, job: Future[bytearray]) -> None:
        fetch = self._fetch
        assert fetch is not None
        try:
            chunk = job.result()
        except FileNotFoundError as error:
            self._lose(error)
            return
        except WeightsCorrupt as error:
            log.warning("a patch was refused", chunk=index, error=str(error))
            chunk = bytearray()
        except OSError as error:
            self._interrupt(str(error))
            return
        try:
            if not fetch.accept(ChunkReply(**fetch.identity._asdict(), index=index, patch=False), memoryview(chunk)):
                self._refused.add(index)
        except WeightsCorrupt as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """A link of the chain is missing or damaged: ask for a dense version, and begin again. Raises WeightsCorrupt
        for damage that stays."""
        if isinstance(error, WeightsCorrupt):
            self._damages += 1
            if self._damages >= MAX_ATTEMPTS:
                raise WeightsCorrupt(f"{error} Check weights.location.")
        assert self._address is not None
        count(self._stats.fallbacks, "damaged link" if isinstance(error, WeightsCorrupt) else "lost link")
        self._trusts_held = False
        self._submit(partial(self._objects.write, f"{self._address.announce}/wanted/{self._node}", [b"?"]), _ignored)
        self._interrupt(str(error))

    def _interrupt(self, reason: str) -> None:
        log.warning("a version was given up; beginning again with the newest", reason=reason)
        self._begin_s = time.monotonic() + 2 * self._config.heartbeat_s
        self._stats.interrupted += self._fetch is not None
        self._drop_fetch()

    def _drop_fetch(self) -> None:
        """The jobs of the fetch go on, and what they return is dropped."""
        for job in [job for job, take in self._jobs.items() if getattr(take, "func", None) == self._take_chunk]:
            del self._jobs[job]
        if self._fetch is not None:
            self._slots.abandon(self._fetch)
        self._fetch = self._chain = None
        self._refused = set()

    def _commit(self, fetch: Fetch) -> None:
        assert self._chain is not None
        before, stats = self._slots.last, self._stats
        self._slots.commit(fetch)
        stats.versions += 1
        stats.dense_bytes += fetch.manifest.layout.total_bytes
        stats.last_transfer_s = time.monotonic() - fetch.started_s
        stats.received_bytes += self._chain.read_bytes
        if before is not None and before.epoch == fetch.identity.epoch:
            stats.skipped += fetch.identity.version - before.version - 1
        self._fetch = self._chain = None
        self._refused, self._trusts_held, self._damages, self._begin_s = set(), True, 0, 0.0
        self._tell_servers()

    def _tell_servers(self) -> None:
        state = ReceiverState(newest=self._slots.newest, servers=len(self._locals), stats=self._stats)
        if self._address is not None:
            silent_s = time.monotonic() - self._heard_s
            publisher = f"{self._config.location}/{self._address.announce}"
            state = replace(state, publisher=publisher, epoch=self._address.epoch, silent_s=silent_s)
        self._locals.tell_all(state)

    def _submit(self, read: Callable[[], Any], take: Callable[[Future[Any]], None]) -> None:
        job = self._pool.submit(read)
        self._jobs[job] = take
        job.add_done_callback(lambda _: os.write(self._waker, b"!"))

    def _wait(self) -> None:
        """Wait for a job, a server or the next look, and handle what came."""
        busy = self._fetch is not None and self._fetch.has_copies
        left_s = 0.0 if busy else max(0.001, self._next_look_s - time.monotonic())
        ready, _, _ = select.select([self._done, *self._locals.descriptors], [], [], left_s)
        if self._done in ready:
            os.read(self._done, 4096)
            for job in [job for job in self._jobs if job.done()]:
                if (take := self._jobs.pop(job, None)) is not None:  # an earlier one may have dropped it
                    take(job)
        for descriptor in ready:
            self._locals.handle(descriptor)


def _ignored(_: Future[Any]) -> None:
    """A request that could not be written is written again at the next attempt."""


def main(store: str, config_json: str) -> None:
    """Entry point of the process; started by a rollout server, which passes on its lock."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the servers handle them, and this process ends with the servers
        signal.signal(number, signal.SIG_IGN)
    FolderReceiver(ReceiverPaths(Path(store)), WeightsConfig.model_validate_json(config_json)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Hashes and encodes a version on threads, while the publisher serves and the trainer goes on.

    order --> hash every chunk --> compare with the base's hashes --> patch every chunk that changed --> Encoded

Both slots of the store are read meanwhile, so the trainer may not write: its next `Prepare` waits for
`done`, and after `encode_wait_s` the publisher says `cancel`. Then the version goes dense. Hashing
is never cancelled: without hashes nothing can be served.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from async_grpo.config.weights import Encoding
from async_grpo.weights import delta
from async_grpo.weights.chunks import Chunk, Hashes, hash_chunk, pack_hashes
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.zmq.chunk_server import ServedVersion

WORTH = 0.9
"""Under `auto`, patches that take more than this share of the dense bytes are not worth the work."""
TRIAL_SHARE = 0.125
"""After this share of the bytes `auto` looks whether it is worth going on."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a version takes to serve. Without patches, `reason` says why.

    `encoded_bytes` is what a receiver of the version before has to fetch: unchanged chunks count nothing.
    """

    identity: WeightVersion
    hashes: bytes
    patches: dict[int, bytes]
    base: ServedVersion | None
    reason: str
    encoded_bytes: int
    hash_s: float
    encode_s: float
    failure: BaseException | None = None


@dataclass(slots=True)
class _JobState:
    """Shared by the threads of one job."""

    changed_bytes: int
    seen_bytes: int = 0
    encoded_bytes: int = 0
    reason: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class WeightEncoder:
    """One job at a time. `wake` becomes readable when `take` has something."""

    def __init__(self, encoding: Encoding, threads: int) -> None:
        self._encoding = encoding
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "encode")
        self._director = ThreadPoolExecutor(1, "encode-job")
        self._cancelled = threading.Event()
        self._done: list[Encoded] = []
        self.busy = False
        self.wake, self._waker = os.pipe()

    def start(
        self, identity: WeightVersion, chunks: Sequence[Chunk], block: memoryview, base: ServedVersion | None
    ) -> None:
        """Begin with `identity`, which lies in `block`; it must not change until `take`."""
        self.busy = True
        self._cancelled.clear()
        self._director.submit(self._run, identity, chunks, block, base)

    def cancel(self) -> None:
        """Give up patches as soon as the chunks under way are done."""
        self._cancelled.set()

    def take(self) -> Encoded:
        """The finished job. Raises what it failed with."""
        os.read(self.wake, 1)
        self.busy = False
        encoded = self._done.pop()
        if encoded.failure is not None:
            raise encoded.failure
        return encoded

    def _run(
        self, identity: WeightVersion, chunks: Sequence[Chunk], block: memoryview, base: ServedVersion | None
    ) -> None:
        try:
            self._done.append(self._encode(identity, chunks, block, base))
        except BaseException as error:
            self._done.append(Encoded(identity, b"", {}, None, "", 0, 0.0, 0.0, error))
        os.write(self._waker, b"!")

    def _encode(
        self, identity: WeightVersion, chunks: Sequence[Chunk], block: memoryview, base: ServedVersion | None
    ) -> Encoded:
        started = time.monotonic()
        hashes = self._hash(chunks, block)
        hash_s = time.monotonic() - started
        comparable = base is not None and list(base.chunks) == list(chunks)
        changed = np.flatnonzero(hashes != base.hashes) if base is not None and comparable else np.arange(len(chunks))
        job = _JobState(changed_bytes=sum(chunks[index].nbytes for index in changed.tolist()))
        patches: dict[int, bytes] = {}
        if self._encoding == "dense":
            job.reason = "configured"
        elif base is None or not comparable:
            job.reason = "no base"
        else:
            patches = self._make_patches(chunks, block, base, changed.tolist(), job)
        packed = pack_hashes(hashes.tolist())
        encode_s = time.monotonic() - started - hash_s
        if job.reason:
            return Encoded(identity, packed, {}, None, job.reason, job.changed_bytes, hash_s, encode_s)
        return Encoded(identity, packed, patches, base, "", job.encoded_bytes, hash_s, encode_s)

    def _hash(self, chunks: Sequence[Chunk], block: memoryview) -> Hashes:
        hashes: Hashes = np.empty(len(chunks), np.uint64)

        def work(first: int) -> None:
            for index in range(first, len(chunks), self._threads):
                hashes[index] = hash_chunk(chunks[index].of(block))

        for _ in self._pool.map(work, range(self._threads)):
            pass
        return hashes

    def _make_patches(
        self, chunks: Sequence[Chunk], block: memoryview, base: ServedVersion, changed: list[int], job: _JobState
    ) -> dict[int, bytes]:
        """Of the changed chunks, those that are shorter as patches."""
        patches: dict[int, bytes] = {}

        def work(first: int) -> None:
            for index in changed[first :: self._threads]:
                if self._gives_up(job):
                    return
                chunk = chunks[index]
                patch = delta.encode(chunk.of(base.block), chunk.of(block), chunk.item_bytes)
                with job.lock:
                    job.seen_bytes += chunk.nbytes
                    job.encoded_bytes += min(len(patch), chunk.nbytes)
                    if len(patch) < chunk.nbytes:
                        patches[index] = patch

        for _ in self._pool.map(work, range(self._threads)):
            pass
        worth = WORTH if self._encoding == "auto" else 1.0
        if not job.reason and changed and job.encoded_bytes >= worth * job.changed_bytes:
            job.reason = "larger"
        return patches

    def _gives_up(self, job: _JobState) -> bool:
        with job.lock:
            if self._cancelled.is_set():
                job.reason = "trainer waited"
            tried = job.seen_bytes > TRIAL_SHARE * job.changed_bytes
            if self._encoding == "auto" and tried and job.encoded_bytes >= WORTH * job.seen_bytes:
                job.reason = "larger"
            return bool(job.reason)

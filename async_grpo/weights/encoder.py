"""Hashes and encodes a version on threads, while the publisher serves and the trainer goes on.

    start --> hash every chunk --> compare with the base's hashes --> patch every chunk that changed --> take

Encoding reads both slots of the store, so the trainer must not write meanwhile: its next `Prepare` waits for the job.
After `encode_wait_s` the publisher calls `cancel`, and the version goes dense. Hashing is never cancelled, because
nothing can be served without hashes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from async_grpo.config.weights import Encoding
from async_grpo.weights import delta
from async_grpo.weights.chunks import Chunk, Hashes, ServedVersion, hash_chunk, pack_hashes
from async_grpo.weights.manifest import BaseVersion, TensorLayout, WeightManifest, WeightVersion

MAX_PATCH_RATIO = 0.9
"""Under `auto`, a version whose patches take more than this share of the dense bytes goes dense."""
TRIAL_FRACTION = 0.125
"""Share of the changed bytes after which `auto` decides whether to go on."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A version that is ready to be served. Without patches, `reason` says why."""

    identity: WeightVersion
    hashes: bytes
    encoded_bytes: int
    """What a receiver of the version before has to fetch: the chunks that changed, encoded."""
    reason: str = ""
    patches: dict[int, bytes] = field(default_factory=dict)
    base: ServedVersion | None = None

    def make_manifest(
        self, layout: TensorLayout, chunk_bytes: int, base: ServedVersion | None, *, key: bytes
    ) -> WeightManifest:
        """The manifest of this version; `base` is the version that receivers need for what differs."""
        return WeightManifest(
            **self.identity._asdict(),
            layout=layout,
            chunk_bytes=chunk_bytes,
            hashes=self.hashes,
            key=key,
            base=BaseVersion(**base.identity._asdict(), digest=base.digest) if base is not None else None,
        )


@dataclass(slots=True)
class _JobState:
    """Shared by the threads of one job."""

    changed_bytes: int
    seen_bytes: int = 0
    encoded_bytes: int = 0
    reason: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class WeightEncoder:
    """Encodes one version at a time. The descriptor `wake` becomes readable when the version can be taken."""

    def __init__(self, chunks: Sequence[Chunk], encoding: Encoding, threads: int) -> None:
        self._chunks = chunks
        self._encoding = encoding
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "encode")
        self._director = ThreadPoolExecutor(1, "encode-job")
        self._cancelled = threading.Event()
        self._job: Future[Encoded] | None = None
        self.wake, self._waker = os.pipe()

    @property
    def is_busy(self) -> bool:
        """Whether a version has been started and not been taken."""
        return self._job is not None

    def start_encoding(self, identity: WeightVersion, block: memoryview, base: ServedVersion | None) -> None:
        """Start to encode `identity`, which lies in `block`; the block must not change until `take`."""
        self._cancelled.clear()
        self._job = self._director.submit(self._encode, identity, block, base)
        self._job.add_done_callback(lambda _: os.write(self._waker, b"!"))

    def cancel_patches(self) -> None:
        """Give up patches as soon as the chunks being encoded are done."""
        self._cancelled.set()

    def take_result(self) -> Encoded:
        """The finished version. Raises what its encoding failed with."""
        os.read(self.wake, 1)
        assert self._job is not None
        job, self._job = self._job, None
        return job.result()

    def _encode(self, identity: WeightVersion, block: memoryview, base: ServedVersion | None) -> Encoded:
        hashes = self._hash(block)
        changed = np.arange(len(hashes)) if base is None else np.flatnonzero(hashes != base.hashes)
        job = _JobState(changed_bytes=sum(self._chunks[index].nbytes for index in changed.tolist()))
        patches: dict[int, bytes] = {}
        if self._encoding == "dense":
            job.reason = "configured"
        elif base is None:
            job.reason = "no base"
        else:
            patches = self._make_patches(block, base, changed.tolist(), job)
        packed = pack_hashes(hashes.tolist())
        if job.reason:
            return Encoded(identity, packed, job.changed_bytes, job.reason)
        return Encoded(identity, packed, job.encoded_bytes, patches=patches, base=base)

    def _hash(self, block: memoryview) -> Hashes:
        hashes: Hashes = np.empty(len(self._chunks), np.uint64)

        def work(first: int) -> None:
            for index in range(first, len(hashes), self._threads):
                hashes[index] = hash_chunk(self._chunks[index].view(block))

        for _ in self._pool.map(work, range(self._threads)):
            pass
        return hashes

    def _make_patches(
        self, block: memoryview, base: ServedVersion, changed: list[int], job: _JobState
    ) -> dict[int, bytes]:
        """Patches of the changed chunks that are shorter as patches."""
        patches: dict[int, bytes] = {}

        def work(first: int) -> None:
            for index in changed[first :: self._threads]:
                if self._gives_up(job):
                    return
                chunk = self._chunks[index]
                patch = delta.make_patch(chunk.view(base.block), chunk.view(block), chunk.item_bytes)
                with job.lock:
                    job.seen_bytes += chunk.nbytes
                    job.encoded_bytes += min(len(patch), chunk.nbytes)
                    if len(patch) < chunk.nbytes:
                        patches[index] = patch

        for _ in self._pool.map(work, range(self._threads)):
            pass
        worth = MAX_PATCH_RATIO if self._encoding == "auto" else 1.0
        if not job.reason and changed and job.encoded_bytes >= worth * job.changed_bytes:
            job.reason = "larger"
        return patches

    def _gives_up(self, job: _JobState) -> bool:
        with job.lock:
            if self._cancelled.is_set():
                job.reason = "trainer waited"
            tried = job.seen_bytes > TRIAL_FRACTION * job.changed_bytes
            if self._encoding == "auto" and tried and job.encoded_bytes >= MAX_PATCH_RATIO * job.seen_bytes:
                job.reason = "larger"
            return bool(job.reason)

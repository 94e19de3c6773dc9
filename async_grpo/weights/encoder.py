"""Hashes and patches a version in threads, while the publisher serves and the trainer trains.

    start_encoding --> hash all chunks --> compare with the base's hashes --> patch the changed chunks --> take_result

Encoding reads both slots of the store, so the trainer must not write to either of them: its next `Prepare` waits for
the job. After `encode_wait_s` the publisher calls `cancel_patches`, and the version is served dense. Hashing is never
cancelled, because nothing can be served without hashes.
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
"""With encoding `auto`, a version is served dense if its patches need more than this fraction of the dense bytes."""
TRIAL_FRACTION = 0.125
"""Fraction of the changed bytes that `auto` encodes before it first compares the sizes."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A version that is ready to be served."""

    identity: WeightVersion
    hashes: bytes
    encoded_bytes: int
    """Bytes that a receiver of the previous version fetches: changed chunks, as patches where there are some."""
    reason: str = ""
    """Why there are no patches; empty if there are."""
    patches: dict[int, bytes] = field(default_factory=dict)
    base: ServedVersion | None = None

    def make_manifest(
        self, layout: TensorLayout, chunk_bytes: int, base: ServedVersion | None, *, key: bytes
    ) -> WeightManifest:
        """Return the manifest. `base` is the version that receivers need for the patches."""
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
    """Counters that the threads of one job share."""

    changed_bytes: int
    seen_bytes: int = 0
    encoded_bytes: int = 0
    reason: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class WeightEncoder:
    """Encodes one version at a time. The descriptor `wake` becomes readable when the result can be taken."""

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
        """True from `start_encoding` to `take_result`."""
        return self._job is not None

    def start_encoding(self, identity: WeightVersion, block: memoryview, base: ServedVersion | None) -> None:
        """Start to encode the version in `block`, which must not change until `take_result`."""
        self._cancelled.clear()
        self._job = self._director.submit(self._encode, identity, block, base)
        self._job.add_done_callback(lambda _: os.write(self._waker, b"!"))

    def cancel_patches(self) -> None:
        """Skip all remaining patches. Chunks that are being encoded now are finished first."""
        self._cancelled.set()

    def take_result(self) -> Encoded:
        """Return the encoded version, or raise the error of its encoding. Waits until it is finished."""
        os.read(self.wake, 1)
        assert self._job is not None
        job, self._job = self._job, None
        return job.result()

    def _encode(self, identity: WeightVersion, block: memoryview, base: ServedVersion | None) -> Encoded:
        hashes = self._hash_chunks(block)
        changed = list(range(len(hashes)))
        if base is not None:
            changed = np.flatnonzero(hashes != base.hashes).tolist()
        job = _JobState(changed_bytes=sum(self._chunks[index].nbytes for index in changed))

        patches: dict[int, bytes] = {}
        if self._encoding == "dense":
            job.reason = "configured"
        elif base is None:
            job.reason = "no base"
        else:
            patches = self._make_patches(block, base, changed, job)

        packed_hashes = pack_hashes(hashes.tolist())
        if job.reason:
            return Encoded(identity, packed_hashes, job.changed_bytes, job.reason)
        return Encoded(identity, packed_hashes, job.encoded_bytes, patches=patches, base=base)

    def _hash_chunks(self, block: memoryview) -> Hashes:
        hashes: Hashes = np.empty(len(self._chunks), np.uint64)

        def hash_every_nth(first: int) -> None:
            for index in range(first, len(hashes), self._threads):
                hashes[index] = hash_chunk(self._chunks[index].view(block))

        list(self._pool.map(hash_every_nth, range(self._threads)))  # list() waits and raises a thread's error
        return hashes

    def _make_patches(
        self, block: memoryview, base: ServedVersion, changed: list[int], job: _JobState
    ) -> dict[int, bytes]:
        """Return the patches that are shorter than their chunk. Sets `job.reason` if the version is served dense."""
        patches: dict[int, bytes] = {}

        def patch_every_nth(first: int) -> None:
            for index in changed[first :: self._threads]:
                if self._update_reason(job):
                    return
                chunk = self._chunks[index]
                patch = delta.make_patch(chunk.view(base.block), chunk.view(block), chunk.item_bytes)
                with job.lock:
                    job.seen_bytes += chunk.nbytes
                    job.encoded_bytes += min(len(patch), chunk.nbytes)
                    if len(patch) < chunk.nbytes:
                        patches[index] = patch

        list(self._pool.map(patch_every_nth, range(self._threads)))
        max_ratio = MAX_PATCH_RATIO if self._encoding == "auto" else 1.0
        if not job.reason and changed and job.encoded_bytes >= max_ratio * job.changed_bytes:
            job.reason = "larger"
        return patches

    def _update_reason(self, job: _JobState) -> bool:
        """Set `job.reason` if the version must go dense, and return True if it is set."""
        with job.lock:
            if self._cancelled.is_set():
                job.reason = "trainer waited"
            tried = job.seen_bytes > TRIAL_FRACTION * job.changed_bytes
            if self._encoding == "auto" and tried and job.encoded_bytes >= MAX_PATCH_RATIO * job.seen_bytes:
                job.reason = "larger"
            return bool(job.reason)

"""Fetches one version into a slot: which chunks to request, which have arrived, which are missing.

    chunk unchanged since the previous version       --> copied from there
    patch available, and its base is here            --> base copied, patch applied
    otherwise                                        --> fetched dense

If the slot itself contains the previous version, nothing is copied: unchanged chunks are already there, and patches are
applied in place. A chunk counts only after its hash matches. `ChunkSchedule` (pure) decides what to request: at most
`credits` chunks at a time, and late ones again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights import chunks, delta
from async_grpo.weights.chunks import Chunk, ServedVersion, cut_into_chunks, hash_chunk
from async_grpo.weights.manifest import WeightManifest
from async_grpo.weights.node.stats import ReceiverStats
from async_grpo.weights.store import VersionNotes

MAX_ATTEMPTS = 4
"""Number of times a chunk may fail its hash or stay unanswered before the fetch ends."""
COPIES_PER_CALL = 8
"""Unchanged chunks to copy before the sockets are polled again."""


class FetchInterrupted(WeightsError):
    """The fetch cannot be completed: a newer version replaced this one, or the parent does not answer.

    The receiver catches it and starts over with the newest version.
    """


class ChunkSchedule:
    """Decides which chunks of one version to request from the network, and when to repeat a request.

    waiting --take_requests--> requested --mark_arrived--> done
       ^                           |
       +-- put_back_late, put_back_corrupt, put_back_all

    >>> schedule = ChunkSchedule([7, 8, 9], patched=True, credits=2, timeout_s=5.0)
    >>> schedule.take_requests(now_s=0.0)
    [(7, True), (8, True)]
    >>> schedule.mark_arrived(7); schedule.take_requests(now_s=1.0)
    [(9, True)]
    """

    def __init__(
        self, chunks: Iterable[int], *, patched: bool, credits: int, timeout_s: float, connections: int = 1
    ) -> None:
        """Chunk `index` is requested over connection `index % connections`. `patched`: request patches first."""
        self._waiting = deque(chunks)
        self._deadlines: dict[int, float] = {}
        """Requested chunks, in the order of their requests."""
        self._overtaken: set[int] = set()
        """Requested chunks after which a later request on the same connection was answered."""
        self._late_counts: dict[int, int] = {}
        self._corrupt_counts: dict[int, int] = {}
        self._dense_only: set[int] = set()
        """Chunks whose patch gave a wrong result."""
        self._patched = patched
        self._credits = credits
        self._timeout_s = timeout_s
        self._connections = connections

    @property
    def is_done(self) -> bool:
        """True if every chunk has arrived."""
        return not self._waiting and not self._deadlines

    def is_requested(self, index: int) -> bool:
        """True if the chunk was requested and has not arrived."""
        return index in self._deadlines

    def take_requests(self, now_s: float) -> list[tuple[int, bool]]:
        """Return (chunk, as a patch) for the chunks to request now, and mark them as requested."""
        free = self._credits - len(self._deadlines)
        requests: list[tuple[int, bool]] = []
        for _ in range(min(free, len(self._waiting))):
            index = self._waiting.popleft()
            self._deadlines[index] = now_s + self._timeout_s
            requests.append((index, self._patched and index not in self._dense_only))
        return requests

    def mark_arrived(self, index: int) -> None:
        """Record that the chunk has arrived, and that it overtook all earlier requests on the same connection."""
        for earlier in self._deadlines:  # a dict iterates in the order of the requests
            if earlier == index:
                break
            if (earlier - index) % self._connections == 0:
                self._overtaken.add(earlier)
        self._remove_request(index)

    def add_chunk(self, index: int) -> None:
        """Add a chunk to fetch."""
        self._waiting.append(index)

    def put_back_late(self, now_s: float, heard_s: float) -> list[int]:
        """Put late chunks back, to be requested again, and return them. `heard_s` is the time of the last answer.

        Answers arrive in the order of the requests of a connection. On a slow link many chunks may be queued before
        this one, so an overdue chunk counts as late only if it was overtaken or nothing arrives at all. Requested
        again while it is still queued, it would be sent twice and slow the link down further.

        Raises FetchInterrupted if a chunk is late for the MAX_ATTEMPTS-th time.
        """
        is_silent = now_s - heard_s >= self._timeout_s
        overdue = [index for index, deadline in self._deadlines.items() if deadline <= now_s]
        late = [index for index in overdue if is_silent or index in self._overtaken]

        # Reversed, because each is put at the front: the oldest is requested first, and other relays wait for it.
        for index in reversed(late):
            self._late_counts[index] = self._late_counts.get(index, 0) + 1
            if self._late_counts[index] >= MAX_ATTEMPTS:
                raise FetchInterrupted(f"chunk {index} was requested {MAX_ATTEMPTS} times and did not arrive.")
            self._put_back(index)
        return late

    def put_back_corrupt(self, index: int, *, patch: bool) -> None:
        """Put a chunk back whose hash does not match. If it was a patch, request the dense chunk instead.

        Raises WeightsCorrupt if a dense chunk fails for the MAX_ATTEMPTS-th time.
        """
        if patch:
            self._dense_only.add(index)
        else:
            self._corrupt_counts[index] = self._corrupt_counts.get(index, 0) + 1
            if self._corrupt_counts[index] >= MAX_ATTEMPTS:
                raise WeightsCorrupt(
                    f"chunk {index} failed its hash {MAX_ATTEMPTS} times; nothing of this version was applied. "
                    "Check the network and the publisher's memory."
                )
        self._put_back(index)

    def put_back_all(self) -> None:
        """Put all requested chunks back and reset their failures, because the parent or its connection is new."""
        for index in sorted(self._deadlines, reverse=True):
            self._put_back(index)
        self._late_counts.clear()
        self._corrupt_counts.clear()

    def _put_back(self, index: int) -> None:
        self._remove_request(index)
        self._waiting.appendleft(index)

    def _remove_request(self, index: int) -> None:
        del self._deadlines[index]
        self._overtaken.discard(index)


class Fetch:
    """Fills `block` with the version of `manifest`, chunk by chunk.

    `before` is the previous complete version, in the other slot or in `block` itself. `torn` means that `block`
    contains chunks of versions that were never completed; those whose hash matches are used.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        block: memoryview,
        before: ServedVersion | None,
        config: WeightsConfig,
        stats: ReceiverStats,
        connections: int = 1,
        *,
        torn: bool = False,
    ) -> None:
        """Raises WeightsCorrupt if the manifest does not have one hash per chunk of its layout."""
        chunks = cut_into_chunks(manifest.layout, manifest.chunk_bytes)
        self.manifest = manifest
        self.identity = manifest.identity
        self.started_s = time.monotonic()
        self.served = ServedVersion.from_manifest(manifest, chunks, block)
        self.before: ServedVersion | None = None
        """The previous version, if it has the same chunks."""
        if before is not None and list(before.chunks) == chunks:
            self.before = before
        self._stats = stats
        self._in_place = torn or (self.before is not None and self.before.block is block)

        # In a torn block any chunk may already be right, so all are checked by their hash before any is requested.
        is_unchanged = np.full(len(chunks), torn)
        if self.before is not None:
            is_unchanged = self.served.hashes == self.before.hashes
        self._unchanged = deque(np.flatnonzero(is_unchanged).tolist())
        missing = np.flatnonzero(~is_unchanged).tolist()
        self.schedule = ChunkSchedule(
            missing,
            patched=bool(missing) and self._can_patch(),
            credits=config.credits * connections,
            timeout_s=config.request_timeout_s,
            connections=connections,
        )

    @property
    def is_done(self) -> bool:
        """True if every chunk is here and verified."""
        return self.schedule.is_done and not self._unchanged

    @property
    def has_chunks_to_copy(self) -> bool:
        """True if unchanged chunks of the previous version are still to be copied."""
        return bool(self._unchanged)

    def copy_unchanged(self) -> list[int]:
        """Copy up to COPIES_PER_CALL unchanged chunks, unless they are in place. Returns those that are now verified.

        Chunks that fail their hash are added to the schedule.
        """
        copied: list[int] = []
        for _ in range(min(COPIES_PER_CALL, len(self._unchanged))):
            index = self._unchanged.popleft()
            chunk = self.served.chunks[index]
            self._copy_base(chunk)
            if self._matches_hash(index, chunk.view(self.served.block)):
                copied.append(index)
                self.served.mark_chunk_verified(index)
                self._stats.unchanged_chunks += 1
            else:
                self.schedule.add_chunk(index)
                if self.before is not None:
                    self._stats.count_fallback("base damaged")
        return copied

    def accept_chunk(self, index: int, payload: memoryview, *, patch: bool) -> bool:
        """Store an arrived chunk, or apply an arrived patch. False if it was not requested or fails its hash.

        Raises WeightsCorrupt if a chunk keeps failing its hash.
        """
        if not self.schedule.is_requested(index):
            return False
        is_stored = self._apply_patch(index, payload) if patch else self._store_dense(index, payload)
        if not is_stored:
            self._stats.rerequests += 1
            self.schedule.put_back_corrupt(index, patch=patch)
            return False
        self.served.mark_chunk_verified(index)
        self.schedule.mark_arrived(index)
        return True

    def make_notes(self) -> VersionNotes:
        """Return the notes to commit with the version: hashes for the next base, and the tensors that changed."""
        notes = VersionNotes(
            digest=self.served.digest,
            chunk_bytes=self.manifest.chunk_bytes,
            hashes=self.manifest.hashes,
            key=self.manifest.key,
        )
        if self.before is None:
            return notes
        flags = chunks.find_changed_tensors(
            self.manifest.layout,
            self.served.chunks,
            self.before.hashes,
            self.served.hashes,
            None if self._in_place else self.before.block,  # in place, the old bytes are overwritten
            self.served.block,
        )
        return replace(notes, base=self.before.identity, changed=chunks.pack_bits(flags))

    def _can_patch(self) -> bool:
        """True if patches are available and their base is here. Otherwise counts the reason."""
        base = self.manifest.base
        if base is None:
            return False
        if self.before is None:
            self._stats.count_fallback("no base")
        elif self.before.identity != base.identity:
            self._stats.count_fallback("another base")
        elif self.before.digest != base.digest:
            self._stats.count_fallback("base differs")
        else:
            return True
        return False

    def _store_dense(self, index: int, payload: memoryview) -> bool:
        chunk = self.served.chunks[index]
        if len(payload) != chunk.nbytes or not self._matches_hash(index, payload):
            return False
        chunk.view(self.served.block)[:] = payload
        self._stats.dense_chunks += 1
        return True

    def _apply_patch(self, index: int, patch: memoryview) -> bool:
        if self.before is None:
            return False
        chunk = self.served.chunks[index]
        target = chunk.view(self.served.block)
        self._copy_base(chunk)
        try:
            delta.apply_patch(target, patch)
        except WeightsCorrupt:
            self._stats.count_fallback("malformed patch")
            return False
        if not self._matches_hash(index, target):
            self._stats.count_fallback("wrong result")
            return False
        self.served.add_patch(index, bytes(patch))  # for other receivers, which fetch it from here
        self._stats.patched_chunks += 1
        return True

    def _copy_base(self, chunk: Chunk) -> None:
        if self.before is not None and not self._in_place:
            chunk.view(self.served.block)[:] = chunk.view(self.before.block)

    def _matches_hash(self, index: int, data: memoryview) -> bool:
        return hash_chunk(data) == int(self.served.hashes[index])

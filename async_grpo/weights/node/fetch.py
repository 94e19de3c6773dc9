"""Fetches one version into a slot: which chunks to request, which have arrived, which are missing.

    chunk unchanged since the version before?        --> copied from there
    a patch is offered, and the base is here?        --> base copied, patch applied
    otherwise                                        --> dense

Where the slot holds the version before itself, nothing is copied: what has not changed is there, and patches are
applied in place. Every chunk must pass its hash before it counts. `ChunkSchedule` (pure) decides what to request: at
most `credits` chunks at a time, and late ones again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights import chunks, delta
from async_grpo.weights.chunks import Chunk, ServedVersion, cut_into_chunks, hash_chunk
from async_grpo.weights.manifest import WeightManifest
from async_grpo.weights.node.stats import ReceiverStats
from async_grpo.weights.store import VersionNotes

MAX_ATTEMPTS = 4
"""The fetch ends when a chunk has failed its hash, or gone unanswered, this many times."""
COPIES_AT_ONCE = 8
"""Unchanged chunks that are copied before the sockets are polled again."""


class FetchInterrupted(WeightsError):
    """The fetch was given up: a newer version replaced this one, or the parent does not answer.

    The receiver starts over with the newest version; the error never leaves it.
    """


class ChunkSchedule:
    """The chunks of one version that have to come over the network.

    >>> schedule = ChunkSchedule([7, 8, 9], patched=True, credits=2, timeout_s=5.0)
    >>> schedule.take_requests(now_s=0.0)
    [(7, True), (8, True)]
    >>> schedule.mark_arrived(7); schedule.take_requests(now_s=1.0)
    [(9, True)]
    """

    def __init__(
        self, chunks: Iterable[int], *, patched: bool, credits: int, timeout_s: float, connections: int = 1
    ) -> None:
        """`connections`: how many there are; that of a chunk is its number modulo this."""
        self._todo = deque(chunks)
        self._deadlines: dict[int, float] = {}
        self._passed_over: set[int] = set()
        self._late: dict[int, int] = {}
        self._corrupt: dict[int, int] = {}
        self._dense: set[int] = set()
        self._patched = patched
        self._credits = credits
        self._timeout_s = timeout_s
        self._connections = connections

    @property
    def is_done(self) -> bool:
        """Every chunk has arrived."""
        return not self._todo and not self._deadlines

    def is_requested(self, index: int) -> bool:
        """The chunk was requested and has not arrived."""
        return index in self._deadlines

    def take_requests(self, now_s: float) -> list[tuple[int, bool]]:
        """Chunks to request now, and whether as a patch."""
        free = self._credits - len(self._deadlines)
        asked = [self._todo.popleft() for _ in range(min(free, len(self._todo)))]
        for index in asked:
            self._deadlines[index] = now_s + self._timeout_s
        return [(index, self._patched and index not in self._dense) for index in asked]

    def mark_arrived(self, index: int) -> None:
        """Record that the chunk has arrived. Chunks requested before it over the same connection that have not are
        marked as passed over."""
        for earlier in self._deadlines:  # in the order of the requests
            if earlier == index:
                break
            if (earlier - index) % self._connections == 0:
                self._passed_over.add(earlier)
        self._forget(index)

    def add_chunk(self, index: int) -> None:
        """Add a chunk to fetch."""
        self._todo.append(index)

    def put_back_late(self, now_s: float, heard_s: float) -> list[int]:
        """Put late chunks back, to be requested again; `heard_s` is when the other side was last heard.

        Answers of a connection come in the order of the requests. On a slow link a chunk may have a long queue before
        it, so it does not count as late while the queue moves: requested again, it would come twice and make the link
        slower still.
        Raises FetchInterrupted if a chunk was late too often.
        """
        silent = now_s - heard_s >= self._timeout_s
        overdue = [index for index, deadline in self._deadlines.items() if deadline <= now_s]
        late = [index for index in overdue if silent or index in self._passed_over]
        for index in reversed(late):  # so that they are requested again in the order in which others wait for them
            self._late[index] = self._late.get(index, 0) + 1
            if self._late[index] >= MAX_ATTEMPTS:
                raise FetchInterrupted(f"chunk {index} was asked for {MAX_ATTEMPTS} times and never came.")
            self._put_back(index)
        return late

    def put_back_corrupt(self, index: int, *, patch: bool) -> None:
        """What arrived fails its hash: request it again, as a dense chunk if it was a patch.

        Raises WeightsCorrupt if a dense chunk keeps failing.
        """
        if patch:
            self._dense.add(index)
        else:
            self._corrupt[index] = self._corrupt.get(index, 0) + 1
            if self._corrupt[index] >= MAX_ATTEMPTS:
                raise WeightsCorrupt(
                    f"chunk {index} failed its hash {MAX_ATTEMPTS} times; nothing of this version was applied. "
                    "Check the network and the publisher's memory."
                )
        self._put_back(index)

    def put_back_all(self) -> None:
        """Put back everything that was requested: another parent will be asked."""
        for index in sorted(self._deadlines, reverse=True):
            self._put_back(index)
        self._late.clear()
        self._corrupt.clear()

    def _put_back(self, index: int) -> None:
        self._forget(index)
        self._todo.appendleft(index)

    def _forget(self, index: int) -> None:
        del self._deadlines[index]
        self._passed_over.discard(index)


class Fetch:
    """Fills `block` with the version of `manifest`; `before` is the version before it, of the other slot or of `block`
    itself.

    `torn`: the block holds parts of a version that never became whole. Those that belong to this one are kept.
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
        """Raises WeightsCorrupt if the manifest does not have one hash for every chunk of its layout."""
        chunks = cut_into_chunks(manifest.layout, manifest.chunk_bytes)
        self.manifest = manifest
        self.identity = manifest.identity
        self.started_s = time.monotonic()
        self.served = ServedVersion.from_manifest(manifest, chunks, block)
        self._stats = stats
        self.before = before if before is not None and list(before.chunks) == chunks else None
        """The version whose chunks may be used; None if there is none."""
        self._in_place = torn or (self.before is not None and self.before.block is block)
        same = np.full(len(chunks), torn) if self.before is None else self.served.hashes == self.before.hashes
        self._unchanged = deque(np.flatnonzero(same).tolist())
        missing = np.flatnonzero(~same).tolist()
        self.schedule = ChunkSchedule(
            missing,
            patched=self._can_patch(bool(missing)),
            credits=config.credits * connections,
            timeout_s=config.request_timeout_s,
            connections=connections,
        )

    @property
    def is_done(self) -> bool:
        """Every chunk is there and verified."""
        return self.schedule.is_done and not self._unchanged

    @property
    def has_chunks_to_copy(self) -> bool:
        """Whether chunks are left to copy from the version before."""
        return bool(self._unchanged)

    def copy_unchanged(self) -> list[int]:
        """Copy a few chunks from the version before, unless they lie here. Returns those that pass their hash; the
        others are fetched."""
        copied: list[int] = []
        for _ in range(min(COPIES_AT_ONCE, len(self._unchanged))):
            index = self._unchanged.popleft()
            chunk = self.served.chunks[index]
            self._copy_base(chunk)
            if self._is_right(index, chunk.view(self.served.block)):
                copied.append(index)
                self.served.mark_chunk_verified(index)
                self._stats.unchanged_chunks += 1
            else:
                self.schedule.add_chunk(index)
                if self.before is not None:
                    self._stats.count_fallback("base damaged")
        return copied

    def accept_chunk(self, index: int, payload: memoryview, *, patch: bool) -> bool:
        """Store the chunk or apply the patch that arrived; False if it was not requested or fails its hash.

        Raises WeightsCorrupt if a chunk keeps failing its hash.
        """
        if not self.schedule.is_requested(index):
            return False
        right = self._apply_patch(index, payload) if patch else self._store_dense(index, payload)
        if not right:
            self._stats.rerequests += 1
            self.schedule.put_back_corrupt(index, patch=patch)
            return False
        self.served.mark_chunk_verified(index)
        self.schedule.mark_arrived(index)
        return True

    def make_notes(self) -> VersionNotes:
        """Notes to commit with the version: hashes for the next base, and which tensors changed."""
        served, before, manifest = self.served, self.before, self.manifest
        changed = b""
        if before is not None:
            old = None if self._in_place else before.block
            flags = chunks.find_changed_tensors(
                manifest.layout, served.chunks, before.hashes, served.hashes, old, served.block
            )
            changed = chunks.pack_bits(flags)
        return VersionNotes(
            base=before.identity if before is not None else None,
            changed=changed,
            digest=served.digest,
            chunk_bytes=manifest.chunk_bytes,
            hashes=manifest.hashes,
            key=manifest.key,
        )

    def _can_patch(self, anything_missing: bool) -> bool:
        base = self.manifest.base
        if base is None or not anything_missing:
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
        if len(payload) != chunk.nbytes or not self._is_right(index, payload):
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
        if not self._is_right(index, target):
            self._stats.count_fallback("wrong result")
            return False
        self.served.add_patch(index, bytes(patch))
        self._stats.patched_chunks += 1
        return True

    def _copy_base(self, chunk: Chunk) -> None:
        if self.before is not None and not self._in_place:
            chunk.view(self.served.block)[:] = chunk.view(self.before.block)

    def _is_right(self, index: int, data: memoryview) -> bool:
        return hash_chunk(data) == int(self.served.hashes[index])

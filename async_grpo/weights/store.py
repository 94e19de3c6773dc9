"""One or two versions of the whole model in shared memory, readable by every process of the machine.

    header | layout | notes 0 | notes 1 | slot 0 | slot 1

In a store with one slot, a new version replaces the only one. The header has per slot: its version, the length of its
notes, and a sequence number, which is even while the slot is complete and odd while it is written (a seqlock). The
writer fills a slot, then commits it. A reader opens a snapshot of one version, reads it in place, and checks afterwards
that the sequence number is unchanged. No process waits for another while weights are copied.

Why this is correct on any processor: the header is read and written only under `flock` on the store's file, held for
microseconds. The kernel's lock orders everything before an unlock before everything after the next lock, on aarch64 as
on x86.

- A reader that finds a version sees all its bytes: they were written before the unlock in `commit_write`.
- A reader that saw a byte of the next version detects it. Had its final check come before the writer's `begin_write`,
  all its reads would have come before the write. So the check comes after, and the sequence number differs.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_grpo.errors import WaitTimeout, WeightsCorrupt, WeightsError, WeightsReplaced
from async_grpo.weights import chunks
from async_grpo.weights.manifest import FORMAT, TensorLayout, TensorSpec, WeightVersion
from async_grpo.weights.shared_memory import PAGE, allocate_file, remove_empty_run_folder, round_up_to_pages
from async_grpo.wire import decode, encode
from async_grpo.wire.records import Record

MAGIC = b"agrpo-ws"
LOCK_TIMEOUT_S = 10.0
_PREFIX = struct.Struct("<8sQQQ")  # magic, format, bytes of the layout, bytes of one slot's notes
_COUNTERS_OFFSET = 64
_COUNTERS = 1 + 2 * 5  # number of commits; per slot: sequence, epoch, version, commit number, length of its notes
_SEQUENCE, _EPOCH, _VERSION, _COMMIT, _NOTES = range(5)
_LOCK_RETRY_S = 0.0005


class VersionNotes(Record, frozen=True, kw_only=True, tag="notes"):
    """A receiver's metadata of a committed version. A restarted receiver continues with it."""

    base: tuple[int, int] | None = None
    changed: bytes = b""
    """One bit per tensor, set if it differs from `base` (`chunks.pack_bits`)."""
    digest: bytes = b""
    chunk_bytes: int = 0
    hashes: bytes = b""
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """One version, read in place. Call `verify` after the last read."""

    identity: WeightVersion
    layout: TensorLayout
    block: memoryview
    notes: VersionNotes
    _store: WeightStore
    _slot: int
    _sequence: int

    def read(self, spec: TensorSpec) -> memoryview:
        """Return the bytes of one tensor, in place."""
        return self.block[spec.offset : spec.offset + spec.nbytes]

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield every tensor with its bytes, in place."""
        for spec in self.layout.tensors:
            yield spec, self.read(spec)

    def changed_since(self, base: WeightVersion) -> list[TensorSpec] | None:
        """Tensors whose bytes differ from `base`; None if unknown."""
        if self.notes.base is None or WeightVersion(*self.notes.base) != base:
            return None
        flags = chunks.unpack_bits(self.notes.changed, len(self.layout.tensors))
        return [spec for spec, changed in zip(self.layout.tensors, flags, strict=True) if changed]

    def verify(self) -> None:
        """Raise WeightsCorrupt if the writer has started to overwrite this slot."""
        if self._store.read_sequence(self._slot) != self._sequence:
            raise WeightsCorrupt(
                f"{self.identity} was overwritten while it was read; the data that was read must not be used."
            )


class WeightStore:
    """A store with one writer (`create`, `adopt`) and any number of readers (`open`). Not safe for two writers."""

    def __init__(self, path: Path, descriptor: int, memory: mmap.mmap) -> None:
        """Use `create`, `adopt` or `open`."""
        weakref.finalize(self, os.close, descriptor)
        self.path = path
        self._descriptor = descriptor
        self._thread_lock = threading.Lock()
        self._writing: int | None = None
        magic, version, layout_bytes, self._notes_bytes = _PREFIX.unpack_from(memory, 0)
        if (magic, version) != (MAGIC, FORMAT):
            raise WeightsError(f"{path} is not a weight store of format {FORMAT}.")
        self.layout = decode(memory[PAGE : PAGE + layout_bytes], TensorLayout)
        notes_at = round_up_to_pages(PAGE + layout_bytes)
        counters = np.frombuffer(memory, np.int64, _COUNTERS, _COUNTERS_OFFSET)
        self._commits, self._heads = counters[:1], counters[1:].reshape(2, 5)
        block = memoryview(memory)
        self._notes = [block[notes_at + slot * self._notes_bytes :][: self._notes_bytes] for slot in (0, 1)]
        slot_bytes = round_up_to_pages(self.layout.total_bytes)
        slots_at = notes_at + 2 * self._notes_bytes
        self._slots = [block[at:][: self.layout.total_bytes] for at in range(slots_at, len(block), slot_bytes)]

    @classmethod
    def create(cls, path: Path, layout: TensorLayout, *, chunks: int = 0, slots: int = 2) -> WeightStore:
        """Create or replace the store at `path`, with mode 600 and all pages allocated.

        `chunks` is the number of chunks whose hashes fit into the notes. Raises WeightsError if there is no room for
        `slots` (1 or 2) copies of the model.
        """
        packed_layout = encode(layout)
        notes_bytes = round_up_to_pages(PAGE + 8 * chunks + len(layout.tensors))
        slots_at = round_up_to_pages(PAGE + len(packed_layout)) + 2 * notes_bytes
        descriptor, memory = allocate_file(path, slots_at + slots * round_up_to_pages(layout.total_bytes))
        _PREFIX.pack_into(memory, 0, MAGIC, FORMAT, len(packed_layout), notes_bytes)
        memory[PAGE : PAGE + len(packed_layout)] = packed_layout
        return cls(path, descriptor, memory)

    @classmethod
    def open(cls, path: Path) -> WeightStore:
        """Map the store at `path` read-only. Raises WeightsError if there is none."""
        return cls._map(path, os.O_RDONLY, mmap.ACCESS_READ)

    @classmethod
    def adopt(cls, path: Path) -> WeightStore:
        """Continue as the writer of a store that a dead writer left. Raises WeightsError if there is none."""
        return cls._map(path, os.O_RDWR, mmap.ACCESS_WRITE)

    @classmethod
    def _map(cls, path: Path, flags: int, access: int) -> WeightStore:
        try:
            descriptor = os.open(path, flags)
            try:
                memory = mmap.mmap(descriptor, 0, access=access)
                if len(memory) < PAGE:
                    raise WeightsError(f"{path} is not a weight store of format {FORMAT}.")
                return cls(path, os.dup(descriptor), memory)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise WeightsError(f"no weight store can be mapped at {path}: {error}.") from error

    @property
    def newest_version(self) -> WeightVersion | None:
        """The complete version that was committed last; None if there is none."""
        with self._lock_header(fcntl.LOCK_SH):
            complete = [slot for slot in (0, 1) if self._is_complete(slot)]
            if not complete:
                return None
            return self._version_in(max(complete, key=self._commit_number))

    def read_sequence(self, slot: int) -> int:
        """Return the slot's sequence number, which changes at `begin_write` and at `commit_write`."""
        with self._lock_header(fcntl.LOCK_SH):
            return int(self._heads[slot, _SEQUENCE])

    def begin_write(self, keep: WeightVersion | None = None) -> memoryview:
        """Return a slot to write into: the older one of two, unless it contains `keep`.

        Invalidates snapshots of the version in that slot.
        """
        with self._lock_header(fcntl.LOCK_EX):
            slot = self._next_slot(keep)
            # |= and not += 1: a writer that was killed while writing leaves an odd number, which must stay odd.
            self._heads[slot, _SEQUENCE] |= 1
            self._writing = slot
        return self._slots[slot]

    @property
    def slot_count(self) -> int:
        """Number of versions that fit: 1 or 2."""
        return len(self._slots)

    @property
    def writing_slot(self) -> int:
        """The slot between `begin_write` and `commit_write`. Raises WeightsError if there is none."""
        if self._writing is None:
            raise WeightsError(f"no slot of {self.path} is being written: call begin_write first.")
        return self._writing

    def slot_memory(self, slot: int) -> memoryview:
        """Memory of a slot, for processes that fill it in parallel with the writer."""
        return self._slots[slot]

    def version_to_overwrite(self) -> WeightVersion | None:
        """The version that the next `begin_write` overwrites; None if a slot is free."""
        with self._lock_header(fcntl.LOCK_SH):
            slot = self._next_slot(None)
            return self._version_in(slot) if self._is_complete(slot) else None

    def commit_write(self, identity: WeightVersion, notes: VersionNotes | None = None) -> None:
        """Make the slot that is being written, and is now complete, the newest version."""
        slot = self.writing_slot
        self._writing = None

        packed_notes = encode(notes or VersionNotes())
        if len(packed_notes) > self._notes_bytes:  # more chunks than the store was created for
            packed_notes = encode(VersionNotes())

        with self._lock_header(fcntl.LOCK_EX):
            self._commits += 1
            self._heads[slot, _EPOCH:] = *identity, self._commits[0], len(packed_notes)
            self._notes[slot][: len(packed_notes)] = packed_notes
            self._heads[slot, _SEQUENCE] += 1  # last: even again, so readers may open the version

    def snapshot(self, identity: WeightVersion) -> StoreSnapshot:
        """Open exactly this version, in place. Raises WeightsReplaced if it is not in the store."""
        with self._lock_header(fcntl.LOCK_SH):
            for slot in (0, 1):
                if self._is_complete(slot) and self._version_in(slot) == identity:
                    notes = decode(bytes(self._notes[slot][: self._heads[slot, _NOTES]]), VersionNotes)
                    sequence = int(self._heads[slot, _SEQUENCE])
                    return StoreSnapshot(identity, self.layout, self._slots[slot], notes, self, slot, sequence)
        raise WeightsReplaced(f"{self.path} does not hold {identity}; it was replaced by {self.newest_version}.")

    def unlink(self) -> None:
        """Remove the file, and the run's folder if it is empty then. Existing mappings remain valid."""
        self.path.unlink(missing_ok=True)
        remove_empty_run_folder(self.path.parent)

    @contextmanager
    def _lock_header(self, kind: int) -> Iterator[None]:
        """Lock the header: LOCK_SH to read it, LOCK_EX to write it. Raises WaitTimeout."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with self._thread_lock:  # flock belongs to the open file, so it does not exclude threads of one process
            while True:
                try:
                    fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise WaitTimeout(
                            f"the lock of {self.path}", LOCK_TIMEOUT_S, "Is a process that uses it suspended"
                        ) from None
                    time.sleep(_LOCK_RETRY_S)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _next_slot(self, keep: WeightVersion | None) -> int:
        if self.slot_count == 1:
            return 0
        if not (self._is_complete(0) and self._is_complete(1)):
            return 1 if self._is_complete(0) else 0
        older = min((0, 1), key=self._commit_number)
        return 1 - older if self._version_in(older) == keep else older

    def _is_complete(self, slot: int) -> bool:
        return self._commit_number(slot) > 0 and int(self._heads[slot, _SEQUENCE]) % 2 == 0

    def _commit_number(self, slot: int) -> int:
        return int(self._heads[slot, _COMMIT])

    def _version_in(self, slot: int) -> WeightVersion:
        return WeightVersion(*self._heads[slot, _EPOCH:_COMMIT].tolist())

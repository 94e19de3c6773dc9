"""One or two versions of the whole model in shared memory, for every process of one machine.

    header | layout | notes 0 | notes 1 | slot 0 | slot 1

A store of one slot is that much shorter: whatever is written replaces the only version. The header has, for each slot,
the version in it, the length of its notes and a sequence number: even while the content is whole, odd while it is
written (a seqlock). The writer fills a slot and then commits it. Readers ask for one version, read it in place, and
check afterwards that the sequence number has not changed. No process waits for another while weights are copied.

Why this holds on any processor. The header is read and written only under `flock` of the store's file, for
microseconds. The kernel's lock orders everything before an unlock before everything after the next lock, on aarch64 as
on x86. So a reader that finds a version sees all its bytes, because they were written before the unlock of `commit`.
And a reader that saw a byte of the next version notices it: if its final check came before the writer's `begin`, all
its reads would have come before the write. So the check comes after `begin`, and finds that the sequence number has
changed.
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
_COUNTERS = 1 + 2 * 5  # number of commits; for each slot: sequence, epoch, version, commit number, length of its notes
_SEQUENCE, _EPOCH, _VERSION, _COMMIT, _NOTES = range(5)
_LOCK_RETRY_S = 0.0005


class VersionNotes(Record, frozen=True, kw_only=True, tag="notes"):
    """What a receiver knows about a version that it has committed. A restarted receiver takes the notes over."""

    base: tuple[int, int] | None = None
    changed: bytes = b""
    """One bit for each tensor: whether it differs from `base`."""
    digest: bytes = b""
    chunk_bytes: int = 0
    hashes: bytes = b""
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """One version, read in place. `verify` tells whether everything that was read from it is whole."""

    identity: WeightVersion
    layout: TensorLayout
    block: memoryview
    notes: VersionNotes
    _store: WeightStore
    _slot: int
    _sequence: int

    def read(self, spec: TensorSpec) -> memoryview:
        """The bytes of one tensor, in place."""
        return self.block[spec.offset : spec.offset + spec.nbytes]

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Every tensor with its bytes, in place."""
        for spec in self.layout.tensors:
            yield spec, self.read(spec)

    def changed_since(self, base: WeightVersion) -> list[TensorSpec] | None:
        """The tensors whose bytes differ from those of `base`; None if this is not known."""
        if self.notes.base is None or WeightVersion(*self.notes.base) != base:
            return None
        flags = chunks.unpack_bits(self.notes.changed, len(self.layout.tensors))
        return [spec for spec, changed in zip(self.layout.tensors, flags, strict=True) if changed]

    def verify(self) -> None:
        """Raise WeightsCorrupt if the writer has begun to overwrite this slot."""
        if self._store.read_sequence(self._slot) != self._sequence:
            raise WeightsCorrupt(f"{self.identity} was overwritten while it was read; what was read is refused.")


class WeightStore:
    """Has one writer (`create`, `adopt`) and any number of readers (`open`). Not safe for two writers."""

    def __init__(self, path: Path, descriptor: int, memory: mmap.mmap) -> None:
        """Use `create`, `adopt` or `open`."""
        weakref.finalize(self, os.close, descriptor)
        self.path = path
        self._descriptor = descriptor
        self._threads = threading.Lock()
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
        """Create or replace the store at `path`, mode 600, all pages allocated, with room for notes on `chunks` chunks.

        Raises WeightsError if there is no room for `slots` (1 or 2) copies of the model.
        """
        described = encode(layout)
        notes_bytes = round_up_to_pages(PAGE + 8 * chunks + len(layout.tensors))
        slots_at = round_up_to_pages(PAGE + len(described)) + 2 * notes_bytes
        descriptor, memory = allocate_file(path, slots_at + slots * round_up_to_pages(layout.total_bytes))
        _PREFIX.pack_into(memory, 0, MAGIC, FORMAT, len(described), notes_bytes)
        memory[PAGE : PAGE + len(described)] = described
        return cls(path, descriptor, memory)

    @classmethod
    def open(cls, path: Path) -> WeightStore:
        """Map the store at `path` read-only. Raises WeightsError if there is none."""
        return cls._map(path, os.O_RDONLY, mmap.ACCESS_READ)

    @classmethod
    def adopt(cls, path: Path) -> WeightStore:
        """Continue to write the store that a dead writer left. Raises WeightsError if there is none."""
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
        """The whole version that was committed last; None if there is none."""
        with self._header(fcntl.LOCK_SH):
            whole = [slot for slot in (0, 1) if self._is_whole(slot)]
            return self._identity(max(whole, key=self._commit_number)) if whole else None

    def read_sequence(self, slot: int) -> int:
        """The slot's sequence number, which changes at `begin` and at `commit`."""
        with self._header(fcntl.LOCK_SH):
            return int(self._heads[slot, _SEQUENCE])

    def begin_write(self, keep: WeightVersion | None = None) -> memoryview:
        """A slot to write into: of two the one without the newest version, unless that one holds `keep`.

        Snapshots of the version that it held become invalid.
        """
        with self._header(fcntl.LOCK_EX):
            slot = self._next_slot(keep)
            self._heads[slot, _SEQUENCE] |= 1
            self._writing = slot
        return self._slots[slot]

    @property
    def slot_count(self) -> int:
        """How many versions have room: 1 or 2."""
        return len(self._slots)

    @property
    def writing_slot(self) -> int:
        """The slot that was begun and is not committed. Raises WeightsError if there is none."""
        if self._writing is None:
            raise WeightsError(f"no slot of {self.path} was begun.")
        return self._writing

    def slot_memory(self, number: int) -> memoryview:
        """The memory of a slot, for processes that fill it together with the writer."""
        return self._slots[number]

    def version_to_overwrite(self) -> WeightVersion | None:
        """The version that `begin` would overwrite; None if it would overwrite none."""
        with self._header(fcntl.LOCK_SH):
            slot = self._next_slot(None)
            return self._identity(slot) if self._is_whole(slot) else None

    def commit_write(self, identity: WeightVersion, notes: VersionNotes | None = None) -> None:
        """Make the slot that was begun, and is now whole, the newest version."""
        slot, self._writing = self.writing_slot, None
        described = encode(notes or VersionNotes())
        if len(described) > self._notes_bytes:  # more chunks than the store was made for
            described = encode(VersionNotes())
        with self._header(fcntl.LOCK_EX):
            self._commits += 1
            self._heads[slot, _EPOCH:] = *identity, self._commits[0], len(described)
            self._notes[slot][: len(described)] = described
            self._heads[slot, _SEQUENCE] += 1

    def snapshot(self, identity: WeightVersion) -> StoreSnapshot:
        """Exactly this version, in place. Raises WeightsReplaced if the store does not hold it."""
        with self._header(fcntl.LOCK_SH):
            for slot in (0, 1):
                if self._is_whole(slot) and self._identity(slot) == identity:
                    notes = decode(bytes(self._notes[slot][: self._heads[slot, _NOTES]]), VersionNotes)
                    sequence = int(self._heads[slot, _SEQUENCE])
                    return StoreSnapshot(identity, self.layout, self._slots[slot], notes, self, slot, sequence)
        raise WeightsReplaced(f"{self.path} does not hold {identity}; it was replaced by {self.newest_version}.")

    def unlink(self) -> None:
        """Remove the file, and with the last store the run's folder. Mapped pages stay."""
        self.path.unlink(missing_ok=True)
        remove_empty_run_folder(self.path.parent)

    @contextmanager
    def _header(self, kind: int) -> Iterator[None]:
        """Hold the store's lock, exclusive to write the header. Raises WaitTimeout."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with self._threads:  # flock does not tell threads apart
            while True:
                try:
                    fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise WaitTimeout(
                            f"the lock of {self.path}", LOCK_TIMEOUT_S, "Is a process that uses it stopped"
                        ) from None
                    time.sleep(_LOCK_RETRY_S)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _next_slot(self, keep: WeightVersion | None) -> int:
        if self.slot_count == 1:
            return 0
        if not (self._is_whole(0) and self._is_whole(1)):
            return 1 if self._is_whole(0) else 0
        older = min((0, 1), key=self._commit_number)
        return 1 - older if self._identity(older) == keep else older

    def _is_whole(self, slot: int) -> bool:
        return self._commit_number(slot) > 0 and int(self._heads[slot, _SEQUENCE]) % 2 == 0

    def _commit_number(self, slot: int) -> int:
        return int(self._heads[slot, _COMMIT])

    def _identity(self, slot: int) -> WeightVersion:
        return WeightVersion(*self._heads[slot, _EPOCH:_COMMIT].tolist())

"""The whole model in shared memory, two versions of it, for every process of one machine.

    header | layout | slot 0 | slot 1

Each slot has a sequence number, even while its content is whole and odd while it is written (a
seqlock), and the identity of its content. The writer fills the back slot and then makes it active;
readers ask for one identity, read in place, and check afterwards that the sequence has not moved.
Nobody waits for anybody.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.manifest import FORMAT, Identity, Layout, TensorSpec
from async_grpo.wire import decode, encode

SHARED_MEMORY = Path("/dev/shm")
MAGIC = b"agrpo-ws"
PAGE = 4096
_PREFIX = struct.Struct("<8sQQ")  # magic, format, bytes of the layout
_COUNTERS_OFFSET = 64
_COUNTERS = 8  # active slot, sequence of commits, then (sequence, epoch, version) of each slot
_NO_VERSION = -(1 << 62)


def store_path(run: str, name: str) -> Path:
    """Where the store `name` of a run lies."""
    return _run_folder(run) / f"{name}.weights"


def remove_stores(run: str) -> None:
    """Remove whatever stores of `run` are left; processes that still map them keep their pages."""
    shutil.rmtree(_run_folder(run), ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A look at one slot. `still_valid` says whether what was read since then is whole."""

    identity: Identity
    layout: Layout
    block: memoryview
    _counters: npt.NDArray[np.int64]
    _slot: int
    _sequence: int

    def view(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of tensor `name`, uint8 [nbytes], in place."""
        spec = self.layout.by_name()[name]
        return np.frombuffer(self.block, np.uint8, spec.nbytes, spec.offset)

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Every tensor with its bytes, in place."""
        for spec in self.layout.tensors:
            yield spec, self.block[spec.offset : spec.offset + spec.nbytes]

    @property
    def still_valid(self) -> bool:
        """False once the writer has begun to overwrite this slot."""
        return int(self._counters[_sequence_index(self._slot)]) == self._sequence

    def verify(self) -> None:
        """Raise WeightsCorrupt if anything read from this snapshot may have been overwritten."""
        if not self.still_valid:
            raise WeightsCorrupt(f"{self.identity} was overwritten while it was read; what was read is refused.")


class WeightStore:
    """One writer (`create`), any number of readers (`open`). Not safe for two writers."""

    def __init__(self, path: Path, memory: mmap.mmap, layout: Layout, slots_offset: int) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.layout = layout
        self._memory = memory
        self._counters = np.frombuffer(memory, np.int64, _COUNTERS, _COUNTERS_OFFSET)
        block = memoryview(memory)
        starts = (slots_offset, slots_offset + _slot_bytes(layout))
        self._slots = [block[start : start + layout.total_bytes] for start in starts]

    @classmethod
    def create(cls, path: Path, layout: Layout) -> WeightStore:
        """Make (or replace) the store at `path`, mode 600, all pages allocated.

        Raises WeightsError where the file system has no room for two copies of the model.
        """
        described = encode(layout)
        slots_offset = _page_up(PAGE + len(described))
        size = slots_offset + 2 * _slot_bytes(layout)
        memory = _allocate(path, size)
        _PREFIX.pack_into(memory, 0, MAGIC, FORMAT, len(described))
        memory[PAGE : PAGE + len(described)] = described
        store = cls(path, memory, layout, slots_offset)
        for slot in (0, 1):
            store._set_identity(slot, Identity(_NO_VERSION, _NO_VERSION))
        return store

    @classmethod
    def open(cls, path: Path) -> WeightStore:
        """Map the store at `path` read-only. Raises WeightsError if there is none."""
        try:
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightsError(f"no weight store can be mapped at {path}: {error}.") from error
        magic, version, length = _PREFIX.unpack_from(memory, 0)
        if (magic, version) != (MAGIC, FORMAT):
            raise WeightsError(f"{path} is not a weight store of format {FORMAT}.")
        layout = decode(memory[PAGE : PAGE + length], Layout)
        return cls(path, memory, layout, _page_up(PAGE + length))

    @property
    def identity(self) -> Identity | None:
        """What was committed last; None before the first commit."""
        identity = self._identity(int(self._counters[0]))
        return None if identity.version == _NO_VERSION else identity

    @property
    def commits(self) -> int:
        """How many versions were committed."""
        return int(self._counters[1])

    def begin(self) -> memoryview:
        """The back slot to write into; readers of what it held find their snapshots invalid."""
        back = 1 - int(self._counters[0])
        if self._counters[_sequence_index(back)] % 2 == 0:
            self._counters[_sequence_index(back)] += 1
        return self._slots[back]

    def commit(self, identity: Identity) -> None:
        """The back slot, now whole, becomes the active one."""
        back = 1 - int(self._counters[0])
        if self._counters[_sequence_index(back)] % 2 == 0:
            raise WeightsError(f"commit of {identity} without begin.")
        self._set_identity(back, identity)
        self._counters[_sequence_index(back)] += 1
        self._counters[0] = back
        self._counters[1] += 1

    def snapshot(self, identity: Identity) -> Snapshot:
        """Exactly these weights, in place. Raises WeightsError if the store does not hold them."""
        for slot in (0, 1):
            sequence = int(self._counters[_sequence_index(slot)])
            if sequence % 2 == 0 and self._identity(slot) == identity:
                return Snapshot(identity, self.layout, self._slots[slot], self._counters, slot, sequence)
        raise WeightsError(f"{self.path} does not hold {identity}; it was replaced by {self.identity}.")

    def unlink(self) -> None:
        """Remove the file, and the run's folder with its last store; mapped pages live on."""
        self.path.unlink(missing_ok=True)
        if self.path.parent.parent == SHARED_MEMORY:
            with suppress(OSError):  # other stores of the run are still there
                self.path.parent.rmdir()

    def _identity(self, slot: int) -> Identity:
        at = _sequence_index(slot)
        return Identity(int(self._counters[at + 1]), int(self._counters[at + 2]))

    def _set_identity(self, slot: int, identity: Identity) -> None:
        at = _sequence_index(slot)
        self._counters[at + 1] = identity.epoch
        self._counters[at + 2] = identity.version


def _run_folder(run: str) -> Path:
    return SHARED_MEMORY / f"async-grpo-{run}"


def _sequence_index(slot: int) -> int:
    return 2 + 3 * slot


def _page_up(count: int) -> int:
    return -(-count // PAGE) * PAGE


def _slot_bytes(layout: Layout) -> int:
    return _page_up(layout.total_bytes)


def _allocate(path: Path, size: int) -> mmap.mmap:
    """A new file of `size` bytes with every page present: the first touch is slow, so it is now."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    _check_room(path, size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            _check_room(path, size)
        raise
    finally:
        os.close(descriptor)


def _check_room(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise WeightsError(
            f"a weight store of {size} bytes (2 slots of the whole model) does not fit into {path.parent}: "
            f"{free} bytes are free, {size - free} too few. Free or enlarge it "
            "(mount -o remount,size=..., docker run --shm-size=...)."
        )

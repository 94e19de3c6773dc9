"""Layout of a run's folder, and how to build a chunk from it.

    NAME/epoch-000002/head                 newest version, and a counter that rises while the trainer is alive
                      000000017.version    VersionRecord: manifest, and an index of the next two objects
                      000000017.changes    every chunk that differs from version 16: a patch, or the dense chunk
                      000000017.dense      the whole block; only for some versions
                      wanted/RECEIVER      a receiver cannot follow the chain: write a dense version

    dense 10 <-- changes 11 <-- changes 12 <-- ... <-- changes 17

All objects that a record refers to are written before it, and the head last. So a reader that finds a version finds all
of its objects, unless they were removed or damaged since.

To build a chunk, start with the receiver's version (or with the newest dense copy of the chunk) and apply all patches
since. The hash in the newest manifest verifies the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec
import xxhash

from async_grpo.errors import WeightsCorrupt, WireError
from async_grpo.weights import delta
from async_grpo.weights.chunks import Chunk
from async_grpo.weights.folder.objects import Objects
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.wire import decode, encode
from async_grpo.wire.records import Record

OBJECT_KINDS = ("version", "changes", "dense")
_DIGEST_BYTES = 16
_CHUNKS_PER_WINDOW = 4
"""Size of a read, in chunks. Patches are small, so one read serves many of them."""

R = TypeVar("R", bound=msgspec.Struct)


class Head(Record, frozen=True, kw_only=True, tag="folder_head"):
    """The newest version of an epoch; None before the first. `beat` rises each time that it is written."""

    epoch: int
    version: int | None = None
    beat: int = 0

    @property
    def identity(self) -> WeightVersion | None:
        """(epoch, version); None before the first version."""
        return None if self.version is None else WeightVersion(self.epoch, self.version)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, stop) of a `.changes` object: one chunk, as a patch or dense."""

    start: int
    stop: int
    patch: bool


class VersionRecord(Record, frozen=True, kw_only=True, tag="folder_version"):
    """One version in the folder."""

    manifest: WeightManifest
    before: int | None
    """The version that `changes` applies to. None: there is only a dense object."""
    changes: dict[int, Entry]
    """Entries by chunk number. Other chunks are the same as in `before`."""
    dense: bool
    """True if there is a dense object."""


def epoch_folder(run: str, epoch: int) -> str:
    """Folder of one epoch."""
    return f"{run}/epoch-{epoch:06d}"


def object_name(folder: str, version: int, kind: str) -> str:
    """Name of a version's object; `kind` is one of OBJECT_KINDS."""
    return f"{folder}/{version:09d}.{kind}"


def encode_with_digest(record: Record) -> bytes:
    """Encode a record with its digest (xxh3_128), so that damage is detected."""
    packed = encode(record)
    return xxhash.xxh3_128_digest(packed) + packed


def decode_with_digest(sealed: bytes, kind: type[R], name: str) -> R:
    """Decode the result of `encode_with_digest`. Raises WeightsCorrupt if it is damaged or of another release."""
    packed = sealed[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(packed) != sealed[:_DIGEST_BYTES]:
        raise WeightsCorrupt(f"{name} failed its hash: it is damaged or truncated ({len(sealed)} bytes).")
    try:
        return decode(packed, kind)
    except WireError as error:
        raise WeightsCorrupt(f"{name} was written by another release: {error}") from error


class Chain:
    """The records from the newest version back to one that the receiver has, or to a dense one."""

    def __init__(self, objects: Objects, folder: str, links: Sequence[VersionRecord], *, reaches_base: bool) -> None:
        """`links` are sorted newest first. `reaches_base`: the last applies to the version that the receiver has."""
        self.newest = links[0]
        self.reaches_base = reaches_base
        self._objects = objects
        self._folder = folder
        self._links = links
        self._window_bytes = _CHUNKS_PER_WINDOW * self.newest.manifest.chunk_bytes
        self._windows: dict[tuple[str, int], Future[bytes]] = {}
        """Cached reads by object name and window number, oldest first."""
        self._max_windows = 2 * len(links) + 16
        self._lock = threading.Lock()
        self.read_bytes = 0

    @classmethod
    def read_links(cls, objects: Objects, folder: str, newest: WeightVersion, base: WeightVersion | None) -> Chain:
        """Read the records from `newest` back to `base`, the version that the receiver has, or to a dense one.

        Raises FileNotFoundError if a record was removed, WeightsCorrupt if one is damaged.
        """
        links: list[VersionRecord] = []
        version: int | None = newest.version
        reaches_base = False
        while version is not None:
            name = object_name(folder, version, "version")
            link = decode_with_digest(objects.read(name), VersionRecord, name)
            if link.manifest.identity != (newest.epoch, version):
                raise WeightsCorrupt(f"{name} is the record of another version, {link.manifest.identity}.")
            links.append(link)
            reaches_base = base is not None and base == (newest.epoch, link.before)
            version = None if reaches_base or link.dense else link.before
        return cls(objects, folder, links, reaches_base=reaches_base)

    def read_chunk(self, index: int, chunk: Chunk, read_base: Callable[[], bytearray] | None) -> bytearray:
        """Build chunk `index`. The caller checks its hash.

        `read_base` returns the chunk of the version that the receiver has; None: use the folder only. Raises
        FileNotFoundError if the folder alone does not suffice, and WeightsCorrupt for a patch that cannot be applied.
        """
        patches: list[bytes] = []
        for link in self._links:
            entry = link.changes.get(index)
            if entry is not None and not entry.patch:
                return _apply_patches(bytearray(self._read_entry(link, entry)), patches)
            if read_base is None and link.dense:
                name = object_name(self._folder, link.manifest.version, "dense")
                return _apply_patches(bytearray(self._read(name, chunk.start, chunk.stop)), patches)
            if entry is not None:
                patches.append(self._read_entry(link, entry))

        if read_base is None:
            oldest = self._links[-1].manifest.identity
            raise FileNotFoundError(f"the chain of {self.newest.manifest.identity} ends at {oldest}, without a base")
        return _apply_patches(read_base(), patches)

    def _read_entry(self, link: VersionRecord, entry: Entry) -> bytes:
        return self._read(object_name(self._folder, link.manifest.version, "changes"), entry.start, entry.stop)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        first = start // self._window_bytes
        last = -(-stop // self._window_bytes)
        data = b"".join(self._read_window(name, number) for number in range(first, last))
        skipped = first * self._window_bytes
        return data[start - skipped : stop - skipped]

    def _read_window(self, name: str, number: int) -> bytes:
        """Read one window of an object. Threads that need the same window share one read."""
        key = (name, number)
        with self._lock:
            shared_read = self._windows.get(key)
            if shared_read is None:
                own_read: Future[bytes] = Future()
                self._windows[key] = own_read
                while len(self._windows) > self._max_windows:
                    del self._windows[next(iter(self._windows))]
        if shared_read is not None:
            return shared_read.result()

        try:
            start = number * self._window_bytes
            data = self._objects.read(name, start, start + self._window_bytes)
        except BaseException as error:
            own_read.set_exception(error)
            raise
        with self._lock:
            self.read_bytes += len(data)
        own_read.set_result(data)
        return data


def _apply_patches(block: bytearray, newest_first: list[bytes]) -> bytearray:
    """Apply patches in place, the oldest first."""
    for patch in reversed(newest_first):
        delta.apply_patch(memoryview(block), patch)
    return block

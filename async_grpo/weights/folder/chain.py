"""What lies in the folder of a run, and how a chunk of a version is made of it.

    NAME/epoch-000002/head                 the newest version, and a number that rises while the trainer lives
                      000000017.version    VersionRecord: manifest, and what the two next objects hold
                      000000017.changes    every chunk that differs from version 16: a patch, or the whole chunk
                      000000017.dense      the whole block; only of some versions
                      wanted/RECEIVER      this receiver has lost a link of the chain: write a dense version

    dense 10 <-- changes 11 <-- changes 12 <-- ... <-- changes 17

Everything that a record names is written before it, and the head last. So whoever finds a version finds all of it,
unless it was removed or damaged meanwhile. A chunk is the patches from the newest version back to one that the
receiver holds, or else back to the first whole chunk; its hash in the newest manifest proves the result.
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
_CHUNKS_IN_A_WINDOW = 4

R = TypeVar("R", bound=msgspec.Struct)


class Head(Record, frozen=True, kw_only=True, tag="folder_head"):
    """The newest version of an epoch; None before the first. `beat` differs each time that it is written."""

    epoch: int
    version: int | None = None
    beat: int = 0

    @property
    def identity(self) -> WeightVersion | None:
        """(epoch, version) if there is a version."""
        return None if self.version is None else WeightVersion(self.epoch, self.version)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A chunk in the object of changes: its bytes [start, stop), and whether they are a patch."""

    start: int
    stop: int
    patch: bool


class VersionRecord(Record, frozen=True, kw_only=True, tag="folder_version"):
    """One version in the folder."""

    manifest: WeightManifest
    before: int | None
    """The version that `changes` builds on; None: there are no changes, only a dense object."""
    changes: dict[int, Entry]
    """By number of the chunk; a chunk that is missing is that of `before`."""
    dense: bool
    """Whether there is a dense object."""


def epoch_folder(run: str, epoch: int) -> str:
    """The folder of one epoch."""
    return f"{run}/epoch-{epoch:06d}"


def object_name(folder: str, version: int, kind: str) -> str:
    """The name of a version's object; `kind` is one of OBJECT_KINDS."""
    return f"{folder}/{version:09d}.{kind}"


def encode_with_digest(record: Record) -> bytes:
    """The record with its digest (xxh3_128), which tells a damaged one."""
    packed = encode(record)
    return xxhash.xxh3_128_digest(packed) + packed


def decode_with_digest(sealed: bytes, kind: type[R], name: str) -> R:
    """The inverse of `encode_with_digest`. Raises WeightsCorrupt."""
    packed = sealed[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(packed) != sealed[:_DIGEST_BYTES]:
        raise WeightsCorrupt(f"{name} failed its hash: it is damaged or cut short ({len(sealed)} bytes).")
    try:
        return decode(packed, kind)
    except WireError as error:
        raise WeightsCorrupt(f"{name} is of another release: {error}") from error


class Chain:
    """The links from one version back to one that a receiver holds, or to a dense one."""

    def __init__(self, objects: Objects, folder: str, links: Sequence[VersionRecord], *, reaches_base: bool) -> None:
        """`links`: newest first; `reaches_base`: the last one builds on the version that the receiver holds. Objects
        are read in pieces, each of which serves many patches."""
        self.newest = links[0]
        self._objects = objects
        self._folder = folder
        self._links = links
        self.reaches_base = reaches_base
        self._window_bytes = _CHUNKS_IN_A_WINDOW * self.newest.manifest.chunk_bytes
        self._windows: dict[tuple[str, int], Future[bytes]] = {}
        self._kept = 2 * len(links) + 16
        self._lock = threading.Lock()
        self.read_bytes = 0

    @classmethod
    def read_links(cls, objects: Objects, folder: str, newest: WeightVersion, held: WeightVersion | None) -> Chain:
        """Read the records. Raises FileNotFoundError if a link was removed, WeightsCorrupt if one is damaged."""
        links: list[VersionRecord] = []
        version: int | None = newest.version
        reaches_base = False
        while version is not None:
            name = object_name(folder, version, "version")
            link = decode_with_digest(objects.read(name), VersionRecord, name)
            if link.manifest.identity != (newest.epoch, version):
                raise WeightsCorrupt(f"{name} failed its hash: it describes {link.manifest.identity}.")
            links.append(link)
            reaches_base = held is not None and held == (newest.epoch, link.before)
            version = None if reaches_base or link.dense else link.before
        return cls(objects, folder, links, reaches_base=reaches_base)

    def read_chunk(self, index: int, place: Chunk, held: Callable[[], bytearray] | None) -> bytearray:
        """Chunk `index`, to be checked by its hash. `held` gives it as in the version that the receiver holds; None:
        make it of what is in the folder alone.

        Raises FileNotFoundError if that does not suffice, and WeightsCorrupt for a patch that cannot be applied.
        """
        patches: list[bytes] = []
        for link in self._links:
            entry = link.changes.get(index)
            if entry is not None and not entry.patch:
                return self._patched(bytearray(self._entry(link, entry)), patches)
            if held is None and link.dense:
                name = object_name(self._folder, link.manifest.version, "dense")
                return self._patched(bytearray(self._read(name, place.start, place.stop)), patches)
            if entry is not None:
                patches.append(self._entry(link, entry))
        if held is None:
            oldest = self._links[-1].manifest.identity
            raise FileNotFoundError(f"the chain of {self.newest.manifest.identity} ends at {oldest}, without a base")
        return self._patched(held(), patches)

    @staticmethod
    def _patched(block: bytearray, patches: list[bytes]) -> bytearray:
        for patch in reversed(patches):
            delta.apply_patch(memoryview(block), patch)
        return block

    def _entry(self, link: VersionRecord, entry: Entry) -> bytes:
        return self._read(object_name(self._folder, link.manifest.version, "changes"), entry.start, entry.stop)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        first, last = start // self._window_bytes, -(-stop // self._window_bytes)
        data = b"".join(self._window(name, number) for number in range(first, last))
        skipped = first * self._window_bytes
        return data[start - skipped : stop - skipped]

    def _window(self, name: str, number: int) -> bytes:
        """One piece of an object; threads that want the same piece share one request."""
        key = (name, number)
        with self._lock:
            known = self._windows.get(key)
            if known is None:
                asked: Future[bytes] = Future()
                self._windows[key] = asked
                while len(self._windows) > self._kept:
                    del self._windows[next(iter(self._windows))]
        if known is not None:
            return known.result()
        try:
            start = number * self._window_bytes
            data = self._objects.read(name, start, start + self._window_bytes)
        except BaseException as error:
            asked.set_exception(error)
            raise
        with self._lock:
            self.read_bytes += len(data)
        asked.set_result(data)
        return data

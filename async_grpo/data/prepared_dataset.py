"""A prepared data set on disk: a folder that is read through the page cache, in constant memory.

    prepared.json           what this is: magic, format, how it was made, counts, sizes and checksums of the files
    train.tokens            token ids of all prompts, one after the other: int32, little-endian
    train.index             N + 1 pairs (first token, first byte of the record): uint64, little-endian
    train.records           one MessagePack map a row: prompt, answer, metadata
    held_out.*              the same for the rows that are held out
    rejected.jsonl          the rows that were not taken: file, line, reason

Every binary file begins with 16 bytes: the magic `AGRPODAT`, the format (uint16), its kind (uint16), 4 zeros. Row i
has the tokens [first token of pair i, first token of pair i + 1), and its record likewise. Nothing is ever pickled.

`prepared.json` is written last, and the folder gets its name when all of it is on the disk. So a folder with its final
name is complete. Opening it checks the size and the checksum of every file once.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from async_grpo.errors import DataError
from async_grpo.utils.files import sync, write_atomic

MANIFEST = "prepared.json"
REJECTED = "rejected.jsonl"
MAGIC = "async-grpo prepared data"
FORMAT = 1
"""Raised by one when an older reader would misunderstand a file."""

FILE_MAGIC = b"AGRPODAT"
_HEAD = struct.Struct("<8sHH4x")
_PAIR = struct.Struct("<QQ")
_TWO_PAIRS = struct.Struct("<QQQQ")
TRAIN, HELD_OUT = "train", "held_out"
_PARTS = ("tokens", "index", "records")
_TOKEN_BYTES = 4
_MAX_MANIFEST_BYTES = 1 << 20


class FileFacts(msgspec.Struct, frozen=True):
    """Size and checksum that a file of the folder must have."""

    bytes: int
    xxh3: str
    """128-bit xxh3, in hexadecimal digits."""


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `prepared.json`."""

    magic: str
    format: int
    rows: dict[str, int]
    """Number of rows by split: `train`, `held_out`."""
    longest_prompt_tokens: int
    special_tokens: bool
    """Whether the tokenizer added its special tokens to the prompts."""
    rejected: dict[str, int]
    """Number of rejected rows, by reason."""
    recipe: dict[str, Any]
    """The settings of the `prepare` that made the folder."""
    files: dict[str, FileFacts]


class StoredRow(msgspec.Struct, frozen=True):
    """The content of a record. `prompt` is the text whose tokens are stored."""

    prompt: str
    answer: str
    metadata: dict[str, str] = {}


class _HashedFile:
    """Writes a new file, and knows its size and checksum when it is closed."""

    def __init__(self, path: Path, kind: int) -> None:
        self._path = path
        self._file = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self.write(_HEAD.pack(FILE_MAGIC, FORMAT, kind))

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def close(self) -> FileFacts:
        """Sync the file to the disk and close it. Returns its size and checksum."""
        self._file.close()
        sync(self._path)
        return FileFacts(self._size, self._hash.hexdigest())


class SplitWriter:
    """Writes the rows of one split, in order, into three files of `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._name = name
        self._files = {part: _HashedFile(folder / f"{name}.{part}", kind) for kind, part in enumerate(_PARTS)}
        self._tokens = self._bytes = 0
        self.rows = self.longest = 0
        self._mark()

    def add(self, tokens: bytes, record: bytes) -> None:
        """Append a row: token ids as int32, little-endian, and its StoredRow in MessagePack."""
        self._files["tokens"].write(tokens)
        self._files["records"].write(record)
        self._tokens += len(tokens) // _TOKEN_BYTES
        self._bytes += len(record)
        self.rows += 1
        self.longest = max(self.longest, len(tokens) // _TOKEN_BYTES)
        self._mark()

    def close(self) -> dict[str, FileFacts]:
        """Sync and close the files. Returns size and checksum by file name."""
        return {f"{self._name}.{part}": file.close() for part, file in self._files.items()}

    def _mark(self) -> None:
        self._files["index"].write(_PAIR.pack(self._tokens, self._bytes))


class DatasetSplit:
    """The rows of one split, in files mapped into memory: rows that are not read take no memory."""

    def __init__(self, folder: Path, name: str) -> None:
        self._maps = [_map(folder / f"{name}.{part}", kind) for kind, part in enumerate(_PARTS)]
        self._tokens, self._index, self._records = self._maps
        self._decode = msgspec.msgpack.Decoder(StoredRow).decode
        self._rows = (len(self._index) - _HEAD.size) // _PAIR.size - 1

    def __len__(self) -> int:
        return self._rows

    def stored(self, row: int) -> tuple[bytes, bytes]:
        """Token ids of row `row` (from 0) as int32, little-endian, and its record in MessagePack."""
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} is not in range({self._rows})")
        first, record, end, record_end = _TWO_PAIRS.unpack_from(self._index, _HEAD.size + row * _PAIR.size)
        tokens = self._tokens[_HEAD.size + first * _TOKEN_BYTES : _HEAD.size + end * _TOKEN_BYTES]
        return tokens, self._records[_HEAD.size + record : _HEAD.size + record_end]

    def row(self, row: int) -> tuple[bytes, StoredRow]:
        """Like `stored`, with the record decoded."""
        tokens, record = self.stored(row)
        return tokens, self._decode(record)

    def close(self) -> None:
        """Unmap the files."""
        for mapped in self._maps:
            mapped.close()


def remove_split(folder: Path, name: str) -> None:
    """Remove the three files of a split."""
    for part in _PARTS:
        (folder / f"{name}.{part}").unlink()


@dataclass(frozen=True, slots=True)
class PreparedSet:
    """A prepared folder whose files have been checked."""

    manifest: DatasetManifest
    train: DatasetSplit
    held_out: DatasetSplit

    def close(self) -> None:
        """Unmap the files."""
        self.train.close()
        self.held_out.close()


def open_prepared(folder: Path) -> PreparedSet:
    """Check every file of a prepared folder and map it. Raises DataError with the file and what is wrong with it."""
    manifest = read_manifest(folder)
    for name, facts in manifest.files.items():
        _check_file(folder / name, facts)
    train, held_out = (DatasetSplit(folder, name) for name in (TRAIN, HELD_OUT))
    if (len(train), len(held_out)) != (manifest.rows[TRAIN], manifest.rows[HELD_OUT]):
        raise _damaged(folder / MANIFEST, f"it counts {manifest.rows}, the files {len(train)} and {len(held_out)} rows")
    return PreparedSet(manifest, train, held_out)


def read_manifest(folder: Path) -> DatasetManifest:
    """The checked content of `prepared.json`. Raises DataError if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES)
    except OSError as error:
        raise DataError(
            f"{folder} has no {MANIFEST} that can be read ({error.strerror}), so `async-grpo prepare` has not made it. "
            "Name a folder that it has made, or a JSON-lines file"
        ) from error
    try:
        head = msgspec.json.decode(data, type=dict[str, Any])
        if head.get("magic") != MAGIC or head.get("format") != FORMAT:
            raise DataError(
                f"{path} is {head.get('magic')!r} of format {head.get('format')!r}; this version reads {MAGIC!r} of "
                f"format {FORMAT}. Prepare the data again with this version"
            )
        manifest = msgspec.convert(head, DatasetManifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    expected = {f"{split}.{part}" for split in (TRAIN, HELD_OUT) for part in _PARTS}
    if set(manifest.files) != expected or set(manifest.rows) != {TRAIN, HELD_OUT}:
        raise _damaged(path, f"it names the files {', '.join(manifest.files) or 'none'}")
    return manifest


def write_manifest(folder: Path, manifest: DatasetManifest) -> None:
    """Write `prepared.json`, the last of all files, and sync it."""
    write_atomic(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n", synced=True)


def _check_file(path: Path, facts: FileFacts) -> None:
    try:
        size = path.stat().st_size
        if size != facts.bytes:
            raise _damaged(path, f"it has {size} bytes, and had {facts.bytes}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error
    if found != facts.xxh3:
        raise _damaged(path, f"its checksum is {found}, and was {facts.xxh3}")


def _map(path: Path, kind: int) -> mmap.mmap:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if _HEAD.unpack_from(mapped) != (FILE_MAGIC, FORMAT, kind):
        raise _damaged(path, f"it begins with {mapped[: _HEAD.size]!r}")
    return mapped


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}, so the prepared data are damaged. Prepare them again, or copy them again")

"""A prepared data set on disk: a folder that is read through the page cache, in constant memory.

    prepared.json           magic, format, the settings that made it, counts, sizes and checksums of the files
    train.tokens            token ids of all prompts, one after the other: int32, little-endian
    train.index             N + 1 pairs (first token, first byte of the record): uint64, little-endian
    train.records           one MessagePack map per row: prompt, answer, metadata
    held_out.*              the same for the held-out rows
    rejected.jsonl          the rejected rows: file, line, reason

Every binary file starts with 16 bytes: the magic `AGRPODAT`, the format (uint16), its kind (uint16), 4 zeros. Row i has
the tokens [first token of pair i, first token of pair i + 1), and its record likewise. Nothing is ever pickled.

`prepared.json` is written last, and the folder gets its name when all of it is on disk. So a folder with its final name
is complete. Opening it checks the size and checksum of every file once.
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
"""Increment when an older reader would misunderstand a file."""

FILE_MAGIC = b"AGRPODAT"
_HEADER = struct.Struct("<8sHH4x")
_PAIR = struct.Struct("<QQ")
_TWO_PAIRS = struct.Struct("<QQQQ")
TRAIN = "train"
HELD_OUT = "held_out"
_PARTS = ("tokens", "index", "records")
_TOKEN_BYTES = 4
_MAX_MANIFEST_BYTES = 1 << 20


class FileFacts(msgspec.Struct, frozen=True):
    """Size and checksum that a file of the folder must have."""

    bytes: int
    xxh3: str
    """128-bit xxh3 in hexadecimal."""


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `prepared.json`."""

    magic: str
    format: int
    rows: dict[str, int]
    """Number of rows by split: `train`, `held_out`."""
    longest_prompt_tokens: int
    special_tokens: bool
    """True if the tokenizer added its special tokens to the prompts."""
    rejected: dict[str, int]
    """Number of rejected rows, by reason."""
    recipe: dict[str, Any]
    """Settings of `async-grpo prepare` that made the folder."""
    files: dict[str, FileFacts]


class StoredRow(msgspec.Struct, frozen=True):
    """Content of a record. `prompt` is the text whose tokens are stored."""

    prompt: str
    answer: str
    metadata: dict[str, str] = {}


class _HashedFile:
    """A new file that records its size and checksum while it is written."""

    def __init__(self, path: Path, kind: int) -> None:
        self._path = path
        self._file = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self.write(_HEADER.pack(FILE_MAGIC, FORMAT, kind))

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def close(self) -> FileFacts:
        """Close the file and sync it to disk. Returns its size and checksum."""
        self._file.close()
        sync(self._path)
        return FileFacts(self._size, self._hash.hexdigest())


class SplitWriter:
    """Writes the rows of one split, in order, into three files of `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._name = name
        self._files = {part: _HashedFile(folder / f"{name}.{part}", kind) for kind, part in enumerate(_PARTS)}
        self._written_tokens = 0
        self._record_bytes = 0
        self.rows = 0
        self.longest_tokens = 0
        """Tokens of the longest prompt."""
        self._write_index_pair()

    def add_row(self, tokens: bytes, record: bytes) -> None:
        """Append a row: token ids as int32, little-endian, and its StoredRow in MessagePack."""
        count = len(tokens) // _TOKEN_BYTES
        self._files["tokens"].write(tokens)
        self._files["records"].write(record)
        self._written_tokens += count
        self._record_bytes += len(record)
        self.rows += 1
        self.longest_tokens = max(self.longest_tokens, count)
        self._write_index_pair()

    def close(self) -> dict[str, FileFacts]:
        """Close the files and sync them to disk. Returns size and checksum by file name."""
        return {f"{self._name}.{part}": file.close() for part, file in self._files.items()}

    def _write_index_pair(self) -> None:
        self._files["index"].write(_PAIR.pack(self._written_tokens, self._record_bytes))


class DatasetSplit:
    """The rows of one split, in memory-mapped files: rows that are not read take no memory."""

    def __init__(self, folder: Path, name: str) -> None:
        self._maps = [_map_file(folder / f"{name}.{part}", kind) for kind, part in enumerate(_PARTS)]
        self._tokens, self._index, self._records = self._maps
        self._decode = msgspec.msgpack.Decoder(StoredRow).decode
        self._rows = (len(self._index) - _HEADER.size) // _PAIR.size - 1

    def __len__(self) -> int:
        return self._rows

    def read_stored(self, row: int) -> tuple[bytes, bytes]:
        """Return the token ids of row `row` (from 0) as int32, little-endian, and its record in MessagePack."""
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} is not in range({self._rows})")
        pairs_offset = _HEADER.size + row * _PAIR.size
        token_start, record_start, token_end, record_end = _TWO_PAIRS.unpack_from(self._index, pairs_offset)
        tokens = self._tokens[_HEADER.size + token_start * _TOKEN_BYTES : _HEADER.size + token_end * _TOKEN_BYTES]
        record = self._records[_HEADER.size + record_start : _HEADER.size + record_end]
        return tokens, record

    def read_row(self, row: int) -> tuple[bytes, StoredRow]:
        """Return the token ids of row `row` (from 0) as int32, little-endian, and its decoded record."""
        tokens, record = self.read_stored(row)
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
    """A prepared folder with verified files."""

    manifest: DatasetManifest
    train: DatasetSplit
    held_out: DatasetSplit

    def close(self) -> None:
        """Unmap the files."""
        self.train.close()
        self.held_out.close()


def open_prepared_folder(folder: Path) -> PreparedSet:
    """Check every file of a prepared folder and map it. Raises DataError with the damaged file and the problem."""
    manifest = read_dataset_manifest(folder)
    for name, facts in manifest.files.items():
        _check_file(folder / name, facts)
    train = DatasetSplit(folder, TRAIN)
    held_out = DatasetSplit(folder, HELD_OUT)
    if (len(train), len(held_out)) != (manifest.rows[TRAIN], manifest.rows[HELD_OUT]):
        problem = f"it counts {manifest.rows} rows, and the files have {len(train)} and {len(held_out)}"
        raise _damage_error(folder / MANIFEST, problem)
    return PreparedSet(manifest, train, held_out)


def read_dataset_manifest(folder: Path) -> DatasetManifest:
    """Read and check `prepared.json`. Raises DataError if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES)
    except OSError as error:
        raise DataError(
            f"{folder} has no readable {MANIFEST} ({error.strerror}), so it was not made by `async-grpo prepare`. Name "
            "a folder that was, or a JSON-lines file"
        ) from error

    try:
        # Check magic and format first: another format may not fit the type.
        content = msgspec.json.decode(data, type=dict[str, Any])
        if content.get("magic") != MAGIC or content.get("format") != FORMAT:
            raise DataError(
                f"{path} is {content.get('magic')!r} of format {content.get('format')!r}; this version reads {MAGIC!r} "
                f"of format {FORMAT}. Prepare the data again with this version"
            )
        manifest = msgspec.convert(content, DatasetManifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damage_error(path, str(error)) from error

    expected_files = {f"{split}.{part}" for split in (TRAIN, HELD_OUT) for part in _PARTS}
    if set(manifest.files) != expected_files or set(manifest.rows) != {TRAIN, HELD_OUT}:
        raise _damage_error(path, f"it lists the files {', '.join(manifest.files) or 'none'}")
    return manifest


def write_dataset_manifest(folder: Path, manifest: DatasetManifest) -> None:
    """Write `prepared.json` and sync it to disk. Call after all other files are written."""
    write_atomic(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n", synced=True)


def _check_file(path: Path, facts: FileFacts) -> None:
    try:
        size = path.stat().st_size
        if size != facts.bytes:
            raise _damage_error(path, f"it has {size} bytes instead of {facts.bytes}")
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise _damage_error(path, f"it cannot be read ({error.strerror})") from error
    if checksum != facts.xxh3:
        raise _damage_error(path, f"its checksum is {checksum} instead of {facts.xxh3}")


def _map_file(path: Path, kind: int) -> mmap.mmap:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if _HEADER.unpack_from(mapped) != (FILE_MAGIC, FORMAT, kind):
        raise _damage_error(path, f"it starts with {mapped[: _HEADER.size]!r}")
    return mapped


def _damage_error(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: {problem}, so the prepared data are damaged. Prepare them again, or copy them again")

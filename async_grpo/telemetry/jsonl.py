"""JSON-lines files that survive a crash: one row per line, flushed. A torn last line does not affect other rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec


class JsonLines:
    """Appends rows to `path`, creating it and its folder.

    When `write` returns, the operating system has the row, so it survives a crash of this process. A line that an
    earlier writer left unfinished is terminated first, so that the next row starts on a new line. Non-finite floats
    become null. Threads may share the file: rows do not interleave.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(path)
        self._file = path.open("ab")
        if torn:
            self._file.write(b"\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._file.write(_line(row) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


HEAD_BYTES = 512
"""Number of bytes at the start of a followed file that identify it. The first row of every file contains a time, so
that two files differ there."""


class RowFollower:
    """Reads a file that another process appends to. Each row is returned once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read_bytes = 0
        """Bytes of the lines that have been read."""
        self._head = b""

    def is_replaced(self) -> bool:
        """True if the path no longer holds the file that was read: it is missing, shorter, or starts differently.

        Comparing inodes is not enough: a file system may reuse the inode of a deleted file. Comparing sizes is not
        enough either: the new file may have outgrown the old one between two reads.
        """
        if self.read_bytes == 0:
            return False
        try:
            with self._path.open("rb") as file:
                head = file.read(len(self._head))
                size = file.seek(0, 2)
        except FileNotFoundError:
            return True
        return head != self._head or size < self.read_bytes

    def unread_bytes(self) -> int:
        """Number of bytes not yet read, including an unfinished line; negative if the file has become shorter."""
        size = self._path.stat().st_size if self._path.exists() else 0
        return size - self.read_bytes

    def read_new_rows(self, max_bytes: int = -1) -> list[dict[str, Any]]:
        """Return the complete rows since the last call. An unfinished line is returned by a later call."""
        return list(parse_rows(self.read_new_lines(max_bytes)))

    def read_new_lines(self, max_bytes: int = -1) -> list[bytes]:
        """Return the complete lines since the last call, with their line ends.

        `max_bytes` limits the call, and later calls return the rest; a single longer line is still returned complete.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self.read_bytes)
            written = file.read(max_bytes)
            if len(written) == max_bytes and b"\n" not in written:
                written += file.readline()
        complete = written[: written.rfind(b"\n") + 1]
        if self.read_bytes == 0:
            self._head = complete[:HEAD_BYTES]
        self.read_bytes += len(complete)
        return complete.splitlines(keepends=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all complete rows; [] without a file. Lines that are not JSON objects (torn by a crash) are skipped."""
    return list(iter_rows(path))


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `read_rows` one at a time, because sample files may be larger than the memory."""
    if path.exists():
        with path.open("rb") as lines:
            yield from parse_rows(lines)


_decode = msgspec.json.Decoder().decode
"""Three times as fast as the json module, which matters for runs with 100,000 steps."""


def parse_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects; others are skipped."""
    for line in lines:
        try:
            row = _decode(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(row)  # fifty times faster than json; a row of samples has thousands of tokens
    except (TypeError, ValueError):  # numpy scalars, lone surrogates
        return json.dumps(_plain(row), ensure_ascii=False).encode()


def _ends_torn(path: Path) -> bool:
    """True if the last line has no line end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """Convert a value to JSON types: numpy scalars to numbers, non-finite floats to null, lone surrogates to "?"."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return _plain(value.item()) if hasattr(value, "item") else str(value)

"""JSON-lines files that survive a crash: one row on each line, flushed; a torn last line does not affect others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec


class JsonLines:
    """Appends rows to `path`, creating it and its folder.

    When `write` returns, the operating system has the row, so it survives the death of this process. A line that an
    earlier writer left unfinished is ended first, so that the next row starts on a new line. Non-finite floats become
    null. Threads may share the file: each row is written whole.
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
"""Bytes at the beginning of a followed file that must stay as they were. The first row of every file has its time."""


class RowFollower:
    """Reads a file that another process appends to, each row once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read_bytes = 0
        """Bytes of the lines that have been read."""
        self._head = b""

    def is_replaced(self) -> bool:
        """True if the path no longer holds the file whose lines were read: it is gone, shorter, or begins differently.

        The inode would not do: a file system may give a new file that of the one deleted before it. Neither would the
        size: the new file may have outgrown the old one between two readings.
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
        """Bytes not yet read, including those of an unfinished line; negative if the file has become shorter."""
        return (self._path.stat().st_size if self._path.exists() else 0) - self.read_bytes

    def new_rows(self, most_bytes: int = -1) -> list[dict[str, Any]]:
        """Whole rows since the last call; a line that is still being written comes with a later call."""
        return list(parse_rows(self.new_lines(most_bytes)))

    def new_lines(self, most_bytes: int = -1) -> list[bytes]:
        """The lines of those rows, each with its end. With `most_bytes`, further ones come with the next call; a line
        that is longer comes whole."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self.read_bytes)
            written = file.read(most_bytes)
            if len(written) == most_bytes and b"\n" not in written:
                written += file.readline()
        whole = written[: written.rfind(b"\n") + 1]
        if self.read_bytes == 0:
            self._head = whole[:HEAD_BYTES]
        self.read_bytes += len(whole)
        return whole.splitlines(keepends=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows; lines that are not a JSON object (torn by a crash) are skipped. [] without a file."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of `read_rows` one at a time, because sample files may be larger than the memory."""
    if path.exists():
        with path.open("rb") as lines:
            yield from parse_rows(lines)


_decode = msgspec.json.Decoder().decode
"""Three times as fast as the json module, which matters for runs of 100,000 steps."""


def parse_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines; others are skipped."""
    for line in lines:
        try:
            row = _decode(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(row)  # fifty times faster: a row of samples has thousands of tokens
    except (TypeError, ValueError):  # numpy scalars, lone surrogates
        return json.dumps(_plain(row), ensure_ascii=False).encode()


def _ends_torn(path: Path) -> bool:
    """Whether the last line lacks its end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: numpy scalars as numbers, non-finite floats as null, lone surrogates replaced."""
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

"""Reads rows of published data files: JSON lines, one JSON array, Parquet. Memory is constant for any file size.

    file --> RawRow(line, fields) | RawRow(line, problem)

An unreadable row is yielded with its problem, and reading continues with the next row. DataError ends reading where the
rest cannot be trusted: an array that breaks off, a damaged Parquet file.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.errors import DataError, DependencyError

MAX_ROW_BYTES = 16 << 20
"""Longer rows are rejected, so that memory does not depend on the file."""
_CHUNK_BYTES = 1 << 20
_PARQUET_BATCH_ROWS = 1024
_WHITE_SPACE = " \t\r\n"
_MAX_SHOWN = 200
"""Length to which texts are cut in problems."""

_KINDS = (
    (b"PAR1", "parquet"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"PK\x03\x04", "a zip file"),
    (b"AGRPODAT", "a part of a prepared folder"),
)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row: its fields, or its problem."""

    line: int
    """Line where it starts, from 1; in Parquet the number of the row."""
    position: int
    """Bytes of the file up to the end of the row; an estimate for Parquet."""
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Reason why it cannot be read; "" if it can."""
    shown: str = ""
    """Beginning of the text of a row with a problem."""


def detect_kind(path: Path) -> str:
    """Return `jsonl`, `json` (an array), `parquet`, or a description of another kind.

    Raises DataError if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Name a data file that exists") from error
    for magic, kind in _KINDS:
        if head.startswith(magic):
            return kind
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    return "json" if text.startswith(b"[") else "jsonl"


def read_raw_rows(path: Path) -> Iterator[RawRow]:
    """Yield every row that is not blank. Raises DataError; DependencyError for Parquet without pyarrow."""
    kind = detect_kind(path)
    if kind == "parquet":
        return _read_parquet(path)
    if kind == "json":
        return _read_array(path)
    if kind == "jsonl":
        return read_jsonl_rows(path)
    raise DataError(f"{path} is {kind}, not JSON lines, a JSON array or Parquet. Unpack it, or name another file")


def read_jsonl_rows(path: Path) -> Iterator[RawRow]:
    """Yield every row of a JSON-lines file that is not blank."""
    with path.open("rb") as file:
        position = 0
        line = 0
        while data := file.readline(MAX_ROW_BYTES + 1):
            line += 1
            position += len(data)
            if len(data) > MAX_ROW_BYTES:
                position += _skip_line(file, data)
                yield RawRow(line, position, problem=f"above {MAX_ROW_BYTES} bytes", shown=_shorten(data))
                continue
            if line == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            data = data.strip()
            if data:
                yield _parse_line(line, position, data)


def _skip_line(file: BinaryIO, data: bytes) -> int:
    """Read to the end of the line that starts with `data`. Returns the number of bytes read."""
    skipped = 0
    while data and not data.endswith(b"\n"):
        data = file.readline(_CHUNK_BYTES)
        skipped += len(data)
    return skipped


def _parse_line(line: int, position: int, data: bytes) -> RawRow:
    try:
        return _make_row(line, position, _DECODER.decode(data.decode()))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 ({error.reason} at byte {error.start})"
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({_describe(error)})"
    return RawRow(line, position, problem=problem, shown=_shorten(data))


def _make_row(line: int, position: int, value: Any) -> RawRow:
    if isinstance(value, dict):
        return RawRow(line, position, value)
    problem = f"not an object but a {type(value).__name__}"
    return RawRow(line, position, problem=problem, shown=str(value)[:_MAX_SHOWN])


class _ArrayText:
    """Text of a JSON array, with a current position. Only the part around the position is in memory.

    file --_read_chunk--> [ text before the position | position: peek, skip, read_value | rest of the chunk ]
                            dropped at the next chunk
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.line = 1
        """Line of the current position, from 1."""
        self.read_bytes = 0
        """Bytes read from the file."""
        self._text = ""
        self._index = 0
        """Current position in `_text`."""
        self._at_end = False
        """True if the whole file has been read."""

    def peek(self) -> str:
        """Move to the next character that is not white space and return it; "" at the end."""
        while True:
            while self._index < len(self._text) and self._text[self._index] in _WHITE_SPACE:
                if self._text[self._index] == "\n":
                    self.line += 1
                self._index += 1
            if self._index < len(self._text):
                return self._text[self._index]
            if not self._read_chunk():
                return ""

    def skip(self) -> None:
        """Skip the character that `peek` returned."""
        self._index += 1

    def read_value(self) -> Any:
        """Read the next JSON value. Raises DataError if it is invalid, breaks off or is too large.

        If the text in memory ends within the value, parse again with twice as much text. So the total work for a large
        value is about twice its size.
        """
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._index)
            except (ValueError, RecursionError) as error:
                available = len(self._text) - self._index
                if available > MAX_ROW_BYTES or isinstance(error, RecursionError) or not self._read_more(available):
                    raise self.error(f"no value that can be read ({_describe(error)})") from None
                continue
            # A number at the end of the text in memory may continue in the next chunk.
            if end == len(self._text) and self._read_chunk():
                continue
            self.line += self._text.count("\n", self._index, end)
            self._index = end
            return value

    def error(self, problem: str) -> DataError:
        """Create the error for a problem at the current line."""
        return DataError(
            f"{self._path}, line {self.line}: {problem}, so nothing after it can be trusted. Fix the file, or convert "
            "it to JSON lines, one object per line"
        )

    def _read_more(self, available: int) -> bool:
        """Read until there is more than twice the `available` text. Returns False at the end of the file."""
        has_grown = False
        while len(self._text) - self._index < 2 * available + 1 and self._read_chunk():
            has_grown = True
        return has_grown

    def _read_chunk(self) -> bool:
        """Read the next chunk and drop the text before the position. Returns False at the end of the file."""
        if self._at_end:
            return False
        data = self._file.read(_CHUNK_BYTES)
        self.read_bytes += len(data)
        self._at_end = not data
        try:
            self._text = self._text[self._index :] + self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self.error(f"bytes that are not UTF-8 ({error.reason})") from error
        self._index = 0
        return True


def _read_array(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        text = _ArrayText(path, file)
        text.peek()
        text.skip()  # the opening bracket, which `detect_kind` has checked
        if text.peek() == "]":
            return
        while True:
            text.peek()
            line = text.line
            value = text.read_value()
            yield _make_row(line, text.read_bytes, value)

            separator = text.peek()
            if separator not in ("]", ","):
                raise text.error(f"{separator!r} instead of a comma or the end of the array")
            text.skip()
            if separator == "]":
                return


def _read_parquet(path: Path) -> Iterator[RawRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DependencyError(
            f"{path} is a Parquet file, which needs pyarrow ({error}). Run: pip install 'async-grpo[parquet]', or "
            "convert the file to JSON lines"
        ) from error
    size = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            total_rows = max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield RawRow(number, size * number // total_rows, fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged Parquet file ({_describe(error)}). Fetch it again") from error


def _keep_number(text: str) -> str:
    """Keep a number as it is written: "18.0" is not 18, and long numbers are not rounded."""
    return text


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_int=_keep_number, parse_float=_keep_number, parse_constant=_refuse_constant)


def _shorten(data: bytes) -> str:
    return data[:_MAX_SHOWN].decode(errors="replace")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:_MAX_SHOWN]}"

"""Rows of published data files: JSON lines, one JSON array, Parquet. Memory is constant for any file.

    file --> RawRow(line, fields) | RawRow(line, problem)

A row that cannot be read comes with its problem, and the next row follows. Reading only ends with DataError where the
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
"""A longer row is rejected, so that memory does not depend on the file."""
_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 1024
_SPACE = " \t\r\n"
_SHOWN = 200

_KINDS = (
    (b"PAR1", "parquet"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"PK\x03\x04", "a zip file"),
    (b"AGRPODAT", "a part of a prepared folder"),
)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row: its fields, or what is wrong with it.

    line: where it begins, from 1; in Parquet the number of the row. position: bytes of the file up to the end of the
    row; for Parquet an estimate.
    """

    line: int
    position: int
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    shown: str = ""
    """The beginning of the text, for a row with a problem."""


def kind_of(path: Path) -> str:
    """`jsonl`, `json` (an array), `parquet`, or another kind in words. Raises DataError if it cannot be read."""
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


def read_rows(path: Path) -> Iterator[RawRow]:
    """Every row that is not blank. Raises DataError; DependencyError for Parquet without pyarrow."""
    kind = kind_of(path)
    if kind == "parquet":
        return _parquet(path)
    if kind == "json":
        return _array(path)
    if kind == "jsonl":
        return read_lines(path)
    raise DataError(f"{path} is {kind}, not JSON lines, a JSON array or Parquet. Unpack it, or name another file")


def read_lines(path: Path) -> Iterator[RawRow]:
    """Every row of a JSON-lines file that is not blank."""
    with path.open("rb") as file:
        position, line = 0, 0
        while data := file.readline(MAX_ROW_BYTES + 1):
            line += 1
            position += len(data)
            if len(data) > MAX_ROW_BYTES:
                position += _skip_line(file, data)
                yield RawRow(line, position, problem=f"above {MAX_ROW_BYTES} bytes", shown=_show(data))
            elif data := (data.removeprefix(codecs.BOM_UTF8) if line == 1 else data).strip():
                yield _line(line, position, data)


def _skip_line(file: BinaryIO, data: bytes) -> int:
    """Read to the end of the line. Returns the number of bytes read."""
    skipped = 0
    while data and not data.endswith(b"\n"):
        data = file.readline(_CHUNK_BYTES)
        skipped += len(data)
    return skipped


def _line(line: int, position: int, data: bytes) -> RawRow:
    try:
        return _row(line, position, _decode(data.decode()))
    except UnicodeDecodeError as error:
        return RawRow(line, position, problem=f"not UTF-8 ({error.reason} at byte {error.start})", shown=_show(data))
    except (ValueError, RecursionError) as error:
        return RawRow(line, position, problem=f"not JSON ({_describe(error)})", shown=_show(data))


def _row(line: int, position: int, value: Any) -> RawRow:
    if isinstance(value, dict):
        return RawRow(line, position, value)
    return RawRow(line, position, problem=f"not an object but a {type(value).__name__}", shown=str(value)[:_SHOWN])


class _ArrayText:
    """The text of a JSON array. Only the part that is being read is in memory."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.line, self.position = 1, 0
        self._text, self._at, self._ended = "", 0, False

    def peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self.line += self._text[self._at] == "\n"
                self._at += 1
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Skip the character that `peek` returned."""
        self._at += 1

    def element(self) -> Any:
        """The next value. Raises DataError if it is invalid, breaks off or is too large.

        Text that breaks off is tried again with twice as much of it, so a large element costs twice its size.
        """
        tried = 0
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                tried, problem = len(self._text) - self._at, error
            else:
                if end < len(self._text) or not self._more():
                    self.line += self._text.count("\n", self._at, end)
                    self._at = end
                    return value
                continue  # a number may continue beyond the text in memory
            if tried > MAX_ROW_BYTES or isinstance(problem, RecursionError) or not self._grow(tried):
                raise self.error(f"no value that can be read ({_describe(problem)})")

    def error(self, what: str) -> DataError:
        """The error to raise at the current line."""
        return DataError(
            f"{self._path}, line {self.line}: {what}, so nothing behind it can be trusted. Fix the file, or bring "
            "it into JSON lines, one object a line"
        )

    def _grow(self, held: int) -> bool:
        """Hold at least twice as much text. Returns False if there is no more."""
        grown = False
        while len(self._text) - self._at < 2 * held + 1 and self._more():
            grown = True
        return grown

    def _more(self) -> bool:
        """Read the next chunk and drop the text before the current position. Returns False at the end of the file."""
        if self._ended:
            return False
        data = self._file.read(_CHUNK_BYTES)
        self.position += len(data)
        self._ended = not data
        try:
            self._text = self._text[self._at :] + self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self.error(f"bytes that are not UTF-8 ({error.reason})") from error
        self._at = 0
        return True


def _array(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        text = _ArrayText(path, file)
        text.peek()
        text.skip()  # the bracket by which the kind of file was recognised
        if text.peek() == "]":
            return
        while True:
            text.peek()
            line = text.line
            yield _row(line, text.position, text.element())
            separator = text.peek()
            if separator not in ("]", ","):
                raise text.error(f"{separator!r} where a comma or the end of the array should stand")
            text.skip()
            if separator == "]":
                return


def _parquet(path: Path) -> Iterator[RawRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DependencyError(
            f"{path} is a Parquet file, and reading those needs pyarrow ({error}). Type: pip install "
            "'async-grpo[parquet]', or bring the file into JSON lines"
        ) from error
    size = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            total, number = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield RawRow(number, size * number // total, fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged Parquet file ({_describe(error)}). Fetch it again") from error


def _number(text: str) -> str:
    """Numbers stay as they are written: "18.0" is not 18, and long numbers are not rounded."""
    return text


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_refuse_constant)


def _decode(text: str) -> Any:
    return _DECODER.decode(text)


def _show(data: bytes) -> str:
    return data[:_SHOWN].decode(errors="replace")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:_SHOWN]}"

"""Which rows are used: each row passes these steps from its file to token ids, or ends in rejected.jsonl.

file --read--> fields --question, reference--> is it new? --template--> text --tokenizer--> is it short enough?
  |                          |                    |            |                      |               |
  +--------------------------+--------------------+------------+----------------------+--> rejected.jsonl
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from async_grpo.config.data import PrepareConfig
from async_grpo.data.base import RejectedRow
from async_grpo.data.prepare.formats import FORMATS, Example, FieldMap, Rejections, example_of, fitting_format
from async_grpo.data.prepare.readers import RawRow, read_rows
from async_grpo.data.prepare.templates import Template
from async_grpo.data.prepared_dataset import StoredRow
from async_grpo.data.tokenizer import BatchTokenizer, check_characters
from async_grpo.errors import DataError
from async_grpo.utils.files import sync
from async_grpo.wire import tokens_to_bytes

BATCH_ROWS = 512

Advance = Callable[[int], None]
"""Called with the number of bytes of all files that have been read so far."""


class RejectedRows:
    """Writes every rejected row as a line of `rejected.jsonl`, and counts them by reason."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("x", encoding="utf-8")
        self.counts = Rejections()

    def add(self, file: Path, line: int, why: RejectedRow, shown: str) -> None:
        """Write one rejected row; `shown` is the beginning of its text."""
        entry = {"file": file.name, "line": line, "reason": why.reason, "detail": str(why), "row": shown}
        self._file.write(json.dumps(entry) + "\n")
        self.counts.add(file, line, why)

    def close(self) -> None:
        """Sync the file to the disk and close it."""
        self._file.close()
        sync(self._path)


class _Candidate(NamedTuple):
    """A row that has passed all steps before the tokenizer. `text`: what the policy would read."""

    file: Path
    line: int
    example: Example
    text: str


class RowFilter:
    """Passes rows through every step: first those of the held-out files, then those of the training files."""

    def __init__(
        self,
        config: PrepareConfig,
        template: Template,
        encoder: BatchTokenizer,
        rejected: RejectedRows,
        advance: Advance,
    ) -> None:
        self._config = config
        self._template = template
        self._encoder = encoder
        self._rejected = rejected
        self._advance = advance
        self._read_bytes = 0
        self._known: dict[bytes, int] = {}
        """Digest of a question -> its line number, negative if it is held out."""

    def rows(self, files: Sequence[Path], *, held_out: bool) -> Iterator[tuple[bytes, bytes]]:
        """Token ids and record of every row that is used, in the order of the files."""
        candidates = self._candidates(files, held_out)
        while batch := list(islice(candidates, BATCH_ROWS)):
            for candidate, ids in zip(batch, self._encoder.encode([one.text for one in batch]), strict=True):
                try:
                    yield tokens_to_bytes(self._encoder.fitting(ids)), _record(candidate)
                except RejectedRow as why:
                    self._rejected.add(candidate.file, candidate.line, why, candidate.example.question[:200])

    def _candidates(self, files: Sequence[Path], held_out: bool) -> Iterator[_Candidate]:
        for file in files:
            where = self._named_fields()
            for row in read_rows(file):
                self._advance(self._read_bytes + row.position)
                try:
                    if row.problem:
                        raise RejectedRow("not a row", row.problem)
                    where = where or _detected(file, row)
                    yield self._candidate(file, row, where, held_out)
                except RejectedRow as why:
                    self._rejected.add(file, row.line, why, row.shown or str(row.fields)[:200])
            self._read_bytes += file.stat().st_size
            self._advance(self._read_bytes)

    def _named_fields(self) -> FieldMap | None:
        if self._config.format == "generic":
            return FieldMap(self._config.prompt_field, self._config.answer_field, after_hashes=True)
        return FORMATS.get(self._config.format)

    def _candidate(self, file: Path, row: RawRow, where: FieldMap, held_out: bool) -> _Candidate:
        """Raises RejectedRow."""
        example = example_of(row.fields, where, self._config.keep_fields)
        self._check_new(example, row.line, held_out)
        text = self._template.render(example)
        check_characters(text, self._config.max_prompt_tokens)
        return _Candidate(file, row.line, example, text)

    def _check_new(self, example: Example, line: int, held_out: bool) -> None:
        digest = hashlib.blake2b(example.identity.encode(), digest_size=16).digest()
        known = self._known.get(digest)
        if known is None:
            self._known[digest] = -line if held_out else line
        elif known < 0 and not held_out:
            raise RejectedRow("also held out", f"the question stands among the held-out ones (line {-known})")
        elif not self._config.keep_duplicates:
            raise RejectedRow("duplicate", f"the question stands in line {abs(known)} already")


def _detected(file: Path, row: RawRow) -> FieldMap:
    name = fitting_format(row.fields)
    if name is None:
        formats = ", ".join(f"{name} ({' and '.join(sorted(where.needed))})" for name, where in FORMATS.items())
        raise DataError(
            f"{file}, line {row.line}: the fields {', '.join(map(str, row.fields))[:200] or 'none'} fit no format that "
            f"is known: {formats}. Name the fields: --format generic --prompt-field ... --answer-field ..."
        )
    return FORMATS[name]


def _record(candidate: _Candidate) -> bytes:
    example = candidate.example
    metadata = {"line": str(candidate.line), "file": candidate.file.name, **example.metadata}
    return msgspec.msgpack.encode(StoredRow(candidate.text, example.answer, metadata))

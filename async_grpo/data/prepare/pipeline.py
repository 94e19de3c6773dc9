"""`async-grpo prepare`: from published files to a folder that a run reads in constant memory.

    files --RowFilter--> staged rows --seeded permutation--> train.*, held_out.* --> prepared.json --> the folder's name

Each row passes these steps from its file to token ids, or ends in rejected.jsonl:

    file --read--> fields --question, reference--> is it new? --template--> text --tokenizer--> is it short enough?

Rows stream through in batches. Only one digest a question (about 100 bytes) stays in memory, to find duplicates;
everything else is on the disk. Nothing waits for anything but the disk and the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from async_grpo.config.data import PrepareConfig
from async_grpo.data.base import RejectedRow
from async_grpo.data.prepare.formats import FORMATS, Example, FieldMap, Rejections, example_of, fitting_format
from async_grpo.data.prepare.readers import RawRow, read_rows
from async_grpo.data.prepare.templates import Template
from async_grpo.data.prepared_dataset import (
    FORMAT,
    HELD_OUT,
    MAGIC,
    REJECTED,
    TRAIN,
    DatasetManifest,
    DatasetSplit,
    FileFacts,
    SplitWriter,
    StoredRow,
    remove_split,
    write_manifest,
)
from async_grpo.data.shuffle import Permutation
from async_grpo.data.tokenizer import BatchTokenizer, Tokenizer, check_characters
from async_grpo.errors import DataError
from async_grpo.utils.files import new_folder, sync
from async_grpo.wire import tokens_to_bytes

_STAGED = "staged_"
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
            raise RejectedRow("also held out", f"the question is among the held-out ones (line {-known})")
        elif not self._config.keep_duplicates:
            raise RejectedRow("duplicate", f"the question is already in line {abs(known)}")


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


def prepare(config: PrepareConfig, tokenizer: Tokenizer, advance: Advance) -> tuple[DatasetManifest, Rejections]:
    """Make the folder `config.out`, completely or not at all. The same arguments make the same bytes.

    Returns its manifest, and the rejected rows with the first of each reason.

    Raises DataError (an unreadable file, too few usable rows, a folder that exists), ConfigError
    (the template), DependencyError (Parquet without pyarrow).
    """
    template = Template(config.template, tokenizer, config.system)
    encoder = BatchTokenizer(tokenizer, special_tokens=template.special_tokens, longest=config.max_prompt_tokens)
    with new_folder(config.out) as draft:
        with closing(RejectedRows(draft / REJECTED)) as rejected:
            row_filter = RowFilter(config, template, encoder, rejected, advance)
            held_out = _stage(draft, HELD_OUT, row_filter.rows(config.held_out_from, held_out=True))
            train = _stage(draft, TRAIN, row_filter.rows(config.files, held_out=False))
        _check_enough(config, train.rows, held_out.rows, rejected)
        files, rows = _split(config, draft)
        manifest = DatasetManifest(
            magic=MAGIC,
            format=FORMAT,
            rows=rows,
            longest_prompt_tokens=max(train.longest, held_out.longest),
            special_tokens=template.special_tokens,
            rejected=dict(rejected.counts),
            recipe=_recipe(config),
            files=files,
        )
        write_manifest(draft, manifest)
    return manifest, rejected.counts


def _stage(draft: Path, name: str, rows: Iterable[tuple[bytes, bytes]]) -> SplitWriter:
    """Write the rows to the disk in the order of their files."""
    writer = SplitWriter(draft, _STAGED + name)
    for tokens, record in rows:
        writer.add(tokens, record)
    writer.close()
    return writer


def _split(config: PrepareConfig, draft: Path) -> tuple[dict[str, FileFacts], dict[str, int]]:
    """Write the staged rows in their final order. Returns the facts of the files and the number of rows by split."""
    files: dict[str, FileFacts] = {}
    with (
        closing(DatasetSplit(draft, _STAGED + TRAIN)) as train,
        closing(DatasetSplit(draft, _STAGED + HELD_OUT)) as held_out,
    ):
        kept = 0 if config.held_out_from else config.held_out
        first = len(train) - kept
        order = _order(config, TRAIN, len(train))
        files |= _copy(draft, TRAIN, train, range(first), order)
        if config.held_out_from:
            rows = range(len(held_out))
            files |= _copy(draft, HELD_OUT, held_out, rows, _order(config, HELD_OUT, len(held_out)))
        else:
            rows = range(first, len(train))
            files |= _copy(draft, HELD_OUT, train, rows, order)
    for name in (TRAIN, HELD_OUT):
        remove_split(draft, _STAGED + name)
    return files, {TRAIN: first, HELD_OUT: len(rows)}


def _order(config: PrepareConfig, name: str, rows: int) -> Callable[[int], int]:
    """Maps a place to a row. The last places of `train` are held out, as with a JSON-lines file."""
    return Permutation(rows, f"{config.seed}/prepare/{name}") if config.shuffle else lambda place: place


def _copy(
    draft: Path, name: str, source: DatasetSplit, places: Sequence[int], order: Callable[[int], int]
) -> dict[str, FileFacts]:
    writer = SplitWriter(draft, name)
    for row in map(order, places):
        writer.add(*source.stored(row))
    return writer.close()


def _check_enough(config: PrepareConfig, train: int, held_out: int, rejected: RejectedRows) -> None:
    if config.held_out_from:
        if train and held_out:
            return
        left, fix = f"{train} rows to train on and {held_out} held-out rows", "name other files"
    else:
        if train > config.held_out:
            return
        left = f"{train} rows, of which --held-out keeps {config.held_out} from training"
        fix = f"lower --held-out below {train}" if train > 1 else "name other files"
    raise DataError(
        f"the files leave {left}. Not taken: {rejected.counts or 'none'}. Nothing was written; fix the rows, "
        f"change what keeps them out, or {fix}"
    )


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings without folders: the same files with the same names make the same bytes."""
    recipe = config.model_dump(mode="json", exclude={"out", "model"})
    names = {key: [path.name for path in getattr(config, key)] for key in ("files", "held_out_from")}
    return {**recipe, **names, "template": Path(config.template).name}

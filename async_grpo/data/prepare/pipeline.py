"""`async-grpo prepare`: turns published files into a folder that a run reads in constant memory.

    files --RowFilter--> staged rows --seeded permutation--> train.*, held_out.* --> prepared.json --> final name

Each row passes these steps, or ends in rejected.jsonl:

    file --parse--> question, reference --not a duplicate--> --template--> text --tokenizer--> token ids, short enough

Rows stream through in batches. Only one digest per question (about 100 bytes) stays in memory, to find duplicates;
everything else is on disk. The pipeline only waits for the disk and the tokenizer.
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
from async_grpo.data.prepare.formats import FORMATS, Example, FieldMap, Rejections, detect_format, parse_example
from async_grpo.data.prepare.readers import RawRow, read_raw_rows
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
    write_dataset_manifest,
)
from async_grpo.data.shuffle import Permutation
from async_grpo.data.tokenizer import BatchTokenizer, Tokenizer, check_characters
from async_grpo.errors import DataError
from async_grpo.utils.files import new_folder, sync
from async_grpo.wire import tokens_to_bytes

_STAGED_PREFIX = "staged_"
BATCH_ROWS = 512

ReportProgress = Callable[[int], None]
"""Called with the number of bytes read so far, of all files."""


class RejectedRows:
    """Writes every rejected row as a line of `rejected.jsonl`, and counts them by reason."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("x", encoding="utf-8")
        self.counts = Rejections()

    def add(self, file: Path, line: int, rejection: RejectedRow, shown: str) -> None:
        """Write one rejected row. `shown`: the beginning of its text."""
        entry = {
            "file": file.name,
            "line": line,
            "reason": rejection.reason,
            "detail": str(rejection),
            "row": shown,
        }
        self._file.write(json.dumps(entry) + "\n")
        self.counts.add(file, line, rejection)

    def close(self) -> None:
        """Close the file and sync it to disk."""
        self._file.close()
        sync(self._path)


class _CandidateRow(NamedTuple):
    """A row that has passed all steps before the tokenizer. `text`: the prompt for the policy."""

    file: Path
    line: int
    example: Example
    text: str


class RowFilter:
    """Passes rows through every step. Filter the held-out files first: their questions must not be trained on."""

    def __init__(
        self,
        config: PrepareConfig,
        template: Template,
        encoder: BatchTokenizer,
        rejected: RejectedRows,
        report_progress: ReportProgress,
    ) -> None:
        self._config = config
        self._template = template
        self._encoder = encoder
        self._rejected = rejected
        self._report_progress = report_progress
        self._read_bytes = 0
        """Bytes of the files that have been read to the end."""
        self._line_of_question: dict[bytes, int] = {}
        """Line number by digest of the question; negative for held-out questions."""

    def filter_rows(self, files: Sequence[Path], *, held_out: bool) -> Iterator[tuple[bytes, bytes]]:
        """Yield token ids and record of every usable row, in the order of the files."""
        candidates = self._find_candidates(files, held_out)
        while batch := list(islice(candidates, BATCH_ROWS)):
            encoded = self._encoder.encode_batch([candidate.text for candidate in batch])
            for candidate, ids in zip(batch, encoded, strict=True):
                try:
                    tokens = tokens_to_bytes(self._encoder.check_prompt_ids(ids))
                except RejectedRow as rejection:
                    shown = candidate.example.question[:200]
                    self._rejected.add(candidate.file, candidate.line, rejection, shown)
                else:
                    yield tokens, _pack_record(candidate)

    def _find_candidates(self, files: Sequence[Path], held_out: bool) -> Iterator[_CandidateRow]:
        for file in files:
            field_map = self._configured_fields()
            for row in read_raw_rows(file):
                self._report_progress(self._read_bytes + row.position)
                try:
                    if row.problem:
                        raise RejectedRow("unreadable row", row.problem)
                    if field_map is None:  # --format auto: the first readable row of each file decides
                        field_map = _detect_fields(file, row)
                    yield self._make_candidate(file, row, field_map, held_out)
                except RejectedRow as rejection:
                    self._rejected.add(file, row.line, rejection, row.shown or str(row.fields)[:200])
            self._read_bytes += file.stat().st_size
            self._report_progress(self._read_bytes)

    def _configured_fields(self) -> FieldMap | None:
        """The fields that the configuration names; None for `auto`."""
        if self._config.format == "generic":
            return FieldMap(self._config.prompt_field, self._config.answer_field, after_hashes=True)
        return FORMATS.get(self._config.format)

    def _make_candidate(self, file: Path, row: RawRow, field_map: FieldMap, held_out: bool) -> _CandidateRow:
        """Raise RejectedRow if a step rejects the row."""
        example = parse_example(row.fields, field_map, self._config.keep_fields)
        self._check_new(example, row.line, held_out)
        text = self._template.render(example)
        check_characters(text, self._config.max_prompt_tokens)
        return _CandidateRow(file, row.line, example, text)

    def _check_new(self, example: Example, line: int, held_out: bool) -> None:
        """Record the question. Raises RejectedRow if it is a duplicate, or held out and now to be trained on."""
        digest = hashlib.blake2b(example.identity.encode(), digest_size=16).digest()
        earlier_line = self._line_of_question.get(digest)
        if earlier_line is None:
            self._line_of_question[digest] = -line if held_out else line
        elif earlier_line < 0 and not held_out:
            raise RejectedRow("also held out", f"the question is among the held-out ones (line {-earlier_line})")
        elif not self._config.keep_duplicates:
            raise RejectedRow("duplicate", f"the question is already in line {abs(earlier_line)}")


def _detect_fields(file: Path, row: RawRow) -> FieldMap:
    """Raise DataError if the row fits no known format."""
    name = detect_format(row.fields)
    if name is not None:
        return FORMATS[name]
    formats = ", ".join(
        f"{name} ({' and '.join(sorted(field_map.required_fields))})" for name, field_map in FORMATS.items()
    )
    raise DataError(
        f"{file}, line {row.line}: the fields {', '.join(map(str, row.fields))[:200] or 'none'} fit no known format: "
        f"{formats}. Name the fields: --format generic --prompt-field ... --answer-field ..."
    )


def _pack_record(candidate: _CandidateRow) -> bytes:
    metadata = {"line": str(candidate.line), "file": candidate.file.name} | candidate.example.metadata
    return msgspec.msgpack.encode(StoredRow(candidate.text, candidate.example.answer, metadata))


def prepare_dataset(
    config: PrepareConfig, tokenizer: Tokenizer, report_progress: ReportProgress
) -> tuple[DatasetManifest, Rejections]:
    """Make the folder `config.out`, completely or not at all. The same arguments make the same bytes.

    Returns its manifest, and the rejected rows with the first of each reason.

    Raises DataError (an unreadable file, too few usable rows, an existing folder), ConfigError (the template),
    DependencyError (Parquet without pyarrow).
    """
    template = Template(config.template, tokenizer, config.system)
    encoder = BatchTokenizer(tokenizer, special_tokens=template.special_tokens, max_tokens=config.max_prompt_tokens)
    with new_folder(config.out) as draft:
        with closing(RejectedRows(draft / REJECTED)) as rejected:
            row_filter = RowFilter(config, template, encoder, rejected, report_progress)
            held_out = _stage_rows(draft, HELD_OUT, row_filter.filter_rows(config.held_out_from, held_out=True))
            train = _stage_rows(draft, TRAIN, row_filter.filter_rows(config.files, held_out=False))
        _check_enough(config, train.rows, held_out.rows, rejected)

        files, rows = _write_splits(config, draft)
        manifest = DatasetManifest(
            magic=MAGIC,
            format=FORMAT,
            rows=rows,
            longest_prompt_tokens=max(train.longest_tokens, held_out.longest_tokens),
            special_tokens=template.special_tokens,
            rejected=dict(rejected.counts),
            recipe=_recipe(config),
            files=files,
        )
        write_dataset_manifest(draft, manifest)
    return manifest, rejected.counts


def _stage_rows(draft: Path, name: str, rows: Iterable[tuple[bytes, bytes]]) -> SplitWriter:
    """Write the rows to disk in the order of their files. Only then is their number known, which shuffling needs."""
    writer = SplitWriter(draft, _STAGED_PREFIX + name)
    for tokens, record in rows:
        writer.add_row(tokens, record)
    writer.close()
    return writer


def _write_splits(config: PrepareConfig, draft: Path) -> tuple[dict[str, FileFacts], dict[str, int]]:
    """Write the staged rows in their final order and remove the staged files.

    Without --held-out-from, the last positions of `train` are held out, as with a JSON-lines file. Returns the facts of
    the files and the number of rows by split.
    """
    with (
        closing(DatasetSplit(draft, _STAGED_PREFIX + TRAIN)) as train,
        closing(DatasetSplit(draft, _STAGED_PREFIX + HELD_OUT)) as held_out,
    ):
        train_order = _make_order(config, TRAIN, len(train))
        if config.held_out_from:
            train_rows = len(train)
            held_out_rows = len(held_out)
            held_out_order = _make_order(config, HELD_OUT, held_out_rows)
            files = _copy_rows(draft, TRAIN, train, range(train_rows), train_order)
            files |= _copy_rows(draft, HELD_OUT, held_out, range(held_out_rows), held_out_order)
        else:
            train_rows = len(train) - config.held_out
            held_out_rows = config.held_out
            files = _copy_rows(draft, TRAIN, train, range(train_rows), train_order)
            files |= _copy_rows(draft, HELD_OUT, train, range(train_rows, len(train)), train_order)
    for name in (TRAIN, HELD_OUT):
        remove_split(draft, _STAGED_PREFIX + name)
    return files, {TRAIN: train_rows, HELD_OUT: held_out_rows}


def _make_order(config: PrepareConfig, name: str, rows: int) -> Callable[[int], int]:
    """Return the function from a position in the split to a staged row."""
    if not config.shuffle:
        return lambda position: position
    return Permutation(rows, f"{config.seed}/prepare/{name}")


def _copy_rows(
    draft: Path, name: str, source: DatasetSplit, positions: Sequence[int], order: Callable[[int], int]
) -> dict[str, FileFacts]:
    writer = SplitWriter(draft, name)
    for position in positions:
        tokens, record = source.read_stored(order(position))
        writer.add_row(tokens, record)
    return writer.close()


def _check_enough(config: PrepareConfig, train: int, held_out: int, rejected: RejectedRows) -> None:
    """Raise DataError if there are no rows to train on or none held out."""
    if config.held_out_from:
        if train and held_out:
            return
        remaining = f"{train} rows to train on and {held_out} held-out rows"
        fix = "name other files"
    else:
        if train > config.held_out:
            return
        remaining = f"{train} rows, of which --held-out keeps {config.held_out} from training"
        fix = f"lower --held-out below {train}" if train > 1 else "name other files"
    raise DataError(
        f"the files leave {remaining}. Rejected: {rejected.counts or 'none'}. Nothing was written. Fix the rows, "
        f"change the settings that reject them, or {fix}"
    )


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings without folders, so that the same files with the same names make the same bytes."""
    recipe = config.model_dump(mode="json", exclude={"out", "model"})
    for key in ("files", "held_out_from"):
        recipe[key] = [path.name for path in getattr(config, key)]
    recipe["template"] = Path(config.template).name
    return recipe

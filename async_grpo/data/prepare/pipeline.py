"""`async-grpo prepare`: from published files to a folder that a run reads in constant memory.

    files --RowFilter--> staged rows --seeded permutation--> train.*, held_out.* --> prepared.json --> the folder's name

Rows stream through in batches. Only one digest a question (about 100 bytes) stays in memory, to find duplicates;
everything else is on the disk. Nothing waits for anything but the disk and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.config.data import PrepareConfig
from async_grpo.data.prepare.filters import Advance, RejectedRows, RowFilter
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
    remove_split,
    write_manifest,
)
from async_grpo.data.shuffle import Permutation
from async_grpo.data.tokenizer import BatchTokenizer, Tokenizer
from async_grpo.errors import DataError
from async_grpo.utils.files import new_folder

_STAGED = "staged_"


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """The manifest of the new folder, and the first rejected row of each reason: file, line, what is wrong."""

    manifest: DatasetManifest
    first_rejected: dict[str, str]


def prepare(config: PrepareConfig, tokenizer: Tokenizer, advance: Advance) -> PrepareResult:
    """Make the folder `config.out`, completely or not at all. The same arguments make the same bytes.

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
    return PrepareResult(manifest, rejected.counts.first)


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
        f"the files leave {left}. Not taken: {rejected.counts or 'none'}. Nothing was written; mend the rows, "
        f"change what keeps them out, or {fix}"
    )


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings without folders: the same files with the same names make the same bytes."""
    recipe = config.model_dump(mode="json", exclude={"out", "model"})
    names = {key: [path.name for path in getattr(config, key)] for key in ("files", "held_out_from")}
    return {**recipe, **names, "template": Path(config.template).name}

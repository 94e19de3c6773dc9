"""Tasks from a JSON-lines file: GSM8K as it is published, or any file with a prompt and an answer field.

    {"question": "Natalia sold ...", "answer": "... #### 72"}

The reference answer is the text after the last `####`, commas stripped, if the answer has that; else the whole
answer. Rows are read as `async-grpo prepare` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.data import DataConfig
from async_grpo.data.base import RejectedRow, make_task, prompt_limit
from async_grpo.data.prepare.formats import FieldMap, Rejections, example_of
from async_grpo.data.prepare.readers import RawRow, kind_of, read_lines
from async_grpo.data.shuffle import ShuffledPasses
from async_grpo.data.tokenizer import BatchTokenizer, Tokenizer, check_characters
from async_grpo.errors import DataError
from async_grpo.wire import Task

ALSO_HELD_OUT, ALSO_TRAINED_ON = "also held out", "also trained on"


@dataclass(frozen=True, slots=True)
class JsonlRow:
    """A usable line of a file. `prompt` is the question in its template."""

    file: Path
    line: int
    prompt: str
    answer: str


_COUNTED = 2000
"""Most prompts whose tokens are counted before a run starts: a second for a fast tokenizer."""
Prompt = tuple[JsonlRow, list[int]]
"""A row with the token ids of its prompt, which is not too long."""


class JsonlSource:
    """Training rows in reshuffled passes; held-out rows from `eval_path`, else the last rows of the file.

    Training rows with the prompt of one of the first `kept` held-out rows (default: all) are dropped, as are further
    held-out rows with the prompt of a training row. Raises DataError for a missing file or field (with the line number
    and the fix) and when no row is left.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, *, kept: int | None = None) -> None:
        self.dropped = Rejections()
        data, wanted = config.data, config.eval.prompts
        assert data.path is not None
        encoder = BatchTokenizer(tokenizer, special_tokens=True, longest=prompt_limit(config))
        rows = self._usable(data.path, data, encoder)
        if data.eval_path is not None:
            held_out = self._usable(data.eval_path, data, encoder)[:wanted]
        else:
            rows, held_out = rows[:-wanted], rows[-wanted:]
        kept = len(held_out) if kept is None else kept
        self._rows = self._without(rows, held_out[:kept], ALSO_HELD_OUT)
        held_out = held_out[:kept] + self._without(held_out[kept:], self._rows, ALSO_TRAINED_ON)
        self._held_out = [self._task(index, prompt) for index, prompt in enumerate(held_out)]
        _check_not_empty(config, len(self._rows), len(held_out), wanted, self.dropped)
        self._passes = ShuffledPasses(len(self._rows), seed=config.seed, shuffle=data.shuffle)

    def task(self, index: int) -> Task:
        """The task at this position of the stream."""
        return self._task(index, self._rows[self._passes.row(index)])

    def held_out(self) -> list[Task]:
        """The tasks for evaluation."""
        return self._held_out

    @property
    def training_rows(self) -> int:
        """Rows in one pass."""
        return len(self._rows)

    def _usable(self, path: Path, data: DataConfig, encoder: BatchTokenizer) -> list[Prompt]:
        prompts = []
        for row in usable_rows(path, data, self.dropped):
            try:
                prompts.append((row, encoder.prompt(row.prompt)))
            except RejectedRow as why:
                self.dropped.add(path, row.line, why)
        return prompts

    def _without(self, prompts: list[Prompt], others: list[Prompt], reason: str) -> list[Prompt]:
        """The prompts whose text none of the others has. The rest is counted as dropped."""
        texts = {other.prompt for other, _ in others}
        for row, _ in prompts:
            if row.prompt in texts:
                self.dropped.add(row.file, row.line, RejectedRow(reason))
        return [prompt for prompt in prompts if prompt[0].prompt not in texts]

    @staticmethod
    def _task(index: int, prompt: Prompt) -> Task:
        row, tokens = prompt
        return make_task(index, row.prompt, tokens, row.answer, {"line": str(row.line)})


def usable_rows(path: Path, data: DataConfig, dropped: Rejections) -> Iterator[JsonlRow]:
    """Every row with a prompt and a reference answer. The others are counted in `dropped`.

    Raises DataError for a file that is not JSON lines, and for a row without one of the fields.
    """
    _check_kind(path, data)
    where = FieldMap(data.prompt_field, data.answer_field, after_hashes=True)
    for raw in read_lines(path):
        try:
            yield _row(path, raw, where, data)
        except RejectedRow as why:
            if why.reason == "field missing":
                raise DataError(
                    f"{path}, line {raw.line}: {why}. Set data.prompt_field ({data.prompt_field!r}) and "
                    f"data.answer_field ({data.answer_field!r}) to fields that every row has"
                ) from None
            dropped.add(path, raw.line, why)


def check_rows(config: RunConfig) -> Rejections:
    """Read all rows that a run would read, without tokenizing; returns the rejected ones.

    Raises DataError as JsonlSource does.
    """
    data, wanted, dropped = config.data, config.eval.prompts, Rejections()
    assert data.path is not None
    rows = sum(1 for _ in usable_rows(data.path, data, dropped))
    if data.eval_path is not None:
        held_out = sum(1 for _ in usable_rows(data.eval_path, data, dropped))
        _check_not_empty(config, rows, held_out, wanted, dropped)
    else:
        _check_not_empty(config, max(0, rows - wanted), min(rows, wanted), wanted, dropped)
    return dropped


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Lengths of some of the training prompts, in tokens."""

    rows: int
    """Rows of the training file that can be used, without those that are held out from it."""
    counted: int
    """Rows whose tokens were counted, evenly spread."""
    longest: int
    too_long: int
    """Counted rows that would not be used, because they are above `limit`."""
    limit: int

    def __str__(self) -> str:
        counted = f"; of {self.counted:,} rows" if self.counted < self.rows else ""
        lengths = f"the longest prompt has {self.longest:,} tokens, {self.too_long:,} above the limit of {self.limit:,}"
        return f"{self.rows:,} rows{counted}; {lengths}"


def count_prompt_tokens(config: RunConfig, tokenizer: Tokenizer) -> PromptLengths:
    """Lengths of training prompts, of at most _COUNTED rows. Raises DataError as JsonlSource does.

    All rows are counted only if none of these, or no held-out row, can be used: then the run cannot start.
    """
    data, wanted = config.data, config.eval.prompts
    assert data.path is not None
    encoder = BatchTokenizer(tokenizer, special_tokens=True, longest=prompt_limit(config))
    prompts = [row.prompt for row in usable_rows(data.path, data, Rejections())]
    if data.eval_path is not None:
        held_out = [row.prompt for row in usable_rows(data.eval_path, data, Rejections())][:wanted]
    else:
        prompts, held_out = prompts[:-wanted], prompts[-wanted:]
    chosen = prompts[:: max(1, len(prompts) // _COUNTED)][:_COUNTED]
    encoded = [ids for ids in encoder.encode(chosen) if not isinstance(ids, RejectedRow)]
    lengths = [len(ids) for ids in encoded]
    limit = prompt_limit(config)
    if not any(0 < length <= limit for length in lengths) or not _any_fits(held_out, encoder):
        JsonlSource(config, tokenizer)  # raises DataError with the number of rows for each reason
    too_long = sum(length > limit for length in lengths)
    return PromptLengths(len(prompts), len(chosen), max(lengths, default=0), too_long, limit)


def _any_fits(prompts: list[str], encoder: BatchTokenizer) -> bool:
    for prompt in prompts:
        try:
            encoder.prompt(prompt)
        except RejectedRow:
            continue
        return True
    return False


def _row(path: Path, raw: RawRow, where: FieldMap, data: DataConfig) -> JsonlRow:
    """Raises RejectedRow."""
    if raw.problem:
        raise RejectedRow("not a row", raw.problem)
    example = example_of(raw.fields, where)
    if len(example.chat) > 1:
        raise RejectedRow(
            "not a text", f"the field {where.prompt!r} is a conversation, which `async-grpo prepare` takes"
        )
    prompt = data.template.replace("{prompt}", example.question)
    check_characters(prompt, data.max_prompt_tokens)
    return JsonlRow(path, raw.line, prompt, example.answer)


def _check_kind(path: Path, data: DataConfig) -> None:
    """Raises DataError."""
    key = "data.path" if path == data.path else "data.eval_path"
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise DataError(
            f"{key}: the file {path} {what}. Set {key} to a JSON-lines file, or make it with async-grpo prepare"
        )
    kind = kind_of(path)
    if kind in ("json", "parquet"):
        what = "one JSON array" if kind == "json" else "a Parquet file"
        raise DataError(
            f"{key}: {path} is {what}, not JSON lines. Type: async-grpo prepare {path} --out FOLDER --model MODEL, and "
            "point data.path at the folder"
        )
    if kind != "jsonl":
        raise DataError(f"{key}: {path} is {kind}, not JSON lines. Unpack it, or name what it is a part of")


def _check_not_empty(config: RunConfig, training: int, held_out: int, wanted: int, dropped: Rejections) -> None:
    if training and held_out:
        return
    if not (training or held_out or dropped):
        raise DataError(f"{config.data.path} has no rows. Name a file that has some (data.path)")
    raise DataError(
        f"{config.data.path} leaves {training} training rows and {held_out} held-out rows "
        f"(not taken: {dropped or 'none'}). eval.prompts holds out {wanted}: lower it or set "
        "data.eval_path; fix the rows that are not taken; "
        f"raise data.max_prompt_tokens or {config.rollout.limits.length_key} if prompts are too long"
    )

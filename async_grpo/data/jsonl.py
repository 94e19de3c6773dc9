"""Tasks from a JSON-lines file: GSM8K as it is published, or any file with a prompt and an answer field.

    {"question": "Natalia sold ...", "answer": "... #### 72"}

The reference answer is the text after the last `####`, without thousands separators, if there is one; else the whole
answer. Rows are parsed as by `async-grpo prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.data import DataConfig
from async_grpo.data.base import RejectedRow, make_task, prompt_limit
from async_grpo.data.prepare.formats import FieldMap, Rejections, parse_example
from async_grpo.data.prepare.readers import RawRow, detect_kind, read_jsonl_rows
from async_grpo.data.shuffle import ShuffledPasses
from async_grpo.data.tokenizer import BatchTokenizer, Tokenizer, check_characters
from async_grpo.errors import DataError
from async_grpo.wire import Task

ALSO_HELD_OUT = "also held out"
ALSO_TRAINED_ON = "also trained on"
_MAX_COUNTED = 2000
"""Maximum prompts whose tokens are counted before a run starts: a second for a fast tokenizer."""


@dataclass(frozen=True, slots=True)
class JsonlRow:
    """A usable line of a file. `prompt` is the question in its template."""

    file: Path
    line: int
    prompt: str
    answer: str


Prompt = tuple[JsonlRow, list[int]]
"""A row with the token ids of its prompt, within the length limit."""


class JsonlSource:
    """Training rows in reshuffled passes; held-out rows from `eval_path`, else the last rows of the file.

    No prompt is both trained on and held out. A training row with the prompt of one of the run's held-out rows is
    dropped. A further held-out row (of an evaluation with more prompts than the run) with the prompt of a training row
    is dropped. Raises DataError for a missing file or field, with line number and fix, and if no row is left.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, *, held_out_by_run: int | None = None) -> None:
        """`held_out_by_run`: number of held-out rows that the run did not train on; None: all."""
        data = config.data
        wanted = config.eval.prompts
        assert data.path is not None
        self.dropped = Rejections()
        encoder = BatchTokenizer(tokenizer, special_tokens=True, max_tokens=prompt_limit(config))
        rows = self._read_prompts(data.path, data, encoder)
        if data.eval_path is not None:
            held_out = self._read_prompts(data.eval_path, data, encoder)[:wanted]
        else:
            held_out = rows[-wanted:]
            rows = rows[:-wanted]

        if held_out_by_run is None:
            held_out_by_run = len(held_out)
        of_run = held_out[:held_out_by_run]
        further = held_out[held_out_by_run:]
        self._rows = self._drop_prompts_of(of_run, rows, ALSO_HELD_OUT)
        held_out = of_run + self._drop_prompts_of(self._rows, further, ALSO_TRAINED_ON)

        self._held_out = [self._make_task(index, prompt) for index, prompt in enumerate(held_out)]
        _check_not_empty(config, len(self._rows), len(held_out), wanted, self.dropped)
        self._passes = ShuffledPasses(len(self._rows), seed=config.seed, shuffle=data.shuffle)

    def task(self, index: int) -> Task:
        """Return the task at position `index` of the stream."""
        return self._make_task(index, self._rows[self._passes.row_at(index)])

    def held_out(self) -> list[Task]:
        """Return the tasks for evaluation."""
        return self._held_out

    @property
    def training_rows(self) -> int:
        """Number of rows in one pass."""
        return len(self._rows)

    def _read_prompts(self, path: Path, data: DataConfig, encoder: BatchTokenizer) -> list[Prompt]:
        prompts = []
        for row in usable_rows(path, data, self.dropped):
            try:
                prompts.append((row, encoder.encode_prompt(row.prompt)))
            except RejectedRow as rejection:
                self.dropped.add(path, row.line, rejection)
        return prompts

    def _drop_prompts_of(self, others: list[Prompt], prompts: list[Prompt], reason: str) -> list[Prompt]:
        """Return the prompts whose text is not among the others. Counts the rest as dropped."""
        other_texts = {row.prompt for row, _ in others}
        remaining = []
        for prompt in prompts:
            row, _ = prompt
            if row.prompt in other_texts:
                self.dropped.add(row.file, row.line, RejectedRow(reason))
            else:
                remaining.append(prompt)
        return remaining

    @staticmethod
    def _make_task(index: int, prompt: Prompt) -> Task:
        row, tokens = prompt
        return make_task(index, row.prompt, tokens, row.answer, {"line": str(row.line)})


def usable_rows(path: Path, data: DataConfig, dropped: Rejections) -> Iterator[JsonlRow]:
    """Yield every row with a prompt and a reference answer, and count the others in `dropped`.

    Raises DataError for a file that is not JSON lines, and for a row without one of the fields.
    """
    _check_kind(path, data)
    field_map = FieldMap(data.prompt_field, data.answer_field, after_hashes=True)
    for raw in read_jsonl_rows(path):
        try:
            yield _parse_row(path, raw, field_map, data)
        except RejectedRow as rejection:
            if rejection.reason == "field missing":
                raise DataError(
                    f"{path}, line {raw.line}: {rejection}. Set data.prompt_field ({data.prompt_field!r}) and "
                    f"data.answer_field ({data.answer_field!r}) to fields that every row has"
                ) from None
            dropped.add(path, raw.line, rejection)


def check_rows(config: RunConfig) -> Rejections:
    """Read all rows that a run would read, without tokenizing, and return the rejected ones.

    Raises DataError for a missing file or field, and if no row is left.
    """
    data = config.data
    wanted = config.eval.prompts
    dropped = Rejections()
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
    """Lengths of a sample of the training prompts, in tokens."""

    rows: int
    """Usable rows of the training file, without those held out from it."""
    counted: int
    """Rows whose tokens were counted, evenly spread."""
    longest: int
    too_long: int
    """Counted rows above `limit`, which a run drops."""
    limit: int

    def __str__(self) -> str:
        counted = f"; of {self.counted:,} rows" if self.counted < self.rows else ""
        lengths = f"the longest prompt has {self.longest:,} tokens, {self.too_long:,} above the limit of {self.limit:,}"
        return f"{self.rows:,} rows{counted}; {lengths}"


def count_prompt_tokens(config: RunConfig, tokenizer: Tokenizer) -> PromptLengths:
    """Count the tokens of at most _MAX_COUNTED training prompts.

    Raises DataError for a missing file or field, and if no row is left. If none of the counted or of the held-out
    prompts is usable, all rows are tokenized, because then the run may not be able to start.
    """
    data = config.data
    wanted = config.eval.prompts
    limit = prompt_limit(config)
    assert data.path is not None
    encoder = BatchTokenizer(tokenizer, special_tokens=True, max_tokens=limit)
    prompts = [row.prompt for row in usable_rows(data.path, data, Rejections())]
    if data.eval_path is not None:
        held_out = [row.prompt for row in usable_rows(data.eval_path, data, Rejections())][:wanted]
    else:
        held_out = prompts[-wanted:]
        prompts = prompts[:-wanted]

    step = max(1, len(prompts) // _MAX_COUNTED)
    chosen = prompts[::step][:_MAX_COUNTED]
    lengths = [len(ids) for ids in encoder.encode_batch(chosen) if not isinstance(ids, RejectedRow)]

    has_usable_row = any(0 < length <= limit for length in lengths)
    if not has_usable_row or not _any_fits(held_out, encoder):
        JsonlSource(config, tokenizer)  # raises DataError with the number of rows per reason if no row is left
    too_long = sum(length > limit for length in lengths)
    return PromptLengths(len(prompts), len(chosen), max(lengths, default=0), too_long, limit)


def _any_fits(prompts: list[str], encoder: BatchTokenizer) -> bool:
    for prompt in prompts:
        try:
            encoder.encode_prompt(prompt)
        except RejectedRow:
            continue
        return True
    return False


def _parse_row(path: Path, raw: RawRow, field_map: FieldMap, data: DataConfig) -> JsonlRow:
    """Raise RejectedRow for an unusable row."""
    if raw.problem:
        raise RejectedRow("unreadable row", raw.problem)
    example = parse_example(raw.fields, field_map)
    if len(example.chat) > 1:
        raise RejectedRow(
            "not a text", f"the field {field_map.prompt!r} is a conversation. Use `async-grpo prepare` for those"
        )
    prompt = data.template.replace("{prompt}", example.question)
    check_characters(prompt, data.max_prompt_tokens)
    return JsonlRow(path, raw.line, prompt, example.answer)


def _check_kind(path: Path, data: DataConfig) -> None:
    """Raise DataError if the file is missing or not JSON lines."""
    key = "data.path" if path == data.path else "data.eval_path"
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(
            f"{key}: the file {path} {problem}. Set {key} to a JSON-lines file, or make one with async-grpo prepare"
        )
    kind = detect_kind(path)
    if kind in ("json", "parquet"):
        content = "one JSON array" if kind == "json" else "a Parquet file"
        raise DataError(
            f"{key}: {path} is {content}, not JSON lines. Run: async-grpo prepare {path} --out FOLDER --model MODEL, "
            "and set data.path to the folder"
        )
    if kind != "jsonl":
        raise DataError(f"{key}: {path} is {kind}, not JSON lines. Unpack it, or name the folder that it belongs to")


def _check_not_empty(config: RunConfig, training: int, held_out: int, wanted: int, dropped: Rejections) -> None:
    """Raise DataError if there are no training or no held-out rows. `wanted`: eval.prompts."""
    if training and held_out:
        return
    if not (training or held_out or dropped):
        raise DataError(f"{config.data.path} has no rows. Set data.path to a file with rows")
    raise DataError(
        f"{config.data.path} leaves {training} training rows and {held_out} held-out rows (dropped: "
        f"{dropped or 'none'}). eval.prompts holds out {wanted}: lower it or set data.eval_path; fix the dropped rows; "
        f"raise data.max_prompt_tokens or {config.rollout.limits.length_key} if prompts are too long"
    )

"""Tasks from a JSON-lines file: GSM8K as it is published, or any file with a prompt and an answer field.

    {"question": "Natalia sold ...", "answer": "... #### 72"}

The reference is the text after the last `####`, commas stripped, where the answer has one; else
the whole answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig
from async_grpo.config.data import DataConfig
from async_grpo.data.order import Passes
from async_grpo.data.source import Tokenizer, make_task, prompt_limit
from async_grpo.errors import DataError
from async_grpo.wire import Task

ALSO_HELD_OUT, ALSO_TRAINED_ON = "also held out", "also trained on"


@dataclass(frozen=True, slots=True)
class Row:
    """A usable line of the file, prompt in its template."""

    line: int
    prompt: str
    answer: str
    tokens: list[int]


class JsonlSource:
    """Training rows in reshuffled passes; held-out rows from `eval_path`, else the last of the file.

    A training row with the prompt of one of the first `kept` held-out rows (of any, unless it is given) is dropped;
    of the further held-out rows those with the prompt of a training row are. Raises DataError for a missing file or
    field (with the line number and the fix) and when no row is left.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, *, kept: int | None = None) -> None:
        self.dropped: Counter[str] = Counter()
        data, wanted = config.data, config.eval.prompts
        assert data.path is not None
        rows = self._usable(data.path, config, tokenizer)
        if data.eval_path is not None:
            held_out = self._usable(data.eval_path, config, tokenizer)[:wanted]
        else:
            rows, held_out = rows[:-wanted], rows[-wanted:]
        kept = len(held_out) if kept is None else kept
        self._rows = self._without(rows, held_out[:kept], ALSO_HELD_OUT)
        held_out = held_out[:kept] + self._without(held_out[kept:], self._rows, ALSO_TRAINED_ON)
        self._held_out = [self._task(index, row) for index, row in enumerate(held_out)]
        _check_not_empty(data, len(self._rows), len(held_out), wanted, self.dropped)
        self._passes = Passes(len(self._rows), seed=config.seed, shuffle=data.shuffle)

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

    def _usable(self, path: Path, config: RunConfig, tokenizer: Tokenizer) -> list[Row]:
        limit = prompt_limit(config)
        rows = []
        for line, prompt, answer in read_pairs(path, config.data, self.dropped):
            tokens = tokenizer.encode(prompt)
            if 0 < len(tokens) <= limit:
                rows.append(Row(line, prompt, answer, tokens))
            else:
                self.dropped["prompt too long" if tokens else "prompt without tokens"] += 1
        return rows

    def _without(self, rows: list[Row], others: list[Row], reason: str) -> list[Row]:
        """The rows with prompts that none of the others has."""
        prompts = {row.prompt for row in others}
        left = [row for row in rows if row.prompt not in prompts]
        self.dropped[reason] += len(rows) - len(left)
        self.dropped = +self.dropped
        return left

    @staticmethod
    def _task(index: int, row: Row) -> Task:
        return make_task(index, row.prompt, row.tokens, row.answer, {"line": str(row.line)})


def read_pairs(path: Path, data: DataConfig, dropped: Counter[str]) -> Iterator[tuple[int, str, str]]:
    """(line number, prompt in its template, reference) of every usable row; the others are counted."""
    for number, line in _lines(path):
        row = _parse(line)
        if row is None:
            dropped["not a JSON object"] += 1
            continue
        prompt = _field(row, data.prompt_field, "data.prompt_field", path, number)
        answer = reference(_field(row, data.answer_field, "data.answer_field", path, number))
        if prompt and answer:
            yield number, data.template.replace("{prompt}", prompt), answer
        else:
            dropped["empty answer" if prompt else "empty prompt"] += 1


def reference(answer: str) -> str:
    """The gold answer: after the last `####` with commas stripped, else the whole text.

    >>> reference("He pays 9 * 200 = 1800. #### 1,800")
    '1800'
    """
    _, mark, gold = answer.rpartition("####")
    return gold.replace(",", "").strip() if mark else answer.strip()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines, numbered from 1."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise DataError(
            f"data file {path} cannot be read ({error.strerror}). "
            "Set data.path (or data.eval_path) to a JSON-lines file"
        ) from error


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _field(row: dict[str, Any], name: str, key: str, path: Path, number: int) -> str:
    """The field as text; numbers are written out, anything else counts as empty."""
    if name not in row:
        raise DataError(
            f"{path}, line {number}: there is no field {name!r} (the row has {', '.join(row) or 'none'}). "
            f"Set {key} to the right one"
        )
    value = row[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value.strip() if isinstance(value, str) else ""


def _check_not_empty(data: DataConfig, training: int, held_out: int, wanted: int, dropped: Counter[str]) -> None:
    if training and held_out:
        return
    why = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "nothing dropped"
    raise DataError(
        f"{data.path} leaves {training} training rows and {held_out} held-out rows ({why}). "
        f"eval.prompts holds out {wanted}: lower it or set data.eval_path; "
        "raise data.max_prompt_tokens or rollout.vllm.max_model_len if prompts are too long"
    )

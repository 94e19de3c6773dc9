"""Tasks from a prepared folder, and folders that are refused with the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.checks.data import find_rejected_rows
from async_grpo.data.prepared_source import PreparedSource
from async_grpo.errors import DataError
from async_grpo.models.random_model import read_prompts
from async_grpo.models.tiny.arithmetic import build_char_tokenizer
from tests.support.data_cases import config_of, prepared
from tests.support.tokenizers import Bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """20 training rows and 5 held-out ones."""
    prepared(tmp_path, [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(25)], held_out=5)
    return tmp_path / "out"


def test_held_out_tasks_are_limited_by_the_folder_and_order_may_be_kept(folder: Path) -> None:
    source = PreparedSource(config_of(path=folder, prompts=99, shuffle=False), Bytes())
    assert len(source.held_out()) == 5
    first, second = ([source.task(index).prompt for index in range(start, start + 20)] for start in (0, 20))
    assert first == second and len(set(first)) == 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_prompt_tokens": 4}, "5 tokens.*--max-prompt-tokens 4"),
        ({"template": "Q: {prompt}"}, r"data\.template .*'Q: \{prompt\}'"),
        ({"eval_path": "test.jsonl"}, r"data\.eval_path"),
    ],
)
def test_settings_fixed_by_preparation_are_refused(folder: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PreparedSource(config_of(path=folder, longest=100, **data), Bytes())


class OneMore(Bytes):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1, *super().encode(text)]


@pytest.mark.parametrize("other", [OneMore, build_char_tokenizer])
def test_the_tokenizer_of_another_model_is_refused(folder: Path, other: Any) -> None:
    with pytest.raises(DataError, match=r"another tokenizer.*--model"):
        PreparedSource(config_of(path=folder), other())


def test_a_model_created_by_the_run_cannot_use_prepared_data(folder: Path) -> None:
    with pytest.raises(DataError, match=r"prepared folder.*model\.path"):
        list(read_prompts(config_of(path=folder)))


def test_wrong_files_are_refused_before_the_run_starts(folder: Path, tmp_path: Path) -> None:
    array, parquet = tmp_path / "a.json", tmp_path / "a.parquet"
    array.write_text("[{}]")
    parquet.write_bytes(b"PAR1....PAR1")
    (tmp_path / "empty").mkdir()
    for path, message in [
        (folder, ""),
        (tmp_path / "rows.jsonl", ""),
        (tmp_path / "gone", "does not exist"),
        (tmp_path / "empty", r"no readable prepared\.json"),
        (array, f"JSON array.*async-grpo prepare {array}"),
        (parquet, "Parquet.*async-grpo prepare"),
        (folder / "train.tokens", "part of a prepared folder"),
    ]:
        if not message:
            assert find_rejected_rows(config_of(path=path)) == {}
            continue
        with pytest.raises(DataError, match=message):
            find_rejected_rows(config_of(path=path))
    with (folder / "train.tokens").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="damaged"):
        find_rejected_rows(config_of(path=folder))
    (folder / "prepared.json").write_text("[" * 20_000 + "]" * 20_000)
    with pytest.raises(DataError, match="damaged"):
        find_rejected_rows(config_of(path=folder))

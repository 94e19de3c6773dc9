"""Tasks from a prepared folder: the contract of every source, and what is refused with the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.preflight import check_data
from async_grpo.config import RunConfig
from async_grpo.config.data import PrepareConfig
from async_grpo.data import make_source
from async_grpo.data.prepare.pipeline import prepare
from async_grpo.data.prepared_source import PreparedSource
from async_grpo.errors import DataError
from async_grpo.models.random_model import prompt_texts
from async_grpo.models.tiny_qwen2 import build_char_tokenizer
from tests.support.tokenizers import Bytes


def config_of(path: Path, seed: int = 1, prompts: int = 2, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "seed": seed,
            "model": {"random": {}},
            "data": {"kind": "jsonl", "path": path, **data},
            "sampling": {"max_tokens": 32},
            "rollout": {"vllm": {"max_model_len": 100}},
            "eval": {"prompts": prompts},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """20 training rows and 5 held-out ones."""
    file = tmp_path / "rows.jsonl"
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(25)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"files": [file], "out": tmp_path / "prepared", "model": tmp_path, "held_out": 5}
    prepare(PrepareConfig.model_validate(options), Bytes(), lambda done: None)
    return tmp_path / "prepared"


def test_a_folder_in_data_path_is_a_source_like_any_other(folder: Path) -> None:
    source = make_source(config_of(folder), Bytes())
    assert isinstance(source, PreparedSource)
    task = source.task(27)
    assert task.index == 27
    assert bytes(task.prompt_ids().tolist()).decode() == task.prompt
    assert int(task.answer) == int(task.prompt.split("+")[0]) + 1
    assert source.dropped == {}


def test_every_pass_visits_each_row_once_in_another_order(folder: Path) -> None:
    source = PreparedSource(config_of(folder), Bytes())
    passes = [[source.task(index).prompt for index in range(start, start + 20)] for start in (0, 20)]
    assert sorted(passes[0]) == sorted(passes[1]) and len(set(passes[0])) == 20
    assert passes[0] != passes[1]
    unshuffled = PreparedSource(config_of(folder, shuffle=False), Bytes())
    assert [unshuffled.task(index).prompt for index in range(20)] == [
        unshuffled.task(index).prompt for index in range(20, 40)
    ]


def test_a_server_that_starts_later_goes_on_with_the_same_tasks(folder: Path) -> None:
    """The position is the index alone: nothing else is kept anywhere."""
    first = PreparedSource(config_of(folder), Bytes())
    expected = [first.task(index) for index in range(60)]
    later = PreparedSource(config_of(folder), Bytes())
    assert [later.task(index) for index in range(33, 60)] == expected[33:]
    assert later.task(10**12).prompt in {task.prompt for task in expected}


def test_held_out_tasks_are_as_many_as_wanted_and_never_trained(folder: Path) -> None:
    source = PreparedSource(config_of(folder, prompts=3), Bytes())
    held_out = {task.prompt for task in source.held_out()}
    assert len(held_out) == 3
    assert held_out.isdisjoint(source.task(index).prompt for index in range(60))
    assert len(PreparedSource(config_of(folder, prompts=99), Bytes()).held_out()) == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_prompt_tokens": 4}, r"has 5 tokens, but 4 is the most.*--max-prompt-tokens 4"),
        ({"template": "Q: {prompt}"}, r"data.template \('Q: \{prompt\}'\) would do nothing"),
        ({"eval_path": "test.jsonl"}, r"data.eval_path .* would do nothing"),
    ],
)
def test_settings_that_preparation_has_settled_are_refused(folder: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PreparedSource(config_of(folder, **data), Bytes())


class OneMore(Bytes):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1, *super().encode(text)]


@pytest.mark.parametrize("other", [OneMore, build_char_tokenizer])
def test_the_tokenizer_of_another_model_is_noticed(folder: Path, other: Any) -> None:
    with pytest.raises(DataError, match=r"another tokenizer.*Prepare the data again with --model"):
        PreparedSource(config_of(folder), other())


def test_a_model_that_the_run_makes_cannot_have_prepared_data(folder: Path) -> None:
    with pytest.raises(DataError, match=r"is a prepared folder.*Give model.path"):
        list(prompt_texts(config_of(folder)))


def test_wrong_files_are_named_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    array, parquet = tmp_path / "a.json", tmp_path / "a.parquet"
    array.write_text("[{}]")
    parquet.write_bytes(b"PAR1....PAR1")
    (tmp_path / "empty").mkdir()
    for path, message in [
        (folder, ""),
        (tmp_path / "rows.jsonl", ""),
        (tmp_path / "gone", "is not there"),
        (tmp_path / "empty", "has no prepared.json"),
        (array, f"is one JSON array, not JSON lines. Type: async-grpo prepare {array}"),
        (parquet, "is a Parquet file, not JSON lines. Type: async-grpo prepare"),
        (folder / "train.tokens", "is a part of a prepared folder"),
    ]:
        if not message:
            assert check_data(config_of(path)) == {}
            continue
        with pytest.raises(DataError, match=re.escape(message)):
            check_data(config_of(path))
    with (folder / "train.tokens").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="prepared data are damaged"):
        check_data(config_of(folder))
    (folder / "prepared.json").write_text("[" * 20_000 + "]" * 20_000)
    with pytest.raises(DataError, match="prepared data are damaged"):
        check_data(config_of(folder))

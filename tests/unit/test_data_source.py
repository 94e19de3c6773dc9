"""Task sources: deterministic, endless, disjoint from what is held out; errors that say where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import RunConfig
from async_grpo.data.arithmetic_source import ArithmeticSource
from async_grpo.data.jsonl import JsonlSource, reference
from async_grpo.errors import DataError

GSM8K = Path(
    os.environ.get("ASYNC_GRPO_GSM8K") or Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"
)

TWO = {"digits": 2, "held_out": 8}


class Bytes:
    """A tokenizer with a token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode()


def config_of(seed: int = 1, prompts: int = 2, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "seed": seed,
            "model": {"random": {}},
            "data": data,
            "sampling": {"max_tokens": 32},
            "rollout": {"vllm": {"max_model_len": 1024}},
            "eval": {"prompts": prompts},
        }
    )


def jsonl(path: Path, rows: list[Any], **data: Any) -> JsonlSource:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return JsonlSource(config_of(kind="jsonl", path=path, **data), Bytes())


def questions(count: int) -> list[Any]:
    return [{"question": f"q{number}", "answer": f"so #### {number}"} for number in range(count)]


def test_every_pass_visits_each_row_once_in_another_order(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", questions(22))
    first = [source.task(index).prompt for index in range(20)]
    second = [source.task(index).prompt for index in range(20, 40)]
    assert sorted(first) == sorted(second) == sorted(f"q{number}" for number in range(20))
    assert first != second


def test_the_stream_is_a_function_of_seed_and_index(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "d.jsonl", questions(30))
    again = jsonl(tmp_path / "d.jsonl", questions(30))
    assert one.task(77) == again.task(77)
    other = JsonlSource(config_of(seed=2, kind="jsonl", path=tmp_path / "d.jsonl"), Bytes())
    assert [one.task(i).prompt for i in range(28)] != [other.task(i).prompt for i in range(28)]


def test_the_last_rows_are_held_out_and_never_trained(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", [*questions(10), {"question": "q3", "answer": "#### 3"}])
    held_out = {task.prompt for task in source.held_out()}
    assert held_out == {"q9", "q3"}
    assert held_out.isdisjoint(source.task(index).prompt for index in range(50))
    assert source.dropped == {"also held out": 1}


def test_a_file_of_its_own_may_be_held_out(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"question": "held", "answer": "#### 1"}\n')
    source = jsonl(tmp_path / "d.jsonl", questions(5), eval_path=tmp_path / "eval.jsonl")
    assert [task.prompt for task in source.held_out()] == ["held"]
    assert source.training_rows == 5


def test_who_holds_out_more_than_the_run_did_gets_no_prompt_that_it_trains_on(tmp_path: Path) -> None:
    held_out = ["q1", "new", "q3", "newer", "q4"]
    (tmp_path / "eval.jsonl").write_text("".join(f'{{"question": "{q}", "answer": "1"}}\n' for q in held_out))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions(5)))
    data = {"kind": "jsonl", "path": tmp_path / "d.jsonl", "eval_path": tmp_path / "eval.jsonl"}
    run = JsonlSource(config_of(prompts=2, **data), Bytes())
    more = JsonlSource(config_of(prompts=4, **data), Bytes(), kept=2)
    assert [task.prompt for task in more.held_out()] == ["q1", "new", "newer"]
    assert more.held_out()[:2] == run.held_out() and more.task(7) == run.task(7)
    assert more.dropped == {"also held out": 1, "also trained on": 1}


def test_the_prompt_goes_into_its_template(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", questions(3), template="Q: {prompt}\nA:", shuffle=False)
    task = source.task(0)
    assert task.prompt == "Q: q0\nA:"
    assert bytes(task.prompt_ids().tolist()) == b"Q: q0\nA:"
    assert task.metadata == {"line": "1"}


def test_rows_that_cannot_be_used_are_dropped_and_counted(tmp_path: Path) -> None:
    bad = [
        "not json",
        "[1]",
        {"question": "", "answer": "1"},
        {"question": "q", "answer": "####"},
        {"question": "q" * 99, "answer": "1"},
    ]
    source = jsonl(tmp_path / "d.jsonl", [*bad, *questions(4)], max_prompt_tokens=50)
    assert source.dropped == {"not a JSON object": 2, "empty prompt": 1, "empty answer": 1, "prompt too long": 1}
    assert source.training_rows == 2


def test_a_missing_field_is_an_error_with_its_line_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: there is no field 'question' \(the row has problem\).*prompt_field"):
        jsonl(tmp_path / "d.jsonl", [*questions(1), {"problem": "x"}])


def test_a_missing_file_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl cannot be read.*data\.path"):
        JsonlSource(config_of(kind="jsonl", path=tmp_path / "gone.jsonl"), Bytes())


def test_a_file_with_nothing_left_to_train_on_is_an_error_with_the_counts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 training rows and 2 held-out rows"):
        jsonl(tmp_path / "d.jsonl", questions(2))


@pytest.mark.parametrize(
    ("answer", "gold"), [("a 1,8 b #### 1,800", "1800"), ("x\n#### -5\n", "-5"), (" plain, text ", "plain, text")]
)
def test_the_reference_stands_behind_the_last_hashes(answer: str, gold: str) -> None:
    assert reference(answer) == gold


def test_arithmetic_tasks_are_deterministic_and_not_held_out() -> None:
    source = ArithmeticSource(config_of(prompts=64), Bytes())
    again = ArithmeticSource(config_of(prompts=64), Bytes())
    stream = [source.task(index) for index in range(200)]
    assert stream == [again.task(index) for index in range(200)]
    assert {task.prompt for task in source.held_out()}.isdisjoint(task.prompt for task in stream)
    left, right = stream[0].prompt.rstrip("=").split("+")
    assert stream[0].answer == str(int(left) + int(right))


def test_a_template_that_leaves_no_room_for_a_completion_is_an_error_with_the_fix() -> None:
    with pytest.raises(DataError, match=r"takes 1006 tokens, but 992.*max_model_len \(1024\).*data\.template"):
        ArithmeticSource(config_of(template="x" * 1000 + "{prompt}", max_prompt_tokens=2000, arithmetic=TWO), Bytes())
    with pytest.raises(DataError, match=r"but 5 is the most: data\.max_prompt_tokens is 5,"):
        ArithmeticSource(config_of(max_prompt_tokens=5, arithmetic=TWO), Bytes())
    assert ArithmeticSource(config_of(max_prompt_tokens=6, arithmetic=TWO), Bytes()).task(7).prompt


@pytest.mark.skipif(not GSM8K.exists(), reason=f"no GSM8K at {GSM8K}; set ASYNC_GRPO_GSM8K to its train.jsonl")
def test_gsm8k_as_published_can_be_used() -> None:
    source = JsonlSource(config_of(prompts=100, kind="jsonl", path=GSM8K, max_prompt_tokens=600), Bytes())
    assert source.training_rows + len(source.held_out()) + sum(source.dropped.values()) == 7473
    assert set(source.dropped) <= {"prompt too long", "also held out"}
    assert all(float(source.task(index).answer) is not None for index in range(source.training_rows))

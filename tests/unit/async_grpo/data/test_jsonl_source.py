"""Tasks from JSON lines and arithmetic: held-out rows, dropped rows, and errors with their place."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.checks.data import find_rejected_rows
from async_grpo.data.arithmetic import ArithmeticSource
from async_grpo.data.jsonl import JsonlSource
from async_grpo.data.prepare.formats import extract_reference
from async_grpo.errors import DataError
from tests.support.data_cases import config_of, questions, written
from tests.support.gsm8k import TRAIN, needs_gsm8k
from tests.support.tokenizers import Bytes

TWO = {"digits": 2, "held_out": 8}


def jsonl(path: Path, rows: list[Any], **data: Any) -> JsonlSource:
    return JsonlSource(config_of(path=written(path, rows), **data), Bytes())


def test_the_last_rows_are_held_out_and_never_trained(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", [*questions(10), {"question": "q3", "answer": "#### 3"}])
    held_out = {task.prompt for task in source.held_out()}
    assert held_out == {"q9", "q3"}
    assert held_out.isdisjoint(source.task(index).prompt for index in range(50))
    assert source.dropped == {"also held out": 1}


def test_held_out_rows_may_come_from_a_separate_file(tmp_path: Path) -> None:
    written(tmp_path / "eval.jsonl", [{"question": "held", "answer": "#### 1"}])
    source = jsonl(tmp_path / "d.jsonl", questions(5), eval_path=tmp_path / "eval.jsonl")
    assert [task.prompt for task in source.held_out()] == ["held"]
    assert source.training_rows == 5


def test_an_evaluation_with_more_held_out_rows_gets_no_trained_prompt(tmp_path: Path) -> None:
    held_out = ["q1", "new", "q3", "newer", "q4"]
    eval_path = written(tmp_path / "eval.jsonl", [{"question": question, "answer": "1"} for question in held_out])
    data = {"path": written(tmp_path / "d.jsonl", questions(5)), "eval_path": eval_path}
    run = JsonlSource(config_of(prompts=2, **data), Bytes())
    more = JsonlSource(config_of(prompts=4, **data), Bytes(), held_out_by_run=2)
    assert [task.prompt for task in more.held_out()] == ["q1", "new", "newer"]
    assert more.held_out()[:2] == run.held_out() and more.task(7) == run.task(7)
    assert more.dropped == {"also held out": 1, "also trained on": 1}


def test_prompts_are_rendered_in_the_template(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", questions(3), template="Q: {prompt}\nA:", shuffle=False)
    task = source.task(0)
    assert task.prompt == "Q: q0\nA:"
    assert bytes(task.prompt_ids().tolist()) == b"Q: q0\nA:"
    assert task.metadata == {"line": "1"}


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    bad = [
        "not json",
        "[1]",
        {"question": "", "answer": "1"},
        {"question": "q", "answer": "####"},
        {"question": "q" * 99, "answer": "1"},
    ]
    source = jsonl(tmp_path / "d.jsonl", [*questions(4), *bad, *questions(2)], max_prompt_tokens=50)
    assert source.dropped == {
        "unreadable row": 2,
        "empty prompt": 1,
        "empty answer": 1,
        "prompt too long": 1,
        "also held out": 2,
    }
    assert source.training_rows == 2


HOSTILE = [
    (b"[" * 20_000 + b"]" * 20_000, "unreadable row", "not JSON (RecursionError"),
    (b'{"question": "\\ud800", "answer": "1"}', "no Unicode", "half a character (a lone surrogate)"),
    (b'{"question": "q", "answer": "\\udfff"}', "no Unicode", "half a character (a lone surrogate)"),
    (b'{"question": "caf\xe9", "answer": "1"}', "unreadable row", "not UTF-8"),
    (b'{"question": "q", "answer": NaN}', "unreadable row", "not JSON (ValueError: NaN is not JSON"),
    (b'{"question": "q", "answer": -Infinity}', "unreadable row", "not JSON (ValueError: -Infinity"),
    (b'{"question": "q", "answer": true}', "not a text", "the field 'answer' is a bool"),
    (b'{"question": "' + b"x" * (50 << 20) + b'", "answer": "1"}', "unreadable row", "above 16777216 bytes"),
    (b'{"question": "' + b"x" * (15 << 20) + b'", "answer": "1"}', "prompt too long", "15728640 characters"),
]


@pytest.mark.parametrize(("line", "reason", "detail"), HOSTILE, ids=[detail[:36] for _, _, detail in HOSTILE])
def test_a_hostile_row_is_reported_and_others_are_used(tmp_path: Path, line: bytes, reason: str, detail: str) -> None:
    """Source and startup check agree, in processor time that does not depend on the row."""
    path = tmp_path / "d.jsonl"
    good = [json.dumps(row).encode() for row in questions(5)]
    path.write_bytes(b"\n".join([good[0], line, *good[1:], b""]))
    config, started = config_of(path=path), time.process_time()
    source, rejected = JsonlSource(config, Bytes()), find_rejected_rows(config)
    assert time.process_time() - started < 3.0
    assert source.dropped == rejected == {reason: 1}
    assert source.dropped.first == rejected.first
    assert f"1 {reason} (d.jsonl, line 2: {detail}" in str(rejected)
    assert source.training_rows == 3


def test_a_conversation_is_referred_to_prepare(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    source = jsonl(tmp_path / "d.jsonl", [{"question": said, "answer": "1"}, *questions(4)])
    assert re.search("line 1: .*'question'.*`async-grpo prepare`", str(source.dropped))


@pytest.mark.parametrize(
    ("data", "rows", "message"),
    [
        ({"prompt_field": "problem"}, 5, r"line 1: .*'problem'.*data\.prompt_field"),
        ({}, [*questions(1), {"problem": "x"}], "line 2: .*'question'.*problem"),
        ({}, 2, "0 training rows .*2 held-out"),
        ({"eval_path": "."}, 5, r"data\.eval_path.*folder"),
        ({"path": "gone.jsonl"}, 5, r"gone\.jsonl .*data\.path"),
    ],
)
def test_unusable_data_are_refused_by_check_and_source(
    tmp_path: Path, data: dict[str, Any], rows: int | list[Any], message: str
) -> None:
    path = written(tmp_path / "d.jsonl", questions(rows) if isinstance(rows, int) else rows)
    config = config_of(**{"path": path, **data})
    for use in (find_rejected_rows, lambda config: JsonlSource(config, Bytes())):
        with pytest.raises(DataError, match=message):
            use(config)


@pytest.mark.parametrize(
    ("answer", "gold"), [("a 1,8 b #### 1,800", "1800"), ("x\n#### -5\n", "-5"), (" plain, text ", "plain, text")]
)
def test_the_reference_follows_the_last_hashes(answer: str, gold: str) -> None:
    assert extract_reference(answer) == gold


def test_a_template_too_long_for_a_completion_is_refused_with_the_fix() -> None:
    with pytest.raises(DataError, match=r"1006 tokens.* 992: .*max_model_len \(1024\).*data\.template"):
        ArithmeticSource(config_of(template="x" * 1000 + "{prompt}", max_prompt_tokens=2000, arithmetic=TWO), Bytes())
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens is 5\b"):
        ArithmeticSource(config_of(max_prompt_tokens=5, arithmetic=TWO), Bytes())
    assert ArithmeticSource(config_of(max_prompt_tokens=6, arithmetic=TWO), Bytes()).task(7).prompt


@needs_gsm8k
def test_gsm8k_as_published_is_usable_and_checked_quickly() -> None:
    config = config_of(prompts=100, path=TRAIN, max_prompt_tokens=600)
    source = JsonlSource(config, Bytes())
    assert source.training_rows + len(source.held_out()) + source.dropped.total() == 7473
    assert set(source.dropped) <= {"prompt too long", "also held out"}
    assert all(float(source.task(index).answer) is not None for index in range(source.training_rows))
    started = time.process_time()
    assert find_rejected_rows(config_of(prompts=100, path=TRAIN)) == {}
    assert time.process_time() - started < 2.0

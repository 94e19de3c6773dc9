"""Parsing rows to questions and references, and rendering prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.data.base import RejectedRow
from async_grpo.data.prepare.formats import FORMATS, FieldMap, detect_format, parse_example
from async_grpo.data.prepare.templates import Template
from async_grpo.errors import ConfigError
from tests.support.tokenizers import Bytes

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + 1? "}]
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "1 + 1?", "answer": "1 + 1 = 2 #### 1,002"},
    "deepscaler": {"problem": "1 + 1?", "answer": "\\frac{4}{2}", "solution": "long"},
    "dapo": {"prompt": CHAT, "reward_model": {"ground_truth": "2", "style": "rule"}, "data_source": "math"},
    "alpaca": {"instruction": "Add.", "input": "1 + 1", "output": "# Result #### 2"},
}
WANTED = {
    "gsm8k": ("1 + 1?", "1002"),
    "deepscaler": ("1 + 1?", "\\frac{4}{2}"),
    "dapo": ("1 + 1?", "2"),
    "alpaca": ("Add.\n\n1 + 1", "# Result #### 2"),
}


def test_every_format_is_detected_and_parsed() -> None:
    assert {name: detect_format(row) for name, row in ROWS.items()} == {name: name for name in FORMATS}
    assert detect_format({"text": "a", "answer": "b"}) is None
    examples = {name: parse_example(row, FORMATS[name]) for name, row in ROWS.items()}
    assert {name: (example.question, example.answer) for name, example in examples.items()} == WANTED


def test_custom_fields_may_be_nested() -> None:
    row = {"task": {"text": 7}, "gold": "so #### 3", "level": 5, "a.b": "dotted"}
    field_map = FieldMap("task.text", "gold", after_hashes=True)
    example = parse_example(row, field_map, metadata_fields=["level", "a.b", "absent"])
    assert (example.question, example.answer) == ("7", "3")
    assert example.metadata == {"level": "5", "a.b": "dotted"}


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"answer": "1"}, "field missing", "'question'.*answer"),
        ({"question": "q"}, "field missing", "'answer'"),
        ({"question": " ", "answer": "1"}, "empty prompt", "'question'"),
        ({"question": "q", "answer": "so ####  "}, "empty answer", "no reference"),
        ({"question": None, "answer": "1"}, "not a text", "NoneType"),
        ({"question": "q", "answer": ["1"]}, "not a text", "list"),
        ({"question": "q", "answer": True}, "not a text", "bool"),
        ({"question": [], "answer": "1"}, "no chat", "not of messages"),
        ({"question": ["q"], "answer": "1"}, "no chat", "not of messages"),
        ({"question": [{"role": "assistant", "content": "q"}], "answer": "1"}, "no chat", "role 'assistant'"),
        ({"question": "q\ud800", "answer": "1"}, "no Unicode", "position 1"),
    ],
)
def test_an_unusable_row_is_rejected_with_reason_and_detail(row: dict[str, Any], reason: str, detail: str) -> None:
    with pytest.raises(RejectedRow, match=detail) as raised:
        parse_example(row, FORMATS["gsm8k"])
    assert raised.value.reason == reason


def test_identity_ignores_white_space_and_unicode_composition() -> None:
    def identity(question: str) -> str:
        return parse_example({"question": question, "answer": "1"}, FORMATS["gsm8k"]).identity

    assert identity("caf\u00e9  at\n8?") == identity("cafe\u0301 at 8?") != identity("cafe at 8?")


class Tokenizer(Bytes):
    """The attributes of a tokenizer that templates use."""

    bos_token, eos_token = "<s>", None
    chat_template = "there is one"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"


def rendered(name: str, row: dict[str, Any], system: str = "") -> str:
    detected = detect_format(row)
    return Template(name, Tokenizer(), system).render(parse_example(row, FORMATS[detected]))


def test_qwen_r1_requests_thinking_an_answer_and_a_box() -> None:
    text = rendered("qwen_r1", ROWS["gsm8k"])
    assert text.endswith("<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert all(wanted in text for wanted in ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{"))


@pytest.mark.parametrize(
    ("name", "row", "system", "text"),
    [
        ("raw", "gsm8k", "", "1 + 1?"),
        ("chat", "gsm8k", "", "[user]1 + 1?[assistant]"),
        ("chat", "dapo", "", "[system]Be brief.[user]1 + 1?[assistant]"),
        ("chat", "dapo", "Be kind.", "[system]Be kind.[user]1 + 1?[assistant]"),
    ],
)
def test_raw_and_chat_templates(name: str, row: str, system: str, text: str) -> None:
    assert rendered(name, ROWS[row], system) == text


def test_a_jinja_file_gets_question_chat_system_and_tokens(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ eos_token }}{{ system }}|{{ messages | length }}|{{ question }}\n")
    assert rendered(str(file), ROWS["dapo"], system="S") == "<s>S|2|1 + 1?\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ question", "line 1: "),
        ("{{ question }} {{ answer }}", "'answer' is undefined"),
        ("Solve it.", "does not contain the question"),
        ("{{ question }}{{ question.__class__.__mro__ }}", "cannot be rendered"),
        ("{% include '/etc/passwd' %}{{ question }}", "cannot be rendered"),
        ("{% set a = messages.append(1) %}{{ question }}", "cannot be rendered"),
        ("{% for i in range(10000000) %}{% endfor %}{{ question }}", "cannot be rendered"),
    ],
)
def test_an_unusable_template_is_refused_before_any_row(tmp_path: Path, source: str, message: str) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        Template(str(file), Tokenizer())


class Plain(Tokenizer):
    chat_template = ""


@pytest.mark.parametrize(
    ("name", "tokenizer", "system", "message"),
    [
        ("gone", Tokenizer(), "", "raw, qwen_r1, chat"),
        ("chat", Plain(), "", r"no chat template.*qwen_r1"),
        ("raw", Tokenizer(), "Be kind.", "raw "),
    ],
)
def test_a_missing_template_is_refused_with_the_fix(name: str, tokenizer: Tokenizer, system: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Template(name, tokenizer, system)


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("1,800", "1800"),
        ("$1,234,567.50", "$1234567.50"),
        ("-1,800 dollars", "-1800 dollars"),
        ("(1,2)", "(1,2)"),
        ("(1,200)", "(1,200)"),
        ("3, 4", "3, 4"),
        ("1,2,3", "1,2,3"),
        ("yes, it does", "yes, it does"),
    ],
)
def test_only_thousands_separators_are_removed_from_a_reference(written: str, reference: str) -> None:
    row = {"question": "q", "answer": f"so #### {written}"}
    assert parse_example(row, FORMATS["gsm8k"]).answer == reference

"""Preparing data: what is taken, what is not and why, the same bytes each time, and that damage is noticed."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from async_grpo.config.data import PrepareConfig
from async_grpo.config.model import RandomModelConfig
from async_grpo.data.prepare.pipeline import BATCH_ROWS, prepare_dataset
from async_grpo.data.prepared_dataset import open_prepared_folder
from async_grpo.errors import ConfigError, DataError
from async_grpo.models.tiny.arithmetic import build_char_tokenizer
from async_grpo.models.tiny.random_qwen2 import train_tokenizer
from tests.support.data_cases import prepared, questions, written
from tests.support.gsm8k import TEST, TRAIN, needs_gsm8k
from tests.support.tokenizers import Bytes


def prompts(folder: Path) -> tuple[list[str], list[str]]:
    """Prompts of the training rows and of the held-out rows, in order."""
    prepared_set = open_prepared_folder(folder)
    splits = (prepared_set.train, prepared_set.held_out)
    train, held_out = [[split.read_row(row)[1].prompt for row in range(len(split))] for split in splits]
    prepared_set.close()
    return train, held_out


def rejected(folder: Path) -> list[tuple[int, str]]:
    notes = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert all(note["file"] and note["detail"] for note in notes)
    return [(note["line"], note["reason"]) for note in notes]


def test_each_row_is_in_one_split_with_tokens_reference_and_line(tmp_path: Path) -> None:
    prepared(tmp_path, questions(20), keep_fields=["answer"])
    train, held_out = prompts(tmp_path / "out")
    assert (len(train), len(held_out)) == (18, 2)
    assert sorted(train + held_out) == sorted(f"q{number}" for number in range(20))
    tokens, row = open_prepared_folder(tmp_path / "out").train.read_row(0)
    number = int(row.prompt[1:])
    assert bytes(np.frombuffer(tokens, "<i4").tolist()).decode() == row.prompt
    assert row.answer == str(number)
    assert row.metadata == {"line": str(number + 1), "file": "rows.jsonl", "answer": f"so #### {number}"}


def test_rejected_rows_are_listed_with_line_and_reason(tmp_path: Path) -> None:
    bad = [
        "not json",
        "[1]",
        {"question": "", "answer": "1"},
        {"question": "q", "answer": "####"},
        {"problem": "q", "answer": "1"},
        {"question": "x" * 51, "answer": "1"},
        {"question": " q1 ", "answer": "1"},
    ]
    manifest, rejections = prepared(tmp_path, [*questions(5), *bad], max_prompt_tokens=50)
    reasons = ["unreadable row"] * 2 + ["empty prompt", "empty answer", "field missing", "prompt too long", "duplicate"]
    assert sorted(rejected(tmp_path / "out")) == list(zip(range(6, 13), reasons, strict=True))
    assert manifest.rejected == Counter(reasons)
    assert rejections.first["duplicate"] == "rows.jsonl, line 12: the question is already in line 2"
    assert rejections.first["prompt too long"].endswith("51 tokens, and the limit is 50")


def test_equal_arguments_make_equal_bytes_and_another_seed_another_order(tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepared(tmp_path, questions(50), out=tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    assert len(files) == 8
    prepared(tmp_path, questions(50), out=tmp_path / "three", seed=2)
    assert prompts(tmp_path / "one") != prompts(tmp_path / "three")
    assert prompts(tmp_path / "one")[0] != [f"q{number}" for number in range(48)]


def test_rows_of_a_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    test = written(tmp_path / "test.jsonl", [*questions(3), *questions(1)])
    prepared(tmp_path, questions(10), held_out_from=[test], shuffle=False)
    assert prompts(tmp_path / "out") == ([f"q{number}" for number in range(3, 10)], ["q0", "q1", "q2"])
    assert rejected(tmp_path / "out") == [(4, "duplicate"), *((line, "also held out") for line in (1, 2, 3))]


def test_duplicates_may_be_kept_but_not_of_held_out_rows(tmp_path: Path) -> None:
    test = written(tmp_path / "test.jsonl", questions(1))
    prepared(tmp_path, [*questions(2), *questions(2)], held_out_from=[test], keep_duplicates=True)
    assert prompts(tmp_path / "out")[0] == ["q1", "q1"]


def test_files_of_several_formats_become_one_set(tmp_path: Path) -> None:
    array = tmp_path / "deepscaler.json"
    array.write_text(json.dumps([{"problem": f"p{n}", "answer": str(n), "solution": ""} for n in range(3)], indent=1))
    chat = [{"role": "user", "content": "c"}]
    dapo = written(tmp_path / "dapo.jsonl", [{"prompt": chat, "reward_model": {"ground_truth": "34"}}])
    alpaca = written(tmp_path / "alpaca.jsonl", [{"instruction": "i", "input": "", "output": "o"}])
    gsm8k = written(tmp_path / "gsm8k.jsonl", questions(1))
    prepared(tmp_path, [], files=[array, dapo, alpaca, gsm8k], shuffle=False, held_out=1)
    assert prompts(tmp_path / "out") == (["p0", "p1", "p2", "c", "i"], ["q0"])


def test_fields_that_fit_no_format_are_listed_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: .*text, gold.*--format generic"):
        prepared(tmp_path, [{"text": "q", "gold": "1"}])
    named = {"format": "generic", "prompt_field": "text", "answer_field": "gold"}
    prepared(tmp_path, [{"text": f"q{n}", "gold": "1"} for n in range(3)], **named)
    assert len(prompts(tmp_path / "out")[0]) == 1


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (0, {}, r"\b0 rows.*--held-out .*2"),
        (2, {}, r"\b2 rows.*--held-out below 2"),
        (9, {"max_prompt_tokens": 1}, r"9 prompt too long \(rows.jsonl, line 1: 2 tokens"),
        (5, {"template": "gone"}, "raw, qwen_r1, chat"),
    ],
)
def test_too_few_rows_or_a_wrong_template_write_nothing(
    tmp_path: Path, rows: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        prepared(tmp_path, questions(rows), **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    prepared(tmp_path, questions(5))
    before = (tmp_path / "out" / "prepared.json").read_bytes()
    with pytest.raises(DataError, match=r"out exists.*--out"):
        prepared(tmp_path, questions(7))
    assert (tmp_path / "out" / "prepared.json").read_bytes() == before


def test_without_shuffling_rows_keep_their_order_and_the_last_are_held_out(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 3
    prepared(tmp_path, questions(count), shuffle=False)
    train, held_out = prompts(tmp_path / "out")
    assert train + held_out == [f"q{number}" for number in range(count)] and len(held_out) == 2


def test_a_refusal_by_tokenizer_or_template_drops_only_that_row(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% if question == '2+2=' %}{{ undefined_here }}{% endif %}{{ question }}")
    rows = [{"question": text, "answer": "1"} for text in ("1+1=", "1+x=", "2+2=", "3+3=", "4+4=")]
    prepared(tmp_path, rows, tokenizer=build_char_tokenizer(), held_out=1, template=str(template))
    reasons = [(2, "refused by the tokenizer"), (3, "refused by the template")]
    assert sorted(rejected(tmp_path / "out")) == reasons
    assert len(prompts(tmp_path / "out")[0]) == 2


def test_a_fast_tokenizer_encodes_batches_like_single_texts(tmp_path: Path) -> None:
    texts = [f"How much is {n} and {n * n}, café 🙂 {'  ' * n}?" for n in range(40)]
    tokenizer = train_tokenizer(RandomModelConfig(vocab_size=400), texts)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=200)
    prepared(tmp_path, [{"question": text, "answer": "1"} for text in texts], tokenizer=tokenizer)
    train = open_prepared_folder(tmp_path / "out").train
    for index in range(len(train)):
        tokens, row = train.read_row(index)
        assert np.frombuffer(tokens, "<i4").tolist() == tokenizer.encode(row.prompt)
        assert len(tokens) > 5 * 4


def test_the_files_can_be_read_without_this_project(tmp_path: Path) -> None:
    """By the documented format: 16 bytes of header, int32 tokens, uint64 pairs, MessagePack maps."""
    prepared(tmp_path, questions(5), shuffle=False)
    tokens, index, records = (
        (tmp_path / "out" / f"train.{part}").read_bytes() for part in ("tokens", "index", "records")
    )
    assert [struct.unpack("<8sHH4x", data[:16]) for data in (tokens, index, records)] == [
        (b"AGRPODAT", 1, kind) for kind in range(3)
    ]
    pairs = np.frombuffer(index[16:], "<u8").reshape(-1, 2)
    assert len(pairs) == 3 + 1
    (first, record), (end, record_end) = pairs[1], pairs[2]
    assert np.frombuffer(tokens[16:], "<i4")[first:end].tolist() == list(b"q1")
    assert msgpack.unpackb(records[16 + record : 16 + record_end]) == {
        "prompt": "q1",
        "answer": "1",
        "metadata": {"line": "2", "file": "rows.jsonl"},
    }


@pytest.mark.parametrize("part", ["train.tokens", "train.index", "held_out.records"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_damage_to_any_file_is_detected_before_a_row_is_read(tmp_path: Path, part: str, damage: str) -> None:
    prepared(tmp_path, questions(9))
    file = tmp_path / "out" / part
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes({"flip": bytes(data), "cut": data[:-4], "grow": data + bytes(4)}[damage])
    with pytest.raises(DataError, match=rf"{part}: .*damaged"):
        open_prepared_folder(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no readable prepared\.json"),
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"magic": "other", "format": 1}', "'other' of format 1"),
        ('{"magic": "async-grpo prepared data", "format": 2}', "format 2"),
        ('{"magic": "async-grpo prepared data", "format": 1}', "damaged"),
    ],
)
def test_a_folder_that_was_not_prepared_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    prepared(tmp_path, questions(5))
    manifest = tmp_path / "out" / "prepared.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    with pytest.raises(DataError, match=message):
        open_prepared_folder(tmp_path / "out")


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_the_split_is_refused(tmp_path: Path, row: int) -> None:
    prepared(tmp_path, questions(5))
    with pytest.raises(IndexError, match=r"range\(3\)"):
        open_prepared_folder(tmp_path / "out").train.read_row(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "generic"}, "both fields"),
        ({"prompt_field": "q"}, "both fields"),
        ({"held_out": 0}, "evaluated"),
        ({"keep_duplicates": True}, "--held-out-from"),
    ],
)
def test_conflicting_options_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, questions(5), **changes)


@needs_gsm8k
def test_gsm8k_as_published_is_prepared_without_loss(tmp_path: Path) -> None:
    options = {"files": [TRAIN], "held_out_from": [TEST], "out": tmp_path / "out", "model": tmp_path}
    done: list[int] = []
    config = PrepareConfig.model_validate({**options, "template": "qwen_r1", "max_prompt_tokens": 4000})
    manifest, _ = prepare_dataset(config, Bytes(), done.append)
    assert (manifest.rows, manifest.rejected) == ({"train": 7473, "held_out": 1319}, {})
    assert done == sorted(done) and done[-1] == TRAIN.stat().st_size + TEST.stat().st_size
    prepared_set = open_prepared_folder(tmp_path / "out")
    for split in (prepared_set.train, prepared_set.held_out):
        assert all(float(split.read_row(index)[1].answer) is not None for index in range(len(split)))

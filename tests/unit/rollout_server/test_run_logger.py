"""Rows of samples: selection of groups, and the fields per token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from async_grpo.data.tokenizer import TokenPieces
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.wire import Group, Sample, Task, Turn, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from async_grpo.wire.board import Evaluation
from rollout_server.run_logger import RolloutLogger


class ByteLevel:
    """A byte-level tokenizer of Hugging Face: one token per byte, "ab" and the special "<eos>"."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*alphabet, "ab"])}
        self.real = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
        self.real.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.real.decoder = decoders.ByteLevel()
        self.real.add_special_tokens(["<eos>"])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.real.encode(text).ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.real.decode(token_ids, skip_special_tokens=skip_special_tokens))


def rows_of(folder: Path, groups: list[Group], every: int = 1) -> list[dict[str, Any]]:
    logger = RolloutLogger(folder, "rollout-0", samples_every=every, tokenizer=ByteLevel())
    for group in groups:
        logger.record_group(group, version=5)
    logger.close()
    return [json.loads(line) for line in (folder / "samples" / "rollout-0.jsonl").read_text().splitlines()]


def group_of(seq: int, ids: list[int], **facts: Any) -> Group:
    sample = Sample(
        tokens=tokens_to_bytes(ids),
        logprobs=logprobs_to_bytes([-0.123456 - index for index in range(len(ids))]),
        spans=[VersionSpan(3, 0, 1), VersionSpan(4, 1, len(ids))],
        **facts,
    )
    return Group(seq=seq, attempt=1, task=Task(index=0, prompt="p", prompt_tokens=b"", answer=""), samples=[sample])


def test_every_token_has_its_text_and_its_log_probability(tmp_path: Path) -> None:
    turns = [Turn(0, 2, True, "tool"), Turn(2, 3, False)]
    (row,) = rows_of(tmp_path, [group_of(0, ByteLevel().encode("abc<eos>"), turns=turns)])
    (completion,) = row["completions"]
    assert completion["pieces"] == ["ab", "c", "<eos>"]
    assert completion["logprobs"] == [-0.1235, -1.1235, -2.1235]
    assert completion["spans"] == [[3, 0, 1], [4, 1, 3]]
    assert completion["turns"] == [[0, 2, True], [2, 3, False]]


def test_groups_are_sampled_by_sequence_number(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [group_of(seq, [0, 1]) for seq in (9, 4, 3, 8)], every=4)
    assert [row["seq"] for row in rows] == [4, 8]


@pytest.mark.parametrize("text", ["é", "a🙂b", "漢字ab"])
def test_a_character_belongs_to_the_last_of_its_tokens(text: str) -> None:
    tokenizer = ByteLevel()
    ids = tokenizer.encode(text)
    pieces = TokenPieces(tokenizer).decode_each(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    assert all(piece in ("", "ab") or len(piece) == 1 for piece in pieces)


def test_invalid_bytes_become_replacement_characters() -> None:
    tokenizer = ByteLevel()
    torn = tokenizer.encode("é")[:1]
    assert TokenPieces(tokenizer).decode_each([*torn * 6, *tokenizer.encode("c")]) == ["\ufffd"] * 6 + ["c"]


def test_a_failed_write_is_raised_later(tmp_path: Path) -> None:
    logger = RolloutLogger(tmp_path, "rollout-0", samples_every=1)
    logger._samples.close()
    logger.record_group(group_of(0, [0, 1]), version=5)
    logger._thread.submit(int).result(timeout=5)
    with pytest.raises(ValueError, match="closed"):
        logger.record_group(group_of(1, [0, 1]), version=5)


def test_an_evaluation_is_written_when_it_ends(tmp_path: Path) -> None:
    logger = RolloutLogger(tmp_path, "rollout-0", samples_every=1)
    logger.record_evaluation(Evaluation(version=4, prompts=8, samples=2, sampled_accuracy=0.75))
    (row,) = read_rows(tmp_path / "evaluations" / "rollout-0.jsonl")
    assert (row["version"], row["sampled_accuracy"]) == (4, 0.75)
    assert row["time_s"] > 1e9

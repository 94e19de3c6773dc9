"""The character tokenizer: exact both ways, tags as one token each, nothing unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2Config

from async_grpo.data.arithmetic import Problem
from async_grpo.data.tokenizer import load_tokenizer
from async_grpo.models.tiny.arithmetic import CHARACTERS, EOS, TAGS, build_char_tokenizer, demonstration

TEXT = "478+356=" + demonstration(Problem(478, 356))


@pytest.mark.parametrize("text", [TEXT, CHARACTERS, "".join(TAGS), " 1  2 ", "</think><think>="])
def test_decoding_gives_back_exactly_what_was_encoded(text: str) -> None:
    tokenizer = build_char_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tag_is_one_token_nothing_is_put_around_a_prompt_and_the_end_can_be_skipped() -> None:
    tokenizer = build_char_tokenizer()
    assert tokenizer.tokenize("<think>8+6=14</think>") == ["<think>", "8", "+", "6", "=", "1", "4", "</think>"]
    tokens = [*tokenizer.encode(TEXT + EOS), tokenizer.pad_token_id]
    assert tokens[-2] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == TEXT
    assert len(tokenizer.encode("12+34=")) == 6
    assert len(tokenizer) % 8 == 0, "tensor-parallel ranks share the vocabulary evenly"


def test_the_tokenizer_of_a_checkpoint_reads_back_the_same(tmp_path: Path) -> None:
    """Beside a configuration of the family, whose own tokenizer splits text in another way."""
    tokenizer = build_char_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.encode(TEXT + EOS) == tokenizer.encode(TEXT + EOS)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    with pytest.raises(Exception, match="Missing"):
        loaded.encode("12x")

"""A tokenizer for benches: its tokens are numbers; a prompt of N digits with spaces between has exactly N tokens."""

from __future__ import annotations

from pathlib import Path

from async_grpo.data.source import Tokenizer, load_tokenizer


def number_words(model: Path, size: int) -> Tokenizer:
    """Written to the model's folder. Every id below `size` has a text, and none ends a completion.

    Larger numbers are read digit by digit where transformers gives a checkpoint's tokenizer the rules of its family.

    >>> number_words(Path("model"), 32).encode("7 3 7")  # doctest: +SKIP
    [7, 3, 7]
    """
    from tokenizers import Tokenizer as Words
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Words(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(model)
    return load_tokenizer(model)

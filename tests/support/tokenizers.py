"""Tokenizers that need no model."""

from __future__ import annotations

from typing import Any

START, CONTROL = "<|begin_of_text|>", "<|im_end|>"


class Bytes:
    """A token a byte."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode()


def byte_tokenizer_with_start() -> Any:
    """A fast tokenizer with the id of every byte as its token, which starts a prompt as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(_letters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, CONTROL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=CONTROL)


def _letters_of_bytes() -> list[str]:
    """The letter by which byte-level BPE writes each byte: itself if it is printable, otherwise one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = []
    others = 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + others))
            others += 1
    return letters

"""Texts -> token ids, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from async_grpo.data.fields import Unusable
from async_grpo.data.source import Tokenizer


class Encoder:
    """The ids that `tokenizer.encode` gives, by the batch; a fast tokenizer then uses every core.

    `special_tokens`: whether the tokenizer adds its own (a chat template has written them already).
    """

    def __init__(self, tokenizer: Tokenizer, *, special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # a tokenizer.json may say that every text is cut or filled up
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int] | Unusable]:
        """Token ids of every text, in order; Unusable for one that the tokenizer refuses."""
        if self._backend is not None:
            try:
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=self._special_tokens)
                return [encoding.ids for encoding in encodings]
            except Exception:  # whatever a tokenizer raises
                pass  # one of them cannot be encoded: which one shows below
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int] | Unusable:
        try:
            return encode_one(self._tokenizer, text, special_tokens=self._special_tokens)
        except Exception as error:  # whatever a tokenizer raises for a text that it does not know
            return Unusable("refused by the tokenizer", f"{type(error).__name__}: {str(error)[:200]}")


def encode_one(tokenizer: Tokenizer, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of one text, by the tokenizer itself."""
    if special_tokens:
        return list(tokenizer.encode(text))
    return list(cast(Any, tokenizer).encode(text, add_special_tokens=False))

"""Tokenizers that need no model."""

from __future__ import annotations


class Bytes:
    """A token a byte."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode()

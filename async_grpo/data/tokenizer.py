"""The tokenizer of a model: loading it, encoding many texts at a time with every core, and encoding observations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from async_grpo.data.base import RejectedRow
from async_grpo.errors import ConfigError

_MAX_CHARACTERS_PER_TOKEN = 256
"""The most characters that a token has on average. Longer tokens are white space."""
_PART = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, which a tokenizer returns for bytes that are only part of a character."""
_MOST_BYTES = 4
"""Bytes of the longest UTF-8 character, and so the most tokens that form one."""


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that this project calls."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text -> token ids, by default with the special tokens that the model expects before a prompt."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids -> text."""
        ...


class BatchTokenizer:
    """Encodes batches of texts to the ids that `tokenizer.encode` gives. A fast tokenizer uses every core.

    `special_tokens`: whether the tokenizer adds its own (a chat template has written them already).
    `longest`: the most tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, special_tokens: bool, longest: int) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._longest = longest
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # a tokenizer.json may ask to truncate or pad every text
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int] | RejectedRow]:
        """Token ids of every text, in order; a RejectedRow in place of one that the tokenizer refuses."""
        if self._backend is not None:
            try:
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=self._special_tokens)
                return [encoding.ids for encoding in encodings]
            except Exception:  # a tokenizer may raise anything
                pass  # one text cannot be encoded: encoding them one by one shows which
        return [self._encode(text) for text in texts]

    def prompt(self, text: str) -> list[int]:
        """Token ids of one prompt. Raises RejectedRow if it is refused, empty or too long."""
        return self.fitting(self._encode(text))

    def fitting(self, ids: list[int] | RejectedRow) -> list[int]:
        """The ids, if they can be a prompt. Raises RejectedRow if there are none or too many."""
        if isinstance(ids, RejectedRow):
            raise ids
        if not ids:
            raise RejectedRow("prompt without tokens")
        if len(ids) > self._longest:
            raise RejectedRow("prompt too long", f"{len(ids)} tokens, and {self._longest} is the most")
        return ids

    def _encode(self, text: str) -> list[int] | RejectedRow:
        try:
            if self._backend is not None:
                return list(self._backend.encode(text, add_special_tokens=self._special_tokens).ids)
            return encode_one(self._tokenizer, text, special_tokens=self._special_tokens)
        except Exception as error:  # a tokenizer may raise anything for an unknown text
            return RejectedRow("refused by the tokenizer", f"{type(error).__name__}: {str(error)[:200]}")


class TokenPieces:
    """The text of each token, special tokens included. Texts are remembered by id: a vocabulary has 200,000 at most."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: list[int]) -> list[str]:
        """The text of each id. If several tokens form one character, the last has the character and the others ""."""
        pieces = [self._piece(token) for token in ids]
        start: int | None = None
        for place, piece in enumerate(pieces):
            if _PART not in piece:
                start = None
                continue
            if start is None or place - start >= _MOST_BYTES:
                start = place
            whole = self._tokenizer.decode(ids[start : place + 1])
            if _PART not in whole:
                pieces[start : place + 1] = [*[""] * (place - start), whole]
                start = None
        return pieces

    def _piece(self, token: int) -> str:
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._tokenizer.decode([token])
        return piece


def check_characters(prompt: str, max_prompt_tokens: int) -> None:
    """Raise RejectedRow for a prompt that is too long for any tokenizer: counting the tokens of 16 MiB takes 30 s."""
    if len(prompt) > (most := max_prompt_tokens * _MAX_CHARACTERS_PER_TOKEN):
        raise RejectedRow("prompt too long", f"{len(prompt)} characters, and {most} is the most that is tokenized")


def encode_one(tokenizer: Tokenizer, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of one text, encoded by the tokenizer itself."""
    if special_tokens:
        return list(tokenizer.encode(text))
    return list(tokenizer.encode(text, add_special_tokens=False))


class ObservationEncoder:
    """Encodes what stands between two turns of the policy: a template of ours around the result of a tool.

    There are no special tokens of a prompt (Llama's <|begin_of_text|> belongs to the start of a conversation only). The
    template may contain control tokens, such as those that end a turn. In the result they are plain text: a web page
    with <|im_end|> in it could otherwise end the turn and speak in the name of the user.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """`template`: every `{result}` in it is replaced."""
        self._tokenizer = tokenizer
        self._parts = template.split("{result}")
        self._control_tokens = _control_token_pattern(tokenizer)

    def encode(self, result: str) -> list[int]:
        """Token ids of the template with this result."""
        text = self._parts[0]
        results: list[tuple[int, int]] = []
        for part in self._parts[1:]:
            results.append((len(text), len(text) + len(result)))
            text += result + part

        ids: list[int] = []
        start = 0
        for cut in [*self._cuts(text, results), len(text)]:
            ids += encode_one(self._tokenizer, text[start:cut], special_tokens=False)
            start = cut
        return ids

    def _cuts(self, text: str, results: Sequence[tuple[int, int]]) -> list[int]:
        """Places inside all control tokens that the results contain or complete. Encoded piece by piece, none is left.

        The tokenizer's own switch (`split_special_tokens`) changes an object that other threads encode with.
        """
        cuts: list[int] = []
        if self._control_tokens is None:
            return cuts
        found = self._control_tokens.search(text)
        while found is not None:
            if any(found.start() < end and found.end() > start for start, end in results):
                cuts.append(found.start() + 1)
                found = self._control_tokens.search(text, found.start() + 1)
            else:
                found = self._control_tokens.search(text, found.end())
        return cuts


def _control_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the text of every control token; None if there is none. The longest first, as tokenizers match them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {token.content for token in added.values() if token.special}
    texts |= set(getattr(tokenizer, "all_special_tokens", ()))
    texts.discard("")
    if not texts:
        return None
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint folder: its tokenizer.json as it is, if it has one.

    By the model's type alone, transformers 5 would split text as that family's tokenizer does, and silently drop what
    is not in the vocabulary.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (model / "tokenizer.json").is_file() else AutoTokenizer
    return cast(Tokenizer, kind.from_pretrained(str(model)))


def find_tokenizer(model: Path, key: str) -> Tokenizer:
    """Like `load_tokenizer`, for a folder that a user named by `key`. Fetches nothing. Raises ConfigError."""
    if not (model / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{key}: {model} has no tokenizer_config.json, so it holds no tokenizer. Name the folder of a Hugging "
            "Face checkpoint"
        )
    try:
        return load_tokenizer(model)
    except Exception as error:  # transformers raises many kinds for unreadable files
        raise ConfigError(f"{key}: the tokenizer in {model} cannot be loaded ({error}). Fetch it again") from error

"""The tokenizer of a model: loading it, encoding batches of texts on all cores, and encoding observations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from async_grpo.data.base import RejectedRow
from async_grpo.errors import ConfigError

_MAX_CHARACTERS_PER_TOKEN = 256
"""Upper bound of the average characters per token in a prompt. Longer tokens are white space."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer returns for bytes that are only a part of a character."""
_MAX_CHARACTER_TOKENS = 4
"""Maximum tokens that form one character: a UTF-8 character has at most 4 bytes."""


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that this project uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text -> token ids, by default with the special tokens that the model expects before a prompt."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids -> text."""
        ...


class BatchTokenizer:
    """Encodes batches of texts to the same ids as `tokenizer.encode`. A fast tokenizer uses all cores."""

    def __init__(self, tokenizer: Tokenizer, *, special_tokens: bool, max_tokens: int) -> None:
        """Create an encoder of prompts.

        special_tokens: True to add the tokenizer's special tokens; False for a text of a chat template, which contains
        them already. max_tokens: maximum tokens of a prompt.
        """
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._max_tokens = max_tokens
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # tokenizer.json may request truncation or padding of every text
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int] | RejectedRow]:
        """Return the token ids of every text, in order; a RejectedRow for each text that the tokenizer refuses."""
        if self._backend is not None:
            try:
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=self._special_tokens)
                return [encoding.ids for encoding in encodings]
            except Exception:  # a tokenizer may raise anything
                pass  # at least one text cannot be encoded: encode them one by one to find out which
        return [self._encode(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of one prompt. Raises RejectedRow if it is refused, empty or too long."""
        return self.check_prompt_ids(self._encode(text))

    def check_prompt_ids(self, ids: list[int] | RejectedRow) -> list[int]:
        """Return the ids if they can be a prompt. Raises RejectedRow if they are refused, none or too many."""
        if isinstance(ids, RejectedRow):
            raise ids
        if not ids:
            raise RejectedRow("prompt without tokens")
        if len(ids) > self._max_tokens:
            raise RejectedRow("prompt too long", f"{len(ids)} tokens, and the limit is {self._max_tokens}")
        return ids

    def _encode(self, text: str) -> list[int] | RejectedRow:
        try:
            if self._backend is not None:
                return list(self._backend.encode(text, add_special_tokens=self._special_tokens).ids)
            return encode_one(self._tokenizer, text, special_tokens=self._special_tokens)
        except Exception as error:  # a tokenizer may raise anything for an unknown text
            return RejectedRow("refused by the tokenizer", f"{type(error).__name__}: {str(error)[:200]}")


class TokenPieces:
    """Decodes each token separately, special tokens included. Caches texts by id; vocabularies have up to 200,000."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, str] = {}

    def decode_each(self, ids: list[int]) -> list[str]:
        """Return the text of each id.

        If several tokens form one character, the last one gets the character and the others "".
        """
        pieces = [self._decode_one(token) for token in ids]
        start: int | None = None  # first token of a character that is not complete yet
        for index, piece in enumerate(pieces):
            if _INCOMPLETE not in piece:
                start = None
                continue
            if start is None or index - start >= _MAX_CHARACTER_TOKENS:
                start = index
            character = self._tokenizer.decode(ids[start : index + 1])
            if _INCOMPLETE not in character:
                pieces[start:index] = [""] * (index - start)
                pieces[index] = character
                start = None
        return pieces

    def _decode_one(self, token: int) -> str:
        text = self._cache.get(token)
        if text is None:
            text = self._cache[token] = self._tokenizer.decode([token])
        return text


def check_characters(prompt: str, max_prompt_tokens: int) -> None:
    """Raise RejectedRow for a prompt that is too long for any tokenizer.

    Counting the tokens of such a prompt would take long: 30 s for 16 MiB.
    """
    max_characters = max_prompt_tokens * _MAX_CHARACTERS_PER_TOKEN
    if len(prompt) > max_characters:
        raise RejectedRow("prompt too long", f"{len(prompt)} characters, and the limit is {max_characters}")


def encode_one(tokenizer: Tokenizer, text: str, *, special_tokens: bool) -> list[int]:
    """Return the token ids of one text. `special_tokens`: True to add those that the model expects before a prompt."""
    if special_tokens:
        return list(tokenizer.encode(text))
    return list(tokenizer.encode(text, add_special_tokens=False))


class ObservationEncoder:
    """Encodes the text between two turns of the policy: a template around the result of a tool.

    No special tokens of a prompt are added: Llama's <|begin_of_text|> belongs only to the start of a conversation. The
    template may contain control tokens, such as those that end a turn. In the result they are encoded as plain text.
    Otherwise a web page with <|im_end|> in it could end the turn and speak in the name of the user.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """`template`: every `{result}` in it is replaced."""
        self._tokenizer = tokenizer
        self._parts = template.split("{result}")
        self._control_tokens = _control_token_pattern(tokenizer)

    def encode(self, result: str) -> list[int]:
        """Return the token ids of the template with this result."""
        text = self._parts[0]
        result_ranges: list[tuple[int, int]] = []
        for part in self._parts[1:]:
            result_ranges.append((len(text), len(text) + len(result)))
            text += result + part

        ids: list[int] = []
        start = 0
        for cut in [*self._find_cuts(text, result_ranges), len(text)]:
            ids += encode_one(self._tokenizer, text[start:cut], special_tokens=False)
            start = cut
        return ids

    def _find_cuts(self, text: str, result_ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Return positions inside every control token that overlaps a result. Encoding the parts leaves none intact.

        The tokenizer's own setting for this (`split_special_tokens`) would change an object that other threads use.
        """
        cuts: list[int] = []
        if self._control_tokens is None:
            return cuts
        match = self._control_tokens.search(text)
        while match is not None:
            if any(match.start() < end and match.end() > start for start, end in result_ranges):
                cut = match.start() + 1
                cuts.append(cut)
                # Another control token may start within the rest of this one.
                match = self._control_tokens.search(text, cut)
            else:
                match = self._control_tokens.search(text, match.end())
        return cuts


def _control_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches the text of every control token; None if there is none."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {token.content for token in added.values() if token.special}
    texts |= set(getattr(tokenizer, "all_special_tokens", ()))
    texts.discard("")
    if not texts:
        return None
    longest_first = sorted(texts, key=len, reverse=True)  # the order in which tokenizers match them
    return re.compile("|".join(re.escape(text) for text in longest_first))


def load_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face checkpoint folder, from its tokenizer.json if it has one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer of transformers 5 may choose the class by the model's type instead. It would then split text as that
    # family's tokenizer does, and silently drop text that is not in the vocabulary.
    has_tokenizer_json = (model / "tokenizer.json").is_file()
    loader = PreTrainedTokenizerFast if has_tokenizer_json else AutoTokenizer
    return cast(Tokenizer, loader.from_pretrained(str(model)))


def find_tokenizer(model: Path, key: str) -> Tokenizer:
    """Load the tokenizer of a folder that a user named with `key`. Downloads nothing. Raises ConfigError."""
    if not (model / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{key}: {model} has no tokenizer_config.json, so it has no tokenizer. Name the folder of a Hugging "
            "Face checkpoint"
        )
    try:
        return load_tokenizer(model)
    except Exception as error:  # transformers raises many kinds for unreadable files
        raise ConfigError(f"{key}: the tokenizer in {model} cannot be loaded ({error}). Fetch it again") from error

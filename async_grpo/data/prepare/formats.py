"""Known formats of data sets: where a row has its question and its reference answer.

| format       | question               | reference answer            |
|--------------|------------------------|-----------------------------|
| `gsm8k`      | `question`             | `answer`, after `####`      |
| `deepscaler` | `problem`              | `answer`                    |
| `dapo`       | `prompt` (a chat)      | `reward_model.ground_truth` |
| `alpaca`     | `instruction`, `input` | `output`                    |
| `generic`    | a field that you name  | a field that you name, after `####` if it has that |
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.data.base import RejectedRow
from async_grpo.utils.dotted import look_up

Chat = list[dict[str, str]]
_MISSING = object()
_ONE_NUMBER = re.compile(r"[^\d,()\[\]{}]*\d{1,3}(?:,\d{3})+(?:\.\d+)?[^\d,()\[\]{}]*")
"""A single number with thousands separators, and possibly a sign, currency or unit: $1,800."""


class Rejections(Counter[str]):
    """Number of rejected rows, by reason."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, str] = {}
        """First rejected row of each reason: file, line and problem."""

    def add(self, file: Path, line: int, rejection: RejectedRow) -> None:
        """Count one rejected row."""
        self[rejection.reason] += 1
        self.first.setdefault(rejection.reason, f"{file.name}, line {line}: {rejection}")

    def __str__(self) -> str:
        return "; ".join(f"{count:,} {reason} ({self.first[reason]})" for reason, count in self.most_common())


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Names of the fields with question and answer. A dot goes into a nested object."""

    prompt: str
    answer: str
    extra: str = ""
    """Optional field that is appended to the question."""
    after_hashes: bool = False
    """True if the reference answer is the text after the last `####`."""

    @property
    def required_fields(self) -> set[str]:
        """Top-level fields that a row must have."""
        return {self.prompt.partition(".")[0], self.answer.partition(".")[0]}


FORMATS = {
    "dapo": FieldMap("prompt", "reward_model.ground_truth"),
    "deepscaler": FieldMap("problem", "answer"),
    "gsm8k": FieldMap("question", "answer", after_hashes=True),
    "alpaca": FieldMap("instruction", "output", extra="input"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its reference answer. `chat`: messages up to and including the question."""

    question: str
    chat: Chat
    answer: str
    metadata: dict[str, str]

    @property
    def identity(self) -> str:
        """Text for finding duplicates: equal for chats that differ only in white space or Unicode composition."""
        contents = []
        for message in self.chat:
            words = unicodedata.normalize("NFC", message["content"]).split()
            contents.append(" ".join(words))
        return "\0".join(contents)


def detect_format(fields: Mapping[str, Any]) -> str | None:
    """Name of the first format whose required fields a row has; None if there is none."""
    for name, field_map in FORMATS.items():
        if field_map.required_fields <= fields.keys():
            return name
    return None


def parse_example(fields: Mapping[str, Any], field_map: FieldMap, metadata_fields: Sequence[str] = ()) -> Example:
    """Parse a row. Raises RejectedRow.

    metadata_fields: fields that become metadata if the row has them.
    """
    chat = _parse_chat(_look_up(fields, field_map.prompt), field_map.prompt)
    extra = _optional_text(fields, field_map.extra) if field_map.extra else ""
    if extra:
        chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}\n\n{extra}"}
    question = chat[-1]["content"]

    answer = _to_text(_look_up(fields, field_map.answer), field_map.answer)
    reference = extract_reference(answer) if field_map.after_hashes else answer.strip()
    if not question:
        raise RejectedRow("empty prompt", f"the field {field_map.prompt!r} is empty")
    if not reference:
        raise RejectedRow("empty answer", f"the field {field_map.answer!r} has no reference answer")

    metadata = {}
    for name in metadata_fields:
        text = _optional_text(fields, name)
        if text:
            metadata[name] = text
    for text in (reference, *metadata.values(), *(message["content"] for message in chat)):
        _check_unicode(text)
    return Example(question, chat, reference, metadata)


def extract_reference(answer: str) -> str:
    """Return the text after the last `####`, or the whole text if there is none.

    Commas are removed from a reference after `####` that is a single number with thousands separators.

    >>> [extract_reference(text) for text in ("9 * 200 = 1800. #### 1,800", "#### (1,2)", "#### 3, 4")]
    ['1800', '(1,2)', '3, 4']
    """
    _, hashes, reference = answer.rpartition("####")
    reference = reference.strip()
    if hashes and _ONE_NUMBER.fullmatch(reference):
        reference = reference.replace(",", "")
    return reference


def _parse_chat(value: Any, name: str) -> Chat:
    """Return the messages of a field. A text becomes one user message; a list must end with a user message."""
    if not isinstance(value, list):
        return [{"role": "user", "content": _to_text(value, name).strip()}]
    if not value or not all(_is_message(message) for message in value):
        raise RejectedRow("no chat", f"the field {name!r} is a list, but not of messages with role and content")
    last_role = value[-1]["role"]
    if last_role != "user":
        raise RejectedRow("no chat", f"the last message of {name!r} has the role {last_role!r}, not user")
    return [{"role": message["role"], "content": message["content"].strip()} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _look_up(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value at a dotted name. A field whose own name contains the dot wins. Raises RejectedRow."""
    value = fields[name] if name in fields else look_up(fields, name, _MISSING)
    if value is _MISSING:
        present = ", ".join(map(str, fields))[:200]
        raise RejectedRow("field missing", f"there is no field {name!r} (the row has {present or 'none'})")
    return value


def _to_text(value: Any, name: str) -> str:
    """Return a text or number as text. Raises RejectedRow for booleans, lists, objects and null."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RejectedRow("not a text", f"the field {name!r} is a {type(value).__name__}, not a text or number")
    return str(value)


def _optional_text(fields: Mapping[str, Any], name: str) -> str:
    try:
        return _to_text(_look_up(fields, name), name).strip()
    except RejectedRow:
        return ""


def _check_unicode(text: str) -> None:
    """Raise RejectedRow for a lone surrogate (half a character): JSON can contain it, tokenizers refuse it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RejectedRow("no Unicode", f"half a character (a lone surrogate) at position {error.start}") from error

"""From the fields of a row to a question and its reference answer, for each known format.

| format       | question                 | reference                   |
|--------------|--------------------------|-----------------------------|
| `gsm8k`      | `question`               | `answer`, behind `####`     |
| `deepscaler` | `problem`                | `answer`                    |
| `dapo`       | `prompt` (a chat)        | `reward_model.ground_truth` |
| `alpaca`     | `instruction`, `input`   | `output`                    |
| `generic`    | a field that you name    | a field that you name, behind `####` if it has that |
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
"""One number with thousands separators, and perhaps a sign, a currency or a unit: $1,800."""


class Rejections(Counter[str]):
    """Number of rejected rows, by reason."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, str] = {}
        """The first rejected row of each reason: file, line and what is wrong with it."""

    def add(self, file: Path, line: int, why: RejectedRow) -> None:
        """Count one rejected row."""
        self[why.reason] += 1
        self.first.setdefault(why.reason, f"{file.name}, line {line}: {why}")

    def __str__(self) -> str:
        return "; ".join(f"{count:,} {reason} ({self.first[reason]})" for reason, count in self.most_common())


@dataclass(frozen=True, slots=True)
class FieldMap:
    """The fields of question and answer; a dot goes into an object. `more`: a field appended to the question."""

    prompt: str
    answer: str
    more: str = ""
    after_hashes: bool = False
    """Whether the reference is what follows the last `####`."""

    @property
    def needed(self) -> set[str]:
        """The fields that a row must have."""
        return {self.prompt.partition(".")[0], self.answer.partition(".")[0]}


FORMATS = {
    "dapo": FieldMap("prompt", "reward_model.ground_truth"),
    "deepscaler": FieldMap("problem", "answer"),
    "gsm8k": FieldMap("question", "answer", after_hashes=True),
    "alpaca": FieldMap("instruction", "output", more="input"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its reference answer. `chat`: the messages up to and including the question."""

    question: str
    chat: Chat
    answer: str
    metadata: dict[str, str]

    @property
    def identity(self) -> str:
        """A text that is equal for chats that only differ in white space or in the composition of characters."""
        texts = (unicodedata.normalize("NFC", message["content"]).split() for message in self.chat)
        return "\0".join(" ".join(words) for words in texts)


def fitting_format(fields: Mapping[str, Any]) -> str | None:
    """The name of the first format whose fields a row has; None if there is none."""
    return next((name for name, where in FORMATS.items() if where.needed <= fields.keys()), None)


def example_of(fields: Mapping[str, Any], where: FieldMap, kept: Sequence[str] = ()) -> Example:
    """The example in a row. `kept`: fields that become metadata if the row has them. Raises RejectedRow."""
    chat = _chat(_look_up(fields, where.prompt), where.prompt)
    if where.more and (more := _optional_text(fields, where.more)):
        chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}\n\n{more}"}
    answer = _text(_look_up(fields, where.answer), where.answer)
    gold = reference(answer) if where.after_hashes else answer.strip()
    question = chat[-1]["content"]
    if not question:
        raise RejectedRow("empty prompt", f"the field {where.prompt!r} is empty")
    if not gold:
        raise RejectedRow("empty answer", f"the field {where.answer!r} holds no reference answer")
    metadata = {name: text for name in kept if (text := _optional_text(fields, name))}
    for text in (gold, *metadata.values(), *(message["content"] for message in chat)):
        _check_unicode(text)
    return Example(question, chat, gold, metadata)


def reference(answer: str) -> str:
    """The reference answer: the text after the last `####`, without commas if it is one number with thousands
    separators, else the whole text.

    >>> [reference(text) for text in ("9 * 200 = 1800. #### 1,800", "#### (1,2)", "#### 3, 4")]
    ['1800', '(1,2)', '3, 4']
    """
    _, mark, gold = answer.rpartition("####")
    gold = gold.strip()
    if mark and _ONE_NUMBER.fullmatch(gold):
        gold = gold.replace(",", "")
    return gold


def _chat(value: Any, name: str) -> Chat:
    """The messages of a field: a text becomes one message of the user; a list must end with one."""
    if not isinstance(value, list):
        return [{"role": "user", "content": _text(value, name).strip()}]
    if not value or not all(_is_message(message) for message in value):
        raise RejectedRow("no chat", f"the field {name!r} is a list, but not of messages with role and content")
    if value[-1]["role"] != "user":
        raise RejectedRow("no chat", f"the last message of {name!r} is of {value[-1]['role']!r}, not of the user")
    return [{"role": message["role"], "content": message["content"].strip()} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _look_up(fields: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name. A field whose own name has the dot comes first. Raises RejectedRow."""
    value = fields[name] if name in fields else look_up(fields, name, _MISSING)
    if value is _MISSING:
        shown = ", ".join(map(str, fields))[:200]
        raise RejectedRow("field missing", f"there is no field {name!r} (the row has {shown or 'none'})")
    return value


def _text(value: Any, name: str) -> str:
    """The value as text; numbers are written out. Raises RejectedRow for booleans, lists, objects and null."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RejectedRow("not a text", f"the field {name!r} is a {type(value).__name__}, not a text or number")
    return str(value)


def _optional_text(fields: Mapping[str, Any], name: str) -> str:
    try:
        return _text(_look_up(fields, name), name).strip()
    except RejectedRow:
        return ""


def _check_unicode(text: str) -> None:
    """Raise RejectedRow for half a character (a lone surrogate): JSON can write it, no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RejectedRow("no Unicode", f"half a character (a lone surrogate) at position {error.start}") from error

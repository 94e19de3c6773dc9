"""What somebody says to a policy, written as the policy reads its prompts in training.

question (and what was said before) --> template of the data --> token ids
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from async_grpo.config import RunConfig
from async_grpo.data.encode import encode_one
from async_grpo.data.fields import Chat, Example
from async_grpo.data.prepared import open_prepared
from async_grpo.data.source import Tokenizer
from async_grpo.data.templates import BUILTIN, Template
from async_grpo.errors import ConfigError


class Wording(Protocol):
    """`remembers`: whether the messages before the question are part of what the policy reads."""

    remembers: bool

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """Text and token ids; `said` is what came before, questions and replies in turn. Raises what the tokenizer
        raises."""
        ...


class Plain:
    """`data.template` around the question, as for generated problems and JSON-lines files."""

    remembers = False

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """What was said before is not repeated."""
        text = self._template.replace("{prompt}", question)
        return text, list(self._tokenizer.encode(text))


class Templated:
    """A template of `async-grpo prepare`: raw, qwen_r1, chat or a Jinja file."""

    def __init__(self, name: str, tokenizer: Tokenizer, system: str) -> None:
        """Raises ConfigError."""
        self._template = Template(name, tokenizer, system)
        self._tokenizer = tokenizer
        self.remembers = name not in ("raw", "qwen_r1")

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """What was said before is in `messages`."""
        chat: Chat = [
            {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate([*said, question])
        ]
        text = self._template.render(Example(question, chat, "", {}))
        return text, encode_one(self._tokenizer, text, special_tokens=self._template.special_tokens)


def wording_of(config: RunConfig, tokenizer: Tokenizer, *, template: str = "", system: str = "") -> Wording:
    """`template`, or else what the run's data have. Raises ConfigError, DataError."""
    if template:
        return Templated(template, tokenizer, system)
    path = config.data.path
    if path is None or not path.is_dir():
        if system:
            raise ConfigError(
                "--system goes with --template chat, or with a file of your own: data.template has no place"
            )
        return Plain(config.data.template, tokenizer)
    recipe = open_prepared(path).manifest.recipe
    name = str(recipe.get("template", "raw"))
    if name not in BUILTIN:
        raise ConfigError(
            f"{path} was prepared with a template of your own, {name!r}, whose text is not kept. Name the file: "
            "--template FILE"
        )
    return Templated(name, tokenizer, system or str(recipe.get("system", "")))

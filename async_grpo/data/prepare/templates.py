"""Prompt templates: the text around a question that the policy reads.

- `raw`       the question alone
- `qwen_r1`   asks for `<think> </think><answer> </answer>` and a boxed answer, in Qwen's chat format
- `chat`      the chat template of the tokenizer
- a file      your own Jinja template, in a sandbox: no files, no imports, no attributes that begin with `_`

A Jinja template may use `question`, `messages` (the whole chat, a list of role and content), `system`, and the
tokenizer's `bos_token` and `eos_token`. Any other name is an error, and so is a template without the question.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from async_grpo.data.base import RejectedRow
from async_grpo.data.prepare.formats import Chat, Example
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.errors import ConfigError

Render = Callable[[Example], str]

BUILTIN = ("raw", "qwen_r1", "chat")

QWEN_R1 = """\
<|im_start|>system
You solve problems. First you reason in your mind, step by step, then you give the user the answer. The reasoning \
stands between <think> and </think>, the answer between <answer> and </answer>, and the final result within \\boxed{}, \
so: <think> your reasoning </think><answer> your answer, \\boxed{result} </answer><|im_end|>
<|im_start|>user
{{ question }}<|im_end|>
<|im_start|>assistant
"""

_TRIAL = Example("How much is 3 + 4?", [{"role": "user", "content": "How much is 3 + 4?"}], "7", {})


class Template:
    """Renders examples as text. `special_tokens`: whether the tokenizer adds its own around the text."""

    def __init__(self, name: str, tokenizer: Tokenizer, system: str = "") -> None:
        """Raises ConfigError for an invalid template, or one that leaves the question out."""
        self.special_tokens = name in ("raw", "qwen_r1")
        if system and name in ("raw", "qwen_r1"):
            raise ConfigError(f"--system goes with --template chat or a file of your own: {name} has no place for it")
        if name == "raw":
            self._render: Render = lambda example: example.question
        elif name == "chat":
            self._render = _chat_template(tokenizer, system)
        else:
            self._render = _jinja(QWEN_R1 if name == "qwen_r1" else _read(Path(name)), name, tokenizer, system)
        self._try(name)

    def render(self, example: Example) -> str:
        """The text for the policy. Raises RejectedRow if the template refuses the row (e.g. roles in a wrong order)."""
        try:
            return self._render(example)
        except TemplateError as error:
            raise RejectedRow("refused by the template", f"{type(error).__name__}: {error}") from error

    def _try(self, name: str) -> None:
        try:
            text = self.render(_TRIAL)
        except Exception as error:  # a user's template may raise anything
            raise ConfigError(
                f"--template {name}: it cannot be rendered ({error}). It may use question, messages, system, "
                "bos_token and eos_token"
            ) from error
        if _TRIAL.question not in text:
            raise ConfigError(
                f"--template {name}: the question is not in what it renders, {text[:80]!r}. Write {{{{ question }}}} "
                "where it goes"
            )


def _jinja(source: str, name: str, tokenizer: Tokenizer, system: str) -> Render:
    sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        template = sandbox.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--template {name}, line {error.lineno}: {error.message}") from error
    tokens = {key: getattr(tokenizer, key, None) or "" for key in ("bos_token", "eos_token")}

    def render(example: Example) -> str:
        return template.render(question=example.question, messages=example.chat, system=system, **tokens)

    return render


def _chat_template(tokenizer: Tokenizer, system: str) -> Render:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "--template chat: the tokenizer of this model has no chat template. Choose qwen_r1, raw or a Jinja file, "
            "or add chat_template to the checkpoint's tokenizer_config.json"
        )
    apply = cast(Any, tokenizer).apply_chat_template

    def render(example: Example) -> str:
        text: str = apply(_with_system(example.chat, system), tokenize=False, add_generation_prompt=True)
        return text

    return render


def _with_system(chat: Chat, system: str) -> Chat:
    """The chat with the requested system message in place of its own."""
    if not system:
        return chat
    return [{"role": "system", "content": system}, *(message for message in chat if message["role"] != "system")]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--template {path}: it is not one of {', '.join(BUILTIN)}, nor a file that can be read ({error}). "
            "Name one of them, or a Jinja file"
        ) from error

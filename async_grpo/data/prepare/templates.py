"""Prompt templates: the text around a question that the policy reads.

- `raw`       the question alone
- `qwen_r1`   requests `<think> </think><answer> </answer>` and a boxed answer, in Qwen's chat format
- `chat`      the tokenizer's chat template
- a file      a custom Jinja template, in a sandbox: no files, no imports, no attributes that start with `_`

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

_TRIAL_EXAMPLE = Example("How much is 3 + 4?", [{"role": "user", "content": "How much is 3 + 4?"}], "7", {})


class Template:
    """Renders examples as text."""

    def __init__(self, name: str, tokenizer: Tokenizer, system: str = "") -> None:
        """Load the template `name` and try it. Raises ConfigError if it is invalid or leaves the question out.

        system: system message of a chat or Jinja template.
        """
        self.special_tokens = name in ("raw", "qwen_r1")
        """True if the tokenizer must add its special tokens to the text."""
        if system and name in ("raw", "qwen_r1"):
            raise ConfigError(f"--system needs --template chat or a Jinja file: {name} has no place for it")
        if name == "raw":
            self._render: Render = _render_raw
        elif name == "chat":
            self._render = _chat_template(tokenizer, system)
        else:
            source = QWEN_R1 if name == "qwen_r1" else _read_file(Path(name))
            self._render = _jinja_template(source, name, tokenizer, system)
        self._check_on_trial(name)

    def render(self, example: Example) -> str:
        """Return the text for the policy. Raises RejectedRow if the template refuses the row (e.g. order of roles)."""
        try:
            return self._render(example)
        except TemplateError as error:
            raise RejectedRow("refused by the template", f"{type(error).__name__}: {error}") from error

    def _check_on_trial(self, name: str) -> None:
        """Render an example, so that a wrong template fails before any file is read."""
        try:
            text = self.render(_TRIAL_EXAMPLE)
        except Exception as error:  # a user's template may raise anything
            raise ConfigError(
                f"--template {name}: it cannot be rendered ({error}). It may use question, messages, system, "
                "bos_token and eos_token"
            ) from error
        if _TRIAL_EXAMPLE.question not in text:
            raise ConfigError(
                f"--template {name}: the rendered text does not contain the question: {text[:80]!r}. Write "
                "{{ question }} where it belongs"
            )


def _render_raw(example: Example) -> str:
    return example.question


def _jinja_template(source: str, name: str, tokenizer: Tokenizer, system: str) -> Render:
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
            "--template chat: this model's tokenizer has no chat template. Choose qwen_r1, raw or a Jinja file, or add "
            "chat_template to the checkpoint's tokenizer_config.json"
        )
    apply_chat_template = cast(Any, tokenizer).apply_chat_template

    def render(example: Example) -> str:
        chat = _replace_system(example.chat, system)
        text: str = apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return text

    return render


def _replace_system(chat: Chat, system: str) -> Chat:
    """Return the chat with `system` instead of its own system message; unchanged without `system`."""
    if not system:
        return chat
    return [{"role": "system", "content": system}, *(message for message in chat if message["role"] != "system")]


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--template {path} is neither one of {', '.join(BUILTIN)} nor a readable file ({error}). Name one of "
            "them, or a Jinja file"
        ) from error

"""ChatSession: formats a question like a training prompt and streams the reply.

    question, history --ChatPrompt--> token ids --Sampler.stream--> TextStream --> text, once no later token changes it

A session waits for the sampler's next piece, and answers one question at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from async_grpo.config import RunConfig
from async_grpo.data.prepare.formats import Chat, Example
from async_grpo.data.prepare.templates import BUILTIN, Template
from async_grpo.data.prepared_dataset import open_prepared_folder
from async_grpo.data.tokenizer import Tokenizer, encode_one
from async_grpo.errors import ConfigError, DataError
from rollout_server.engines.base import GenerationRequest, Sampler
from rollout_server.http.detokenizer import TextStream


class ChatPrompt(Protocol):
    """Renders a question as a prompt of the policy."""

    has_history: bool
    """True if the prompt contains the earlier messages."""

    def render(self, history: Sequence[str], question: str) -> tuple[str, list[int]]:
        """Return the prompt as text and token ids. `history` holds earlier questions and replies, alternating. Raises
        the errors of template and tokenizer."""
        ...


class PlainPrompt:
    """Puts the question into `data.template`, as generated problems and JSON-lines files are."""

    has_history = False

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def render(self, history: Sequence[str], question: str) -> tuple[str, list[int]]:
        """Return the prompt as text and token ids. Ignores `history`."""
        text = self._template.replace("{prompt}", question)
        return text, list(self._tokenizer.encode(text))


class TemplatePrompt:
    """Renders a template of `async-grpo prepare`: raw, qwen_r1, chat or a Jinja file."""

    def __init__(self, name: str, tokenizer: Tokenizer, system: str) -> None:
        """Raises ConfigError if the template cannot be loaded, or has no place for `system`."""
        self._template = Template(name, tokenizer, system)
        self._tokenizer = tokenizer
        self.has_history = name not in ("raw", "qwen_r1")

    def render(self, history: Sequence[str], question: str) -> tuple[str, list[int]]:
        """Return the prompt as text and token ids, with `history` and the question as `messages`."""
        chat: Chat = []
        for index, message in enumerate([*history, question]):
            role = "user" if index % 2 == 0 else "assistant"
            chat.append({"role": role, "content": message})
        text = self._template.render(Example(question, chat, "", {}))
        return text, encode_one(self._tokenizer, text, special_tokens=self._template.special_tokens)


def make_prompt(config: RunConfig, tokenizer: Tokenizer, *, template: str = "", system: str = "") -> ChatPrompt:
    """Return the prompt for `template`, or for the template of the run's data if `template` is empty.

    Raises ConfigError for an unusable template or `system`, DataError for a broken prepared data set.
    """
    if template:
        return TemplatePrompt(template, tokenizer, system)
    path = config.data.path
    if path is None or not path.is_dir():
        if system:
            raise ConfigError(
                "--system needs --template chat, or your own template file: data.template has no place for a system "
                "message"
            )
        return PlainPrompt(config.data.template, tokenizer)
    recipe = open_prepared_folder(path).manifest.recipe
    name = str(recipe.get("template", "raw"))
    if name not in BUILTIN:
        raise ConfigError(
            f"{path} was prepared with your own template {name!r}, and does not contain its text. Pass the file with "
            "--template FILE"
        )
    return TemplatePrompt(name, tokenizer, system or str(recipe.get("system", "")))


@dataclass
class Reply:
    """A reply, complete or still growing."""

    prompt: str
    text: str = ""
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    """Policy version -> number of tokens it generated."""
    finish_reason: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens in the reply."""
        return sum(self.tokens_by_version.values())


class ChatSession:
    """A conversation with a policy.

    async for text in session.stream_reply(question): ...
    session.last_reply
    """

    def __init__(self, config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, prompt: ChatPrompt) -> None:
        """Temperature and maximum reply length start as in `config.sampling`."""
        self._limits = config.rollout.limits
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._history: list[str] = []
        self._request_numbers = itertools.count(1)
        self.temperature = config.sampling.temperature
        self.max_tokens = config.sampling.max_tokens
        self.seed: int | None = None
        self.last_reply: Reply | None = None

    async def stream_reply(self, question: str) -> AsyncGenerator[str, None]:
        """Yield the text of the reply as it is generated. Raises DataError for a question that makes no valid prompt,
        EngineError and WaitTimeout from the sampler."""
        prompt, tokens = self._render(question)
        reply = Reply(prompt)
        self.last_reply = reply
        request = GenerationRequest(
            request_id=f"chat-{next(self._request_numbers)}",
            prompt=tokens,
            max_tokens=min(self.max_tokens, self._limits.max_length - len(tokens)),
            temperature=self.temperature,
            seed=self.seed,
            interruptible=False,
        )
        stream = TextStream(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=True))
        async with aclosing(self._sampler.stream(request)) as pieces:
            async for piece in pieces:
                for span in piece.spans:
                    count = reply.tokens_by_version.get(span.version, 0)
                    reply.tokens_by_version[span.version] = count + span.end - span.start
                reply.finish_reason = piece.finish_reason

                text = stream.push(piece.tokens.tolist())
                if piece.finish_reason:
                    text += stream.finish()
                reply.text += text
                if text:
                    yield text
        if self.has_history:
            self._history += [question, reply.text]

    def reset(self) -> None:
        """Forget the conversation, including the last reply."""
        self._history.clear()
        self.last_reply = None

    @property
    def has_history(self) -> bool:
        """True if prompts contain the earlier messages."""
        return self._prompt.has_history

    def _render(self, question: str) -> tuple[str, list[int]]:
        try:
            prompt, tokens = self._prompt.render(self._history, question)
        except Exception as error:  # a user's template can raise anything
            raise DataError(f"this question makes no valid prompt: {type(error).__name__}: {error}") from error
        if not tokens or len(tokens) >= self._limits.max_length:
            raise DataError(
                f"the prompt has {len(tokens)} tokens. It needs at least one, and must leave room for a reply within "
                f"{self._limits.length_key} ({self._limits.max_length}). Shorten it, or clear the conversation (/reset)"
            )
        return prompt, tokens

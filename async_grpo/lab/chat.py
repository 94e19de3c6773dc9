"""ChatSession: formats a question as the training prompts are, and streams the reply.

    question (and conversation so far)  --ChatPrompt--> token ids --Sampler.stream--> TextStream --> text, as it settles

A session waits for the sampler's next piece. It takes one question at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from async_grpo.config import RunConfig
from async_grpo.data.prepare.formats import Chat, Example
from async_grpo.data.prepare.templates import BUILTIN, Template
from async_grpo.data.prepared_dataset import open_prepared
from async_grpo.data.tokenizer import Tokenizer, encode_one
from async_grpo.errors import ConfigError, DataError
from rollout_server.engines.base import GenerationRequest, Sampler
from rollout_server.http.detokenizer import TextStream


class ChatPrompt(Protocol):
    """Writes a question as a prompt of the policy."""

    remembers: bool
    """Whether the prompt contains the messages before the question."""

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """The prompt as text and as token ids. `said` holds the messages before, questions and replies in turn. Raises
        what the template or the tokenizer raises."""
        ...


class PlainPrompt:
    """Puts `data.template` around the question, as for generated problems and JSON-lines files."""

    remembers = False

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """The prompt without what was said before; see `ChatPrompt`."""
        text = self._template.replace("{prompt}", question)
        return text, list(self._tokenizer.encode(text))


class TemplatePrompt:
    """Renders a template of `async-grpo prepare`: raw, qwen_r1, chat or a Jinja file."""

    def __init__(self, name: str, tokenizer: Tokenizer, system: str) -> None:
        """Raises ConfigError for a template that cannot be loaded or does not fit `system`."""
        self._template = Template(name, tokenizer, system)
        self._tokenizer = tokenizer
        self.remembers = name not in ("raw", "qwen_r1")

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """The prompt, with what was said before in `messages`; see `ChatPrompt`."""
        chat: Chat = [
            {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate([*said, question])
        ]
        text = self._template.render(Example(question, chat, "", {}))
        return text, encode_one(self._tokenizer, text, special_tokens=self._template.special_tokens)


def make_prompt(config: RunConfig, tokenizer: Tokenizer, *, template: str = "", system: str = "") -> ChatPrompt:
    """The prompt with `template`, or with the template of the run's data if that is empty.

    Raises ConfigError for a template or `system` that cannot be used, DataError for a broken prepared data set.
    """
    if template:
        return TemplatePrompt(template, tokenizer, system)
    path = config.data.path
    if path is None or not path.is_dir():
        if system:
            raise ConfigError(
                "--system goes with --template chat, or with a file of your own: data.template has no place"
            )
        return PlainPrompt(config.data.template, tokenizer)
    recipe = open_prepared(path).manifest.recipe
    name = str(recipe.get("template", "raw"))
    if name not in BUILTIN:
        raise ConfigError(
            f"{path} was prepared with a template of your own, {name!r}, whose text is not kept. Name the file: "
            "--template FILE"
        )
    return TemplatePrompt(name, tokenizer, system or str(recipe.get("system", "")))


@dataclass
class Reply:
    """A reply as far as it has come."""

    prompt: str
    text: str = ""
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    """Policy version -> tokens of the reply that it wrote."""
    finish_reason: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens in the reply."""
        return sum(self.tokens_by_version.values())


class ChatSession:
    """A conversation with a policy: `async for text in session.ask(question)`, then `session.last` is the reply."""

    def __init__(self, config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, prompt: ChatPrompt) -> None:
        """Temperature and longest reply are those of `config.sampling`, until they are set otherwise."""
        self._limits = config.rollout.limits
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._said: list[str] = []
        self._numbers = count(1)
        self.temperature = config.sampling.temperature
        self.max_tokens = config.sampling.max_tokens
        self.seed: int | None = None
        self.last: Reply | None = None

    async def ask(self, question: str) -> AsyncGenerator[str, None]:
        """The text of the reply, as it comes. Raises DataError for a question that cannot be a prompt, EngineError and
        WaitTimeout of the sampler."""
        prompt, tokens = self._encode(question)
        reply = self.last = Reply(prompt)
        request = GenerationRequest(
            request_id=f"chat-{next(self._numbers)}",
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
                    made = reply.tokens_by_version.get(span.version, 0)
                    reply.tokens_by_version[span.version] = made + span.end - span.start
                reply.finish_reason = piece.finish_reason
                text = stream.push(piece.tokens.tolist()) + (stream.finish() if piece.finish_reason else "")
                reply.text += text
                if text:
                    yield text
        if self.remembers:
            self._said += [question, reply.text]

    def reset(self) -> None:
        """Forget what was said, the last reply included."""
        self._said.clear()
        self.last = None

    @property
    def remembers(self) -> bool:
        """Whether the policy reads a question together with what was said before it."""
        return self._prompt.remembers

    def _encode(self, question: str) -> tuple[str, list[int]]:
        try:
            prompt, tokens = self._prompt.prompt(self._said, question)
        except Exception as error:  # templates and tokenizers raise anything
            raise DataError(f"this cannot be a prompt of the policy: {type(error).__name__}: {error}") from error
        if not tokens or len(tokens) >= self._limits.max_length:
            raise DataError(
                f"the prompt has {len(tokens)} tokens: it must have some, and leave room for a reply within "
                f"{self._limits.length_key} ({self._limits.max_length}). Say less, or forget what was said (/reset)"
            )
        return prompt, tokens

"""Talking to a policy: a question goes in as in training, the reply comes out piece by piece.

    question --Wording--> prompt --Sampler.stream--> TextStream --> text, as it settles

It waits for the sampler's next piece. One question at a time.

What somebody says to a policy, written as the policy reads its prompts in training.

question (and what was said before) --> template of the data --> token ids
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
    """`remembers`: whether the messages before the question are part of what the policy reads."""

    remembers: bool

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """Text and token ids; `said` is what came before, questions and replies in turn. Raises what the tokenizer
        raises."""
        ...


class PlainPrompt:
    """`data.template` around the question, as for generated problems and JSON-lines files."""

    remembers = False

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def prompt(self, said: Sequence[str], question: str) -> tuple[str, list[int]]:
        """What was said before is not repeated."""
        text = self._template.replace("{prompt}", question)
        return text, list(self._tokenizer.encode(text))


class TemplatePrompt:
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


def wording_of(config: RunConfig, tokenizer: Tokenizer, *, template: str = "", system: str = "") -> ChatPrompt:
    """`template`, or else what the run's data have. Raises ConfigError, DataError."""
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
    """What came so far. `tokens_by_version`: policy version -> tokens."""

    question: str
    prompt: str
    text: str = ""
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    finish_reason: str = ""

    @property
    def tokens(self) -> int:
        """Of the reply."""
        return sum(self.tokens_by_version.values())


class ChatSession:
    """`async for text in talk.ask(question)`; then `talk.last` says what is to be said of the reply."""

    def __init__(self, config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, wording: ChatPrompt) -> None:
        self._longest = config.rollout.vllm.max_model_len
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._wording = wording
        self._said: list[str] = []
        self._numbers = count(1)
        self.temperature = config.sampling.temperature
        self.max_tokens = config.sampling.max_tokens
        self.seed: int | None = None
        self.last: Reply | None = None

    async def ask(self, question: str) -> AsyncGenerator[str, None]:
        """The reply, as it comes. Raises DataError for what cannot be a prompt, EngineError, WaitTimeout."""
        prompt, tokens = self._prompt(question)
        reply = self.last = Reply(question, prompt)
        request = GenerationRequest(
            request_id=f"chat-{next(self._numbers)}",
            prompt=tokens,
            max_tokens=min(self.max_tokens, self._longest - len(tokens)),
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
        if self._wording.remembers:
            self._said += [question, reply.text]

    def reset(self) -> None:
        """Forget what was said."""
        self._said.clear()
        self.last = None

    @property
    def remembers(self) -> bool:
        """Whether a question is read together with what was said before it."""
        return self._wording.remembers

    def _prompt(self, question: str) -> tuple[str, list[int]]:
        try:
            prompt, tokens = self._wording.prompt(self._said, question)
        except Exception as error:  # whatever a template or a tokenizer raises for a text that it does not know
            raise DataError(f"this cannot be a prompt of the policy: {type(error).__name__}: {error}") from error
        if not tokens or len(tokens) >= self._longest:
            raise DataError(
                f"the prompt has {len(tokens)} tokens: it must have some, and leave room for a reply within "
                f"rollout.vllm.max_model_len ({self._longest}). Say less, or forget what was said (/reset)"
            )
        return prompt, tokens

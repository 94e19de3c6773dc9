"""Bodies of requests for completions: the parameters of OpenAI's API that this server supports.

An unsupported parameter that would change the response is refused, never ignored: the policy is sampled from its full
distribution, as in training. Its neutral value is accepted, because clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from rollout_server.http.streaming import HttpError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Unsupported parameters with their accepted neutral values; null is accepted, too."""
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Parameters that are ignored because they do not change the response."""
MAX_STOPS, MAX_STOP_CHARS = 4, 256
MAX_SEED = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, strict=True)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Body = TypeVar("Body", bound="Sampling")


class Strict(BaseModel):
    """Body that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool = False


class Sampling(Strict):
    """Common parameters of completions and chat."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    return_token_ids: bool = False
    """As in vLLM: every choice, and every chunk of a stream, lists its tokens in `token_ids`."""

    @property
    def stops(self) -> list[str]:
        """Texts that end a completion."""
        if isinstance(self.stop, str):
            return [self.stop]
        return self.stop or []

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_logprobs(self) -> bool:
        """True if the response has log-probabilities."""
        return self.logprobs is not None and self.logprobs is not False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, neutral in NEUTRAL.items():
            if name in body and body[name] is not None and body[name] not in neutral:
                raise ValueError(
                    f"{name} is not supported: the policy is sampled from its full distribution, as in training, and "
                    f"answers with text. Leave it out (or send {neutral[0]!r})"
                )
        return {name: value for name, value in body.items() if name not in NEUTRAL and name not in IGNORED}


class CompletionBody(Sampling):
    """Body of POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0: log-probabilities of the sampled tokens; the engine returns no others."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [part for part in prompt if not isinstance(part, int)]


class TextPart(Strict):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=32)]
    content: str | list[TextPart]
    name: str | None = None

    def to_template_input(self) -> dict[str, str]:
        """The message as input of a chat template."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": self.role, "content": text}
        if self.name:
            message["name"] = self.name
        return message


class ChatBody(Sampling):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""


def parse_body(kind: type[Body], payload: bytes) -> Body:
    """Parse and check a body. Raises HttpError 400 with the parameter and the rule, but not the value."""
    try:
        return kind.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        parameter = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise HttpError(400, f"{parameter}: {message}" if parameter else message, code="invalid_body") from None

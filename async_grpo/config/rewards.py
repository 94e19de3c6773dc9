"""Reward functions, and the limits of their processes and HTTP requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel

OVERLONG = "overlong"
"""Name of the length penalty among a sample's rewards."""

EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class HttpRewardConfig(StrictModel):
    """An HTTP judge: one POST per completion, with a JSON body and a JSON reply."""

    url: str
    """http:// or https:// address of the judge, without a password."""
    timeout_s: Seconds = 30.0
    """Maximum seconds per attempt."""
    retries: NonNegativeInt = 3
    """Attempts after the first, for failed connections, time-outs and the statuses 408, 425, 429 and 5xx."""
    backoff_s: Seconds = 0.5
    """Base of the retry delay: the n-th is random in (0, backoff_s * 2^n], at most `backoff_max_s`."""
    backoff_max_s: Seconds = 10.0
    """Maximum delay between two attempts."""
    concurrency: PositiveInt = 16
    """Maximum number of concurrent requests per rollout server."""
    score_pointer: str = "/score"
    """JSON pointer (RFC 6901) to the score in the reply."""
    max_reply_bytes: PositiveInt = 64 << 10
    """Maximum size of a reply, in bytes; a longer one is a failure."""
    extra: dict[str, Any] = {}
    """Additional fields in the body of every request."""
    headers: dict[str, str] = {}
    """Headers of every request. They are written to the run's config.yaml, so use `token_env` for a secret."""
    token_env: EnvironmentName | None = None
    """Environment variable with the token. The token is read at startup and never written to disk."""
    token_header: str = "Authorization"
    """Header that carries the token."""
    token_prefix: str = "Bearer "
    """Text before the token in that header."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{parts.scheme}://{parts.hostname} is not an http:// or https:// address. Set the judge's URL"
            )
        if parts.username or parts.password:
            raise ValueError(
                "the URL contains a password, which would be written to logs and to the run's config.yaml. "
                "Put the secret into an environment variable and set token_env to its name"
            )
        return url

    @field_validator("headers")
    @classmethod
    def _reject_secret_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if name.lower() in ("authorization", "proxy-authorization", "cookie") or "key" in name.lower():
                raise ValueError(
                    f"the header {name} is probably a secret and would be written to the run's config.yaml. Put its "
                    f"value into an environment variable, set token_env to that variable and token_header to {name}"
                )
        return headers

    @field_validator("score_pointer")
    @classmethod
    def _check_pointer(cls, pointer: str) -> str:
        if pointer and not pointer.startswith("/"):
            raise ValueError(f"{pointer!r} is not a JSON pointer. Start it with /, for example /choices/0/score")
        return pointer


class RewardConfig(StrictModel):
    """One reward function. The reward of a sample is the weighted sum of all scores."""

    name: str
    """A built-in verifier (docs/verifiers.md) or `module:attribute`; with `http`, any name."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Weight of the score in the sum."""
    required: bool = True
    """If this function fails, the sample is unverifiable. False: the sum omits its score instead."""
    http: HttpRewardConfig | None = None
    """The HTTP judge that computes this score. None: a verifier in a local process."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == OVERLONG:
            raise ValueError(f"{name!r} is reserved for the length penalty. Choose another name")
        return name


class RewardsConfig(StrictModel):
    """Reward functions and the processes that run verifiers. These are separate from the server, so that a verifier
    that hangs or leaks can be killed."""

    functions: Annotated[list[RewardConfig], Field(min_length=1)] = [RewardConfig(name="answer_tag")]
    """The reward functions of a sample."""
    workers: PositiveInt = 1
    """Verifier processes per rollout server."""
    deadline_s: Seconds = 10.0
    """Maximum seconds per verifier and completion. After that the process is killed and the sample is `unverifiable`,
    which is different from a score of 0."""
    start_timeout_s: Seconds = 60.0
    """Maximum seconds for a verifier process to import its verifiers."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 2 << 30
    """Memory limit of one verifier process, including its child processes."""
    items_per_worker: PositiveInt = 1000
    """Completions after which a verifier process is replaced, which bounds memory leaks."""
    environment: list[EnvironmentName] = []
    """Environment variables that verifiers get in addition to PATH, HOME and the like (docs/rewards.md)."""
    overlong: Literal["none", "filter", "soft"] = "none"
    """`filter` masks samples that were cut at sampling.max_tokens; `soft` penalises lengths just below it."""
    soft_overlong_tokens: PositiveInt | None = None
    """L: the penalty grows linearly over the last L tokens before sampling.max_tokens."""
    soft_overlong_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Penalty at sampling.max_tokens, the largest."""

    def find_problems(self) -> Iterator[str]:
        names = [function.name for function in self.functions]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            yield f"functions: {', '.join(duplicates)} is given twice. Keep one of them, with the sum of both weights"
        if not any(function.required for function in self.functions):
            yield (
                "functions: no function is required, so a sample could end up without any reward. Set required: true "
                "for at least one of them"
            )
        if (self.overlong == "soft") != (self.soft_overlong_tokens is not None):
            yield (
                f"overlong is {self.overlong!r} and soft_overlong_tokens is {self.soft_overlong_tokens}. "
                "Set rewards.soft_overlong_tokens with overlong: soft, and only then"
            )

    def find_conflicts(self, max_tokens: int) -> Iterator[str]:
        """Find conflicts with the maximum completion length (sampling.max_tokens)."""
        penalised_tokens = self.soft_overlong_tokens
        if penalised_tokens is not None and penalised_tokens >= max_tokens:
            yield (
                f"rewards.soft_overlong_tokens ({penalised_tokens}) is not below sampling.max_tokens ({max_tokens}): "
                "every completion would be penalised for its length. Lower rewards.soft_overlong_tokens"
            )

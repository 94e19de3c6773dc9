"""The reward functions, and the limits of the processes and requests that run them."""

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
    """A judge behind HTTP: one POST a completion, JSON there and back."""

    url: str
    """http:// or https://, without a password in it."""
    timeout_s: Seconds = 30.0
    """Seconds for one attempt."""
    retries: NonNegativeInt = 3
    """Attempts after the first, for connections that fail, time-outs and the statuses 408, 425, 429 and 5xx."""
    backoff_s: Seconds = 0.5
    """The n-th pause is random in (0, backoff_s * 2^n], at most `backoff_max_s`."""
    backoff_max_s: Seconds = 10.0
    """Maximum delay between two attempts."""
    concurrency: PositiveInt = 16
    """Largest number of concurrent requests of one rollout server."""
    score_pointer: str = "/score"
    """Position of the score in the reply: a JSON pointer (RFC 6901)."""
    max_reply_bytes: PositiveInt = 64 << 10
    """A longer reply is a failure."""
    extra: dict[str, Any] = {}
    """Fields to add to the body of every request."""
    headers: dict[str, str] = {}
    """Headers of every request. They are written to the run's config.yaml, so a secret belongs into `token_env`."""
    token_env: EnvironmentName | None = None
    """Name of the environment variable that holds the token; the token is read at the start and never written."""
    token_header: str = "Authorization"
    """Header that carries the token."""
    token_prefix: str = "Bearer "
    """Text before the token in that header."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{parts.scheme}://{parts.hostname} is not an http:// or https:// address. Give the judge's URL"
            )
        if parts.username or parts.password:
            raise ValueError(
                "a URL with a password in it would be written to logs and to the run's config.yaml. "
                "Put the secret into an environment variable and name that in token_env"
            )
        return url

    @field_validator("headers")
    @classmethod
    def _hold_no_secret(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if name.lower() in ("authorization", "proxy-authorization", "cookie") or "key" in name.lower():
                raise ValueError(
                    f"the header {name} would be written to the run's config.yaml. Put its value into an environment "
                    "variable, name that in token_env, and the header in token_header"
                )
        return headers

    @field_validator("score_pointer")
    @classmethod
    def _is_a_pointer(cls, pointer: str) -> str:
        if pointer and not pointer.startswith("/"):
            raise ValueError(f"{pointer!r} is not a JSON pointer. Begin it with /, for example /choices/0/score")
        return pointer


class RewardConfig(StrictModel):
    """One reward; the reward of a sample is the weighted sum of all of them."""

    name: str
    """A built-in verifier (docs/verifiers.md) or `module:attribute`; with `http`, any name."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of its score in the sum."""
    required: bool = True
    """A failure of this reward makes the sample unverifiable. false: it is left out of the sum."""
    http: HttpRewardConfig | None = None

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name == OVERLONG:
            raise ValueError(f"{name!r} is the name of the punishment of length. Choose another")
        return name


class RewardsConfig(StrictModel):
    """Verifiers run outside the event loop, in processes that can be killed."""

    functions: Annotated[list[RewardConfig], Field(min_length=1)] = [RewardConfig(name="answer_tag")]
    """The rewards of a sample."""
    workers: PositiveInt = 1
    """Verifier processes of one rollout server."""
    deadline_s: Seconds = 10.0
    """Seconds for one verifier on one completion. After that the verifier is killed and the sample is `unverifiable`,
    which is not a score of 0."""
    start_timeout_s: Seconds = 60.0
    """Seconds for a verifier process to import its verifiers."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 2 << 30
    """Memory limit of one verifier process, including everything that it started."""
    items_per_worker: PositiveInt = 1000
    """Number of completions after which a verifier process is replaced; this bounds what leaks."""
    environment: list[EnvironmentName] = []
    """Environment variables that verifiers get in addition to PATH, HOME and the like (docs/rewards.md)."""
    overlong: Literal["none", "filter", "soft"] = "none"
    """`filter` masks samples that were cut at sampling.max_tokens; `soft` penalises lengths just below it."""
    soft_overlong_tokens: PositiveInt | None = None
    """L: the penalty grows linearly over the last L tokens before sampling.max_tokens."""
    soft_overlong_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Penalty at sampling.max_tokens, the largest."""

    def problems(self) -> Iterator[str]:
        names = [function.name for function in self.functions]
        if twice := {name for name in names if names.count(name) > 1}:
            yield (f"functions: {', '.join(sorted(twice))} is given twice. Keep one and give it the whole weight")
        if not any(function.required for function in self.functions):
            yield ("functions: none is required, so a sample could have no reward at all. Require one of them")
        if (self.overlong == "soft") != (self.soft_overlong_tokens is not None):
            yield (
                f"overlong is {self.overlong!r} and soft_overlong_tokens is {self.soft_overlong_tokens}. "
                "Set rewards.soft_overlong_tokens with overlong: soft, and only then"
            )

    def problems_in_run(self, max_tokens: int) -> Iterator[str]:
        """Clashes with the longest completion, in tokens (sampling.max_tokens)."""
        punished = self.soft_overlong_tokens
        if punished is not None and punished >= max_tokens:
            yield (
                f"rewards.soft_overlong_tokens ({punished}) is not below sampling.max_tokens ({max_tokens}): "
                "every completion would be penalised for its length. Lower rewards.soft_overlong_tokens"
            )

"""The replay buffer: its server, and the rules for admitting and selecting groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel
from async_grpo.staleness import SELECTORS, OnStale, RateLimit, ReplayPolicy, Selector, StalenessWindow


class SelectorConfig(StrictModel):
    """Selection of the finished groups of the next batch."""

    kind: Annotated[Selector, Field(description=" ".join(f"{name}: {how}." for name, how in SELECTORS.items()))] = (
        "fifo"
    )
    window: PositiveInt = 1
    """W: groups in the window of windowed_fifo."""


class AdmissionConfig(StrictModel):
    """Additional rules for starting generation and training. The staleness window always applies."""

    kind: Literal["staleness_window", "min_size", "sample_to_insert_ratio"] = "staleness_window"
    """`staleness_window`: no additional rule. `min_size`: take a batch only when `min_size` groups are ready.
    `sample_to_insert_ratio`: keep the ratio of trained to generated groups near `samples_per_insert`."""
    min_size: NonNegativeInt = 0
    """Ready groups required before a batch is taken; at least groups_per_step are always required."""
    samples_per_insert: Annotated[float, Field(gt=0)] = 1.0
    """sample_to_insert_ratio: average number of times a group is trained."""
    error_buffer: Annotated[float, Field(gt=0)] | None = None
    """sample_to_insert_ratio: maximum deviation from the ratio, in samples. None: two batches."""

    def find_problems(self) -> Iterator[str]:
        ratio_keys = {"samples_per_insert", "error_buffer"}
        unused_by_kind = {
            "staleness_window": ratio_keys | {"min_size"},
            "min_size": ratio_keys,
            "sample_to_insert_ratio": set(),
        }
        # A resolved configuration sets every key, so values that equal their defaults are accepted.
        unused = sorted(unused_by_kind[self.kind] & self.model_fields_set - self._fields_at_default())
        if unused:
            yield (
                f"{', '.join(unused)} would have no effect with admission.kind {self.kind}. "
                "Remove it, or set buffer.admission.kind to the rule that you want"
            )

    def rate_limit(self, groups_per_step: int) -> RateLimit:
        """Return the limiter of training relative to generation, for batches of `groups_per_step` groups."""
        if self.kind != "sample_to_insert_ratio":
            return RateLimit(min_size=self.min_size)
        size = max(self.min_size, groups_per_step)
        error_buffer = self.error_buffer or 2.0 * groups_per_step
        return RateLimit.from_ratio(self.samples_per_insert, min_size=size, error_buffer=error_buffer)

    def _fields_at_default(self) -> set[str]:
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) == field.default}


class AutoStalenessConfig(StrictModel):
    """Settings of max_staleness: auto. The trainer raises the effective S while it waits for batches, and lowers it
    while batches wait for it or tokens are too old to learn from."""

    min: NonNegativeInt = 0
    """Minimum effective S."""
    max: PositiveInt = 8
    """Maximum effective S. It is the run's bound on the age of tokens (max_staleness)."""
    start: NonNegativeInt = 1
    """Effective S of the first step."""
    patience: PositiveInt = 4
    """Consecutive steps that must call for the same change before S changes."""
    min_ess: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Lower S if the effective sample size of the importance weights is below this."""
    max_clip_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Lower S if a larger fraction of tokens is clipped."""

    def find_problems(self) -> Iterator[str]:
        if not self.min <= self.start <= self.max:
            yield (
                f"auto_staleness.start ({self.start}) is not between auto_staleness.min ({self.min}) and "
                f"auto_staleness.max ({self.max}). Change one of them"
            )

    def find_conflicts(self, max_staleness: int, buffer: BufferConfig) -> Iterator[str]:
        """Find conflicts with the run's bound S and with the buffer's rules."""
        if self.max != max_staleness:
            yield (
                f"auto_staleness applies to max_staleness: auto (its bound is auto_staleness.max, {self.max}), but "
                f"max_staleness is {max_staleness}. Set max_staleness to auto, or remove auto_staleness"
            )
        kinds = {"selector.kind": buffer.selector.kind, "admission.kind": buffer.admission.kind}
        for key, kind in kinds.items():
            if kind in ("exact_age", "sample_to_insert_ratio"):
                yield (
                    f"max_staleness: auto changes the window during the run, but buffer.{key} {kind} needs a "
                    f"fixed one. Set max_staleness to a number, or choose another buffer.{key}"
                )


class BufferConfig(StrictModel):
    """Selection, admission and reuse of groups in the replay buffer."""

    selector: SelectorConfig = SelectorConfig()
    on_stale: OnStale = "drop"
    """Treatment of tokens that are older than max_staleness when their batch is taken. wait: train them (the selectors
    fifo and windowed_fifo bound their age). drop: drop their group. mask: keep them as context, without gradient."""
    admission: AdmissionConfig = AdmissionConfig()
    max_uses: PositiveInt = 1
    """k: maximum number of times a group is trained."""

    def replay_policy(self, window: StalenessWindow, seed: int = 0) -> ReplayPolicy:
        """Return the buffer's policy for this window. Raises ValueError for conflicting settings."""
        return ReplayPolicy(
            window=window,
            selector=self.selector.kind,
            selector_window=self.selector.window,
            on_stale=self.on_stale,
            rate=self.admission.rate_limit(window.groups_per_step),
            max_uses=self.max_uses,
            seed=seed,
        )

    def find_conflicts(self, window: StalenessWindow) -> Iterator[str]:
        """Find buffer settings that conflict under the run's window."""
        # ReplayPolicy has these checks, because the buffer also builds policies without a configuration. Its messages
        # start with the key below `buffer.`.
        try:
            self.replay_policy(window)
        except ValueError as error:
            yield f"buffer.{error}"


class RedisConfig(StrictModel):
    """The Redis or Valkey server of the buffer."""

    url: str | None = None
    """redis://[USER@]HOST:PORT, unix:///SOCKET, redis+cluster://HOST:PORT,HOST:PORT or
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; with TLS rediss://, rediss+cluster:// or rediss+sentinel://.
    None: an embedded Valkey, private to the run. The password comes from the environment variable
    ASYNC_GRPO_REDIS_PASSWORD; the user from ASYNC_GRPO_REDIS_USERNAME, unless the URL names one."""
    tls_ca: str | None = None
    """CA file for verifying the server's certificate. None: the system's CAs."""
    tls_cert: str | None = None
    """Client certificate file, for servers that require one."""
    tls_key: str | None = None
    """Private key file of tls_cert. None: the key is in tls_cert."""
    replicas_to_wait_for: NonNegativeInt = 0
    """Replicas that must confirm each change (WAIT). 0: only the primary confirms, and a failover may lose the latest
    changes."""
    max_memory_bytes: PositiveInt = 1 << 30
    """Memory limit of the embedded server."""
    quota_bytes: PositiveInt | None = None
    """Memory limit of this run on the server of `url`, which other runs may share. At the limit, no new group is
    admitted. None: the run's worst-case need."""
    fsync: Literal["everysec", "always"] = "always"
    """When the embedded server syncs its append-only file. always: a crash loses nothing that the server acknowledged.
    everysec: a crash loses up to two seconds, for about a third more small groups per second."""
    durable: bool = True
    """Require an append-only file on the server of `url`. False: only warn; the run is lost if that server dies."""
    timeout_s: Seconds = 30.0
    """Seconds to retry a call while the server does not answer; after that the role exits with an error."""

    def find_problems(self) -> Iterator[str]:
        parts = urlsplit(self.url or "")
        if parts.password is not None or "password" in parse_qs(parts.query):
            yield (
                "url contains a password, which would be written to the run's config.yaml. "
                "Remove it from redis.url and set the environment variable ASYNC_GRPO_REDIS_PASSWORD"
            )
        if self.replicas_to_wait_for and self.url is None:
            yield (
                f"replicas_to_wait_for is {self.replicas_to_wait_for}, but redis.url is not set and the embedded "
                "server has no replicas: every change would fail. Set redis.url, or redis.replicas_to_wait_for to 0"
            )
        if self.quota_bytes is not None and self.url is None:
            yield (
                "quota_bytes is set, but redis.url is not, and no other run shares the embedded server. "
                "Set redis.max_memory_bytes instead"
            )
        tls_keys = [name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(self, name) is not None]
        if tls_keys and not (self.url or "").startswith("rediss"):
            yield (
                f"{tls_keys[0]} is set, but the connection to {self.url} is not encrypted, so it would have no "
                f"effect. Use rediss:// in redis.url, or remove redis.{tls_keys[0]}"
            )
        if self.tls_key is not None and self.tls_cert is None:
            yield "tls_key is set without tls_cert, its certificate. Set redis.tls_cert"

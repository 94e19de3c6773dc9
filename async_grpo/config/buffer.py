"""The replay buffer: the server that holds it, and how it admits and selects groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel
from async_grpo.staleness import SELECTORS, OnStale, RateLimit, ReplayPolicy, Selector, StalenessWindow


class SelectorConfig(StrictModel):
    """Which finished groups make the next batch."""

    kind: Annotated[Selector, Field(description=" ".join(f"{name}: {how}." for name, how in SELECTORS.items()))] = (
        "fifo"
    )
    window: PositiveInt = 1
    """W: window of windowed_fifo, in groups."""


class AdmissionConfig(StrictModel):
    """Rules for starting generation and training, in addition to the staleness window, which always holds."""

    kind: Literal["staleness_window", "min_size", "sample_to_insert_ratio"] = "staleness_window"
    """`staleness_window`: no further rule. `min_size`: wait for that number of ready groups. `sample_to_insert_ratio`:
    keep training and generation near a ratio."""
    min_size: NonNegativeInt = 0
    """Groups that must be ready before a batch is taken; never fewer than groups_per_step."""
    samples_per_insert: Annotated[float, Field(gt=0)] = 1.0
    """Average number of times a group is trained, for sample_to_insert_ratio."""
    error_buffer: Annotated[float, Field(gt=0)] | None = None
    """Largest deviation from the ratio, in samples, for sample_to_insert_ratio. None: two batches."""

    def problems(self) -> Iterator[str]:
        ratio = {"samples_per_insert", "error_buffer"}
        unused = {"staleness_window": ratio | {"min_size"}, "min_size": ratio, "sample_to_insert_ratio": set()}
        if stray := sorted(unused[self.kind] & self.model_fields_set - self._defaults()):
            yield (
                f"{', '.join(stray)} would have no effect with admission.kind {self.kind}. "
                "Remove it, or set buffer.admission.kind to the rule that you want"
            )

    def rate_limit(self, groups_per_step: int) -> RateLimit:
        """The limit of sampling for batches of `groups_per_step` groups."""
        if self.kind != "sample_to_insert_ratio":
            return RateLimit(min_size=self.min_size)
        size = max(self.min_size, groups_per_step)
        error_buffer = self.error_buffer or 2.0 * groups_per_step
        return RateLimit.from_ratio(self.samples_per_insert, min_size=size, error_buffer=error_buffer)

    def _defaults(self) -> set[str]:
        """Fields with their default values."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) == field.default}


class AutoStalenessConfig(StrictModel):
    """max_staleness: auto. The trainer moves the effective S between two bounds, depending on which side waits."""

    min: NonNegativeInt = 0
    """Smallest effective S."""
    max: PositiveInt = 8
    """Largest effective S. It is the bound on the age: max_staleness of the run."""
    start: NonNegativeInt = 1
    """Effective S at the first step."""
    patience: PositiveInt = 4
    """Steps that must agree before S changes."""
    min_ess: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Effective sample size of the importance weights below which S falls."""
    max_clip_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of clipped tokens above which S falls."""

    def problems(self) -> Iterator[str]:
        if not self.min <= self.start <= self.max:
            yield (
                f"auto_staleness.start ({self.start}) is not between auto_staleness.min ({self.min}) and "
                f"auto_staleness.max ({self.max}). Change one of them"
            )

    def problems_in_run(self, max_staleness: int, buffer: BufferConfig) -> Iterator[str]:
        """Clashes with the bound S of the run and with the buffer's rules."""
        if self.max != max_staleness:
            yield (
                f"auto_staleness is for max_staleness: auto, which is then auto_staleness.max ({self.max}), but "
                f"max_staleness is {max_staleness}. Set max_staleness to auto, or remove auto_staleness"
            )
        kinds = {"selector.kind": buffer.selector.kind, "admission.kind": buffer.admission.kind}
        for key, kind in kinds.items():
            if kind in ("exact_age", "sample_to_insert_ratio"):
                yield (
                    f"max_staleness: auto changes the window during the run, and buffer.{key} {kind} needs a "
                    f"fixed one. Give max_staleness a number, or choose another buffer.{key}"
                )


class BufferConfig(StrictModel):
    """Selection, admission and reuse of groups in the replay buffer."""

    selector: SelectorConfig = SelectorConfig()
    on_stale: OnStale = "drop"
    """Treatment of tokens that are older than max_staleness when their batch is taken. wait: they are trained (fifo
    and windowed_fifo bound their age). drop: their group is dropped. mask: they stay as context and get no gradient."""
    admission: AdmissionConfig = AdmissionConfig()
    max_uses: PositiveInt = 1
    """k: number of times a group may be trained."""

    def replay_policy(self, window: StalenessWindow, seed: int = 0) -> ReplayPolicy:
        """The buffer's policy for this window. Raises ValueError for conflicting settings."""
        return ReplayPolicy(
            window=window,
            selector=self.selector.kind,
            selector_window=self.selector.window,
            on_stale=self.on_stale,
            rate=self.admission.rate_limit(window.groups_per_step),
            max_uses=self.max_uses,
            seed=seed,
        )

    def problems_in_run(self, window: StalenessWindow) -> Iterator[str]:
        """Settings that conflict with each other under the run's window."""
        try:
            self.replay_policy(window)
        except ValueError as error:
            yield f"buffer.{error}"


class RedisConfig(StrictModel):
    """The server that holds the buffer."""

    url: str | None = None
    """redis://[USER@]HOST:PORT, unix:///SOCKET, redis+cluster://HOST:PORT,HOST:PORT or
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; with TLS rediss://, rediss+cluster:// or rediss+sentinel://.
    None: an embedded Valkey, private to the run. A password comes from the environment variable
    ASYNC_GRPO_REDIS_PASSWORD (with it, if not the URL's, a user from ASYNC_GRPO_REDIS_USERNAME)."""
    tls_ca: str | None = None
    """File with the CA of the server's certificate. None: only the system's CAs."""
    tls_cert: str | None = None
    """File with a client certificate, for servers that require one."""
    tls_key: str | None = None
    """File with the key of tls_cert. None: the key is in that file."""
    replicas_to_wait_for: NonNegativeInt = 0
    """Replicas that must confirm a change before it counts (WAIT). 0: only the primary confirms, and a failover may
    lose the latest changes."""
    max_memory_bytes: PositiveInt = 1 << 30
    """Memory limit of the embedded server."""
    quota_bytes: PositiveInt | None = None
    """Memory limit of this run on the server of `url`, which other runs use too. No new group is admitted at the limit.
    None: the worst case of the run."""
    fsync: Literal["everysec", "always"] = "always"
    """When the embedded server syncs its append-only file. always: a crash of the server loses nothing that it
    acknowledged. everysec: a crash loses up to two seconds, for about a third more small groups per second."""
    durable: bool = True
    """Require that the server of `url` keeps an append-only file. False: warn instead; the run is lost if that server
    dies."""
    timeout_s: Seconds = 30.0
    """Seconds for which a call is retried while the server does not answer; then the role ends with an error."""

    def problems(self) -> Iterator[str]:
        parts = urlsplit(self.url or "")
        if parts.password is not None or "password" in parse_qs(parts.query):
            yield (
                "url contains a password, and the configuration is written into the run's folder for everyone to read. "
                "Remove it from redis.url and set the environment variable ASYNC_GRPO_REDIS_PASSWORD"
            )
        if self.replicas_to_wait_for and self.url is None:
            yield (
                f"replicas_to_wait_for is {self.replicas_to_wait_for}, but redis.url is not set and the embedded "
                "server has no replicas: every change would fail. Set redis.url, or leave it 0"
            )
        if self.quota_bytes is not None and self.url is None:
            yield (
                "quota_bytes is set, but redis.url is not, and the embedded server is this run's alone. "
                "Set redis.max_memory_bytes instead"
            )
        given = [name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(self, name) is not None]
        if given and not (self.url or "").startswith("rediss"):
            yield (
                f"{given[0]} is set, but the connection to {self.url} is not encrypted, so that it would have no "
                "effect. Write rediss:// in redis.url, or remove it"
            )
        if self.tls_key is not None and self.tls_cert is None:
            yield "tls_key is set without tls_cert, the certificate that it belongs to. Set redis.tls_cert"

"""Shared state of the routes: the configuration, the keys, and the parts of the server once it is ready.

Keys come from the environment and are never logged or shown.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from async_grpo.config import RunConfig
from async_grpo.config.http import HttpConfig
from async_grpo.errors import ConfigError
from rollout_server.context import ServerContext
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.engines.http import KEY_VARIABLE
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.http.jobs import CompletionJobs
from rollout_server.http.prompts import PromptEncoder
from rollout_server.http.streaming import HttpError, not_ready_error
from rollout_server.weight_watcher import WeightWatcher

ADMIN_VARIABLE = "ASYNC_GRPO_ADMIN_TOKEN"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Administration token and key for completions, "" if not set. Neither appears in `repr`."""

    admin: str = field(default="", repr=False)
    completions: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], config: HttpConfig) -> ApiKeys:
        """Read the keys. Raises ConfigError for a server that anybody on the network could use."""
        keys = cls(environment.get(ADMIN_VARIABLE, ""), environment.get(KEY_VARIABLE, ""))
        if not config.is_local and not keys.completions:
            raise ConfigError(
                f"rollout.http.host is {config.host!r}, which other machines can reach, and {KEY_VARIABLE} is not set: "
                f"anybody could use the policy. Set {KEY_VARIABLE} in the environment of the rollout server, or set "
                "rollout.http.host to 127.0.0.1"
            )
        return keys

    def check_completions_key(self, authorization: str) -> None:
        """Check the header `authorization`. Raises HttpError 401 if a key is set and the header has another one."""
        if self.completions and not _has_secret(authorization, self.completions):
            raise _unauthorized(f"the key of this server is expected ({KEY_VARIABLE} where it was started)")

    def check_admin_token(self, authorization: str) -> None:
        """Check the header `authorization`. Raises HttpError 403 if administration is off, 401 for a wrong token."""
        if not self.admin:
            raise HttpError(
                403,
                f"administration is off: {ADMIN_VARIABLE} was not set where this server was started. "
                "Set it there and restart the server",
                code="admin_off",
            )
        if not _has_secret(authorization, self.admin):
            raise _unauthorized(f"the administration token is expected ({ADMIN_VARIABLE} where the server was started)")


def _has_secret(authorization: str, secret: str) -> bool:
    """True if the header has the secret. Takes the same time for every header."""
    scheme, _, token = authorization.partition(" ")
    # Compare digests, because compare_digest reveals whether the lengths are equal.
    same = hmac.compare_digest(_digest(token.strip()), _digest(secret))
    return same and scheme.lower() == "bearer"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(expected: str) -> HttpError:
    return HttpError(
        401,
        f"{expected}, as the header 'Authorization: Bearer ...'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


STARTING = "the engine is starting, or waits for its first weights"
LEAVING = "the server leaves the run"


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """Parts of a server that the routes read and control."""

    context: ServerContext
    watcher: WeightWatcher
    dispatcher: Dispatcher
    evaluator: MilestoneEvaluator
    jobs: CompletionJobs

    @property
    def policy_version(self) -> str:
        """ "epoch-version" of the engine's weights."""
        return self.format_version(self.context.engine.version)

    def format_version(self, version: int) -> str:
        """ "epoch-version" of a policy version, for responses."""
        return f"{self.watcher.applied.epoch}-{version}"


class HttpContext:
    """State of the HTTP API. `server` is present from the first weights until the server stops."""

    def __init__(self, config: RunConfig, name: str, keys: ApiKeys, prompts: PromptEncoder) -> None:
        self.config = config
        self.name = name
        self.keys = keys
        self.prompts = prompts
        self.responses: Counter[tuple[str, int]] = Counter()
        """Number of responses by route and status."""
        self.server: ReadyServer | None = None
        self.absence_reason = STARTING
        """Reason why `server` is None."""

    @property
    def not_ready_reason(self) -> str | None:
        """Reason why the server is not ready; None if it is."""
        if self.server is None:
            return self.absence_reason
        if self.server.dispatcher.admission.is_draining:
            return LEAVING
        return None

    def require_ready(self) -> ReadyServer:
        """Return the server, for completions. Raises HttpError 503 if it is not ready or drains."""
        if self.server is None:
            raise not_ready_error(self.absence_reason)
        if self.server.dispatcher.admission.is_draining:
            raise not_ready_error(LEAVING)
        return self.server

    def require_server(self) -> ReadyServer:
        """Return the server, for administration, also while it drains. Raises HttpError 503 if it is absent."""
        if self.server is None:
            raise not_ready_error(self.absence_reason)
        return self.server

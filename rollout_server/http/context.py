"""What the routes share: the configuration, the keys, and the parts of the server once it is ready.

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
from rollout_server.http.streaming import HttpError, not_ready
from rollout_server.weight_watcher import WeightWatcher

ADMIN_VARIABLE = "ASYNC_GRPO_ADMIN_TOKEN"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The administration token and the key for completions, "" if not set. Neither appears in `repr`."""

    admin: str = field(default="", repr=False)
    completions: str = field(default="", repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str], config: HttpConfig) -> ApiKeys:
        """The keys of the environment. Raises ConfigError for a server that anybody on the network could use."""
        keys = cls(environment.get(ADMIN_VARIABLE, ""), environment.get(KEY_VARIABLE, ""))
        if not config.is_local and not keys.completions:
            raise ConfigError(
                f"rollout.http.host is {config.host!r}, which other machines can reach, and {KEY_VARIABLE} is not set: "
                f"anybody could use the policy. Set {KEY_VARIABLE} in the environment of the rollout server, or set "
                "rollout.http.host to 127.0.0.1"
            )
        return keys

    def admit_to_completions(self, authorization: str) -> None:
        """Raises HttpError 401 unless no key is set or this is it."""
        if self.completions and not _carries(authorization, self.completions):
            raise _wrong(f"the key of this server is expected ({KEY_VARIABLE} where it was started)")

    def admit_to_admin(self, authorization: str) -> None:
        """Raises HttpError 403 if administration is off, 401 for a wrong token."""
        if not self.admin:
            raise HttpError(
                403,
                f"administration is off: {ADMIN_VARIABLE} was not set where this server was started. "
                "Set it there and start the server again",
                code="admin_off",
            )
        if not _carries(authorization, self.admin):
            raise _wrong(f"the administration token is expected ({ADMIN_VARIABLE} where the server was started)")


def _carries(authorization: str, secret: str) -> bool:
    """Whether the header carries the secret. Takes the same time for every header."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(_digest(given.strip()), _digest(secret))
    return same and scheme.lower() == "bearer"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _wrong(expected: str) -> HttpError:
    return HttpError(
        401,
        f"{expected}, as the header 'Authorization: Bearer ...'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


STARTING, LEAVING = "the engine is starting, or waits for its first weights", "the server leaves the run"


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """The parts of a server that the routes read and control."""

    context: ServerContext
    watcher: WeightWatcher
    dispatcher: Dispatcher
    evaluator: MilestoneEvaluator
    jobs: CompletionJobs

    @property
    def policy(self) -> str:
        """ "epoch-version" of the engine's weights."""
        return self.identity_of(self.context.engine.version)

    def identity_of(self, version: int) -> str:
        """ "epoch-version" of a policy version, as responses show it."""
        return f"{self.watcher.applied.epoch}-{version}"


class HttpContext:
    """State of the HTTP API. `server` is set from the first weights until the server stops."""

    def __init__(self, config: RunConfig, name: str, keys: ApiKeys, prompts: PromptEncoder) -> None:
        self.config = config
        self.name = name
        self.keys = keys
        self.prompts = prompts
        self.responses: Counter[tuple[str, int]] = Counter()
        """Number of answers by route and status."""
        self.server: ReadyServer | None = None
        self.missing = STARTING
        """Why `server` is None."""

    @property
    def why_not_ready(self) -> str:
        """Why the server is not ready, "" if it is."""
        if self.server is None:
            return self.missing
        return LEAVING if self.server.dispatcher.admission.is_draining else ""

    def ready(self) -> ReadyServer:
        """The server, for completions. Raises HttpError 503 if it is not ready or drains."""
        if self.server is None or self.why_not_ready:
            raise not_ready(self.why_not_ready)
        return self.server

    def open(self) -> ReadyServer:
        """The server, for administration, also while it drains. Raises HttpError 503 if it is not there."""
        if self.server is None:
            raise not_ready(self.missing)
        return self.server

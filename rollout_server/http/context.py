"""What the routes share: the configuration, the keys, and the parts of the server once it is ready."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from async_grpo.config import RunConfig
from rollout_server.context import ServerContext
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.http.auth import ApiKeys
from rollout_server.http.jobs import CompletionJobs
from rollout_server.http.prompts import PromptEncoder
from rollout_server.http.streaming import not_ready
from rollout_server.weight_watcher import WeightWatcher

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

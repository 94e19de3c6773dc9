"""What the routes share: how far the server is, and its nouns once they are there."""

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
    """The server's nouns that the routes look at or speak to."""

    context: ServerContext
    watcher: WeightWatcher
    dispatcher: Dispatcher
    evaluator: MilestoneEvaluator
    jobs: CompletionJobs

    @property
    def policy(self) -> str:
        """Epoch and version of the engine's weights."""
        return self.identity_of(self.context.engine.version)

    def identity_of(self, version: int) -> str:
        """ "epoch-version", as in every response."""
        return f"{self.watcher.applied.epoch}-{version}"


class HttpContext:
    """One for the life of the api; `server` is there from the first weights to the server's end."""

    def __init__(self, config: RunConfig, name: str, keys: ApiKeys, prompts: PromptEncoder) -> None:
        self.config = config
        self.name = name
        self.keys = keys
        self.prompts = prompts
        self.responses: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.server: ReadyServer | None = None
        self.missing = STARTING
        """Why there is no server."""

    @property
    def why_not_ready(self) -> str:
        """ "" if the server is ready."""
        if self.server is None:
            return self.missing
        return LEAVING if self.server.dispatcher.admission.is_draining else ""

    def ready(self) -> ReadyServer:
        """For whoever wants completions. Raises HttpError 503."""
        if self.server is None or self.why_not_ready:
            raise not_ready(self.why_not_ready)
        return self.server

    def open(self) -> ReadyServer:
        """For whoever administers, also while the server drains. Raises HttpError 503."""
        if self.server is None:
            raise not_ready(self.missing)
        return self.server

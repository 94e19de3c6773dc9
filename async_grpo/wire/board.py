"""Records of the run board."""

from __future__ import annotations

import msgspec

from async_grpo.wire.records import Group, Record


class PublisherAddress(Record, frozen=True, kw_only=True, tag="publisher"):
    """ZMQ endpoints of the publisher of one epoch: PUB announcements and ROUTER requests."""

    epoch: int
    announce: str
    requests: str


class ServerBeat(Record, frozen=True, kw_only=True, tag="server"):
    """How a rollout server is doing. `waiting_for` is "" while it generates at full concurrency."""

    name: str
    pid: int
    version: int
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    waiting_for: str = ""
    updates: int = 0
    last_pause_s: float = 0.0
    time_s: float = 0.0
    http: str = ""
    """Where it answers over HTTP, "" if it does not: `http://127.0.0.1:40123`."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over prompts with its 95% confidence interval (`async_grpo.evaluation.estimators`)."""

    value: float
    low: float
    high: float


class EvalMetrics(Record, frozen=True, kw_only=True, tag="figures"):
    """What graded completions say; None or missing: not measured. `async_grpo.evaluation.summary` makes them."""

    prompts: int
    """With at least one completion that could be judged."""
    completions: int
    """Sampled and judged."""
    unjudged: int = 0
    """Sampled, and not to be judged: in no figure."""
    unextracted: int = 0
    """Sampled, and looking for the answer failed: without a vote in maj@k."""
    mean: Estimate | None = None
    """mean@k: of the scores."""
    pass_at: dict[str, Estimate] = {}
    """k -> probability that one of k completions is right."""
    majority: Estimate | None = None
    """maj@k: the answer that most completions give is right."""
    greedy: Estimate | None = None
    """Mean score at temperature 0."""


class Evaluation(Record, frozen=True, kw_only=True, tag="evaluation"):
    """Accuracy on held-out prompts of one policy version, pinned while it was measured."""

    version: int
    prompts: int
    samples: int
    sampled_accuracy: float
    """mean@samples at temperature 1."""
    greedy_accuracy: float | None = None
    completion_tokens_mean: float = 0.0
    wall_s: float = 0.0
    server: str = ""
    figures: EvalMetrics | None = None
    """With intervals; None in what an older release has measured."""
    by_source: dict[str, EvalMetrics] = {}
    """Of each source of the data, if there are several."""
    no_majority: str = ""
    """Why there is no maj@k."""


class Probe(Record, frozen=True, kw_only=True, tag="probe"):
    """Groups whose every token comes from `version`; the trainer compares log-probabilities."""

    version: int
    groups: list[Group]

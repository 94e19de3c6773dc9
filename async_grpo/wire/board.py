"""Records of the run board."""

from __future__ import annotations

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


class Probe(Record, frozen=True, kw_only=True, tag="probe"):
    """Groups whose every token comes from `version`; the trainer compares log-probabilities."""

    version: int
    groups: list[Group]

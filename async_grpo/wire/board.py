"""Records of the run board."""

from __future__ import annotations

import msgspec

from async_grpo.wire.records import Group, Record

PROTOCOL = 1
"""Version of the protocol between the roles of a run: records, scripts of the buffer, messages of the weights. Releases
with the same number may take part in one run."""


class PublisherAddress(Record, frozen=True, kw_only=True, tag="publisher"):
    """Address at which the weights of one epoch are published.

    `zmq`: the endpoints of PUB announcements and ROUTER requests. With a `weights.location`: `announce` is the folder
    of the epoch in it, and `requests` is "".
    """

    epoch: int
    announce: str
    requests: str
    protocol: int = 1
    """`PROTOCOL` of the trainer's release."""


class ReplayProgress(Record, frozen=True, kw_only=True, tag="replay"):
    """Progress of a resumed trainer in repeating its steps.

    It is at `version`, and publishes nothing before `target`, the newest version published before its restart. They are
    equal if no step is left to repeat.
    """

    epoch: int
    version: int
    target: int


class EvaluationState(msgspec.Struct, frozen=True):
    """Progress of a running evaluation."""

    version: int
    done: int
    total: int
    left_s: float | None = None
    """Seconds left at the present pace; None if no completion is done yet."""


class ServerBeat(Record, frozen=True, kw_only=True, tag="server"):
    """State of a rollout server. `waiting_for` is "" while it generates at full concurrency."""

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
    """URL of its HTTP server (`http://127.0.0.1:40123`); "" if it has none."""
    logprob_gap: float | None = None
    """Largest |reported - recomputed| log-probability in its startup check; None: its engine does not sample."""
    evaluation: EvaluationState | None = None
    """The running evaluation; None if there is none."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over prompts with its 95% confidence interval (`async_grpo.evaluation.estimators`)."""

    value: float
    low: float
    high: float


class EvalMetrics(Record, frozen=True, kw_only=True, tag="figures"):
    """Results of graded completions, from `async_grpo.evaluation.summary`. None or missing: not measured."""

    prompts: int
    """Number of prompts with at least one completion that could be judged."""
    completions: int
    """Number of completions that were sampled and judged."""
    unjudged: int = 0
    """Number of completions that could not be judged; no other field counts them."""
    unextracted: int = 0
    """Number of completions from which no answer could be extracted; they have no vote in maj@k."""
    mean: Estimate | None = None
    """mean@k: mean score."""
    pass_at: dict[str, Estimate] = {}
    """k -> probability that at least one of k completions is right."""
    majority: Estimate | None = None
    """maj@k: probability that the most frequent answer is right."""
    greedy: Estimate | None = None
    """Mean score at temperature 0."""
    failed: int = 0
    """Number of completions, sampled or greedy, whose workflow failed; no other field counts them."""


class Evaluation(Record, frozen=True, kw_only=True, tag="evaluation"):
    """Accuracy of one policy version on held-out prompts; the engine kept the version during the evaluation."""

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
    """The results with confidence intervals; None if an older release measured them."""
    by_source: dict[str, EvalMetrics] = {}
    """Results per data source, if there are several."""
    no_majority: str = ""
    """Reason why there is no maj@k."""


class Probe(Record, frozen=True, kw_only=True, tag="probe"):
    """Groups whose tokens are all from `version`, on which the trainer compares log-probabilities."""

    version: int
    groups: list[Group]

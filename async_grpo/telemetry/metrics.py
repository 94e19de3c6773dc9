"""METRICS: the table of step metrics. SERVER_METRICS: those of a rollout server.

A row of the table names the key in metrics.jsonl and summary.json, the tag of TensorBoard and other trackers, the gauge
of Prometheus, and the statistics that the value is computed from. The trainer adds up `SUMS` and `MAXIMA` over
micro-batches and ranks, `StepTotals.values` applies the table, and docs/reference.md is written from it.

To add a metric, add a row here and put its statistic into trainer/step/statistics.py. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from async_grpo.telemetry.timeline import WAIT

PHASES = (WAIT, "pack", "prox", "reference", "train", "optimizer", "publish", "checkpoint")
"""Phases of a step, in order. A row has the seconds of each as `<phase>_s`."""

COMPUTE = ("pack", "prox", "reference", "train", "optimizer")
"""Phases in which the ranks compute."""


@dataclass(slots=True)
class StepTotals:
    """Totals of one step, over its micro-batches, ranks and updates; all counts are over the whole batch."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    """Statistic -> sum over the trained tokens; a token counts once per training."""
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MAXIMA, 0.0))
    """Statistic -> maximum over the trained tokens; 0 without tokens."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each update."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence, including the prompt, once per forward pass of the training."""
    token_capacity: int = 0
    """Token capacity of all micro-batches."""
    micro_batches: int = 0
    balances: list[float] = field(default_factory=list)
    """For each packing, mean work of the data-parallel ranks / work of the busiest rank."""
    advantages: list[float] = field(default_factory=list)
    """Advantage of each judged sample."""
    overlong: int = 0
    """Samples truncated or dropped because they exceed a micro-batch."""
    lr_scale: float = 1.0
    flops: float = 0.0
    """Useful floating-point operations of the forward and backward passes, all ranks."""
    with_entropy: bool = False
    """True if the objective has an entropy bonus, so that entropies were computed."""
    with_reference: bool = False
    """True if there is a reference model."""

    def add(self, sums: dict[str, float], maxima: dict[str, float]) -> None:
        """Add the statistics of one update, reduced over micro-batches and ranks."""
        self.sums = {name: self.sums[name] + value for name, value in sums.items()}
        self.maxima = {name: max(self.maxima[name], value) for name, value in maxima.items()}

    def per_token(self, name: str) -> float:
        """Return a sum divided by the number of trained tokens; 0 without tokens."""
        return self.sums[name] / max(1.0, self.sums["tokens"])

    def values(self) -> dict[str, Any]:
        """Return key -> value of all metrics that are computed from totals; None if there is nothing to measure."""
        return {metric.key: metric.reduce(self) for metric in METRICS if metric.reduce is not None}


Unit = Literal["", "s", "steps", "groups", "samples/s", "tokens", "tokens/s", "nats", "FLOP", "share"]
"""Unit of a metric: `steps` of the optimizer, a `share` from 0 to 1, "" for a plain number or a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    key: str
    """Key in metrics.jsonl."""
    tag: str
    """Tag of TensorBoard and other trackers; "" for a metric that is not a scalar or not shown as a curve."""
    unit: Unit
    label: str
    """Name for titles and legends, without the unit."""
    doc: str
    """One sentence, for docs/reference.md and the gauge's help."""
    gauge: str = ""
    """Name of the Prometheus gauge, without `async_grpo_trainer_`; "" for a metric without a gauge."""
    sums: tuple[str, ...] = ()
    """Statistics that are summed over tokens, micro-batches and ranks."""
    maxima: tuple[str, ...] = ()
    """Statistics whose maximum over tokens, micro-batches and ranks is used."""
    reduce: Callable[[StepTotals], float | None] | None = None
    """Totals of a step -> value. None if the value comes from the batch or the clock (trainer/step/results.py)."""

    @property
    def group(self) -> str:
        """The first part of the tag, such as `reward`; "" without a tag."""
        return self.tag.partition("/")[0]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    centre = _mean(values)
    return math.sqrt(_mean([(value - centre) ** 2 for value in values]))


def _effective_sample_size(totals: StepTotals) -> float:
    squared = totals.sums["weight_squared"]
    tokens = max(1.0, totals.sums["tokens"])
    return totals.sums["weight"] ** 2 / (tokens * squared) if squared else 0.0


METRICS: tuple[Metric, ...] = (
    Metric(
        key="step",
        tag="",
        unit="",
        label="optimizer step",
        doc="Version that the step produced.",
    ),
    Metric(
        key="version",
        tag="run/version",
        unit="",
        label="version",
        doc="Version that the step started from.",
    ),
    Metric(
        key="epoch",
        tag="run/epoch",
        unit="",
        label="epoch",
        doc="Rises by one each time a trainer takes over the run.",
    ),
    Metric(
        key="time_s",
        tag="",
        unit="s",
        label="time",
        doc="Unix time at the end of the step.",
    ),
    Metric(
        key="replayed",
        tag="run/replayed",
        unit="",
        label="replayed",
        doc="True if the step was repeated after a crash.",
    ),
    Metric(
        key="groups",
        tag="rollout/groups",
        unit="groups",
        label="groups",
        doc="Groups in the batch.",
    ),
    Metric(
        key="buffer_groups",
        tag="",
        unit="groups",
        label="buffer groups",
        doc="State -> number of groups after the step: waiting tasks, and groups inflight, ready and taken.",
    ),
    Metric(
        key="released_groups",
        tag="",
        unit="groups",
        label="released groups",
        doc="Reason -> number of groups released since the start of the run.",
    ),
    Metric(
        key="reward_mean",
        tag="reward/mean",
        unit="",
        label="reward, mean",
        doc="Mean reward of the judged samples.",
        gauge="reward_mean",
    ),
    Metric(
        key="reward_std",
        tag="reward/std",
        unit="",
        label="reward, std",
        doc="Standard deviation of the rewards of the judged samples.",
        gauge="reward_std",
    ),
    Metric(
        key="reward_error",
        tag="reward/error",
        unit="",
        label="reward, standard error",
        doc="Standard error of reward_mean over the groups of the batch.",
    ),
    Metric(
        key="reward_by_function",
        tag="",
        unit="",
        label="reward by function",
        doc="Reward function -> mean score, before weights.",
    ),
    Metric(
        key="unverifiable_samples",
        tag="other/unverifiable_samples",
        unit="",
        label="unverifiable samples",
        doc="Samples that no verifier could judge.",
    ),
    Metric(
        key="informative_groups",
        tag="other/informative_groups",
        unit="share",
        label="groups whose rewards differ",
        doc="Share of the groups whose rewards are not all equal.",
        gauge="informative_groups",
    ),
    Metric(
        key="completion_tokens_mean",
        tag="rollout/completion_tokens_mean",
        unit="tokens",
        label="completion length, mean",
        doc="Mean length of a completion in tokens.",
        gauge="completion_tokens_mean",
    ),
    Metric(
        key="completion_tokens_max",
        tag="rollout/completion_tokens_max",
        unit="tokens",
        label="completion length, max",
        doc="Length of the longest completion.",
    ),
    Metric(
        key="truncated_fraction",
        tag="rollout/truncated_fraction",
        unit="share",
        label="truncated completions",
        doc="Share of the completions that reached a length limit.",
        gauge="truncated_fraction",
    ),
    Metric(
        key="loss",
        tag="train/loss",
        unit="",
        label="loss",
        doc="Mean loss over the updates of the step.",
        gauge="loss",
        sums=("loss", "tokens"),
        reduce=lambda totals: totals.sums["loss"] / len(totals.norms),
    ),
    Metric(
        key="grad_norm",
        tag="train/grad_norm",
        unit="",
        label="gradient norm",
        doc="Mean gradient norm over the updates of the step, before clipping.",
        gauge="grad_norm",
        reduce=lambda totals: _mean(totals.norms),
    ),
    Metric(
        key="lr",
        tag="train/lr",
        unit="",
        label="learning rate",
        doc="Learning rate of the step.",
        gauge="learning_rate",
    ),
    Metric(
        key="lr_scale",
        tag="train/lr_scale",
        unit="",
        label="learning-rate factor",
        doc="Factor on the learning rate; 1 without ess_lr.",
        sums=("sequence_weight", "sequence_weight_squared", "sequences"),
        reduce=lambda totals: totals.lr_scale,
    ),
    Metric(
        key="clip_fraction",
        tag="train/clip_fraction",
        unit="share",
        label="clipped tokens",
        doc="Share of the trained tokens that left the trust region.",
        gauge="clip_fraction",
        sums=("clipped",),
        reduce=lambda totals: totals.per_token("clipped"),
    ),
    Metric(
        key="clip_low_fraction",
        tag="train/clip_low_fraction",
        unit="share",
        label="clipped below",
        doc="Share of the trained tokens whose ratio fell below the trust region.",
        sums=("clipped_low",),
        reduce=lambda totals: totals.per_token("clipped_low"),
    ),
    Metric(
        key="clip_high_fraction",
        tag="train/clip_high_fraction",
        unit="share",
        label="clipped above",
        doc="Share of the trained tokens whose ratio rose above the trust region.",
        sums=("clipped_high",),
        reduce=lambda totals: totals.per_token("clipped_high"),
    ),
    Metric(
        key="rejected_fraction",
        tag="train/rejected_fraction",
        unit="share",
        label="rejected tokens",
        doc="Share of the trained tokens whose weight a correction sets to 0.",
        sums=("rejected",),
        reduce=lambda totals: totals.per_token("rejected"),
    ),
    Metric(
        key="weight_mean",
        tag="importance/weight_mean",
        unit="",
        label="weight, mean",
        doc="Mean of rho = pi / pi_behaviour before any cap; pi is the policy before the update.",
        sums=("weight",),
        reduce=lambda totals: totals.per_token("weight"),
    ),
    Metric(
        key="weight_max",
        tag="importance/weight_max",
        unit="",
        label="weight, max",
        doc="Largest rho of a token.",
        maxima=("weight",),
        reduce=lambda totals: totals.maxima["weight"],
    ),
    Metric(
        key="ess",
        tag="importance/ess",
        unit="share",
        label="effective sample size",
        doc="Effective sample size (sum rho)^2 / sum rho^2, as a share of the trained tokens.",
        gauge="ess",
        sums=("weight_squared",),
        reduce=_effective_sample_size,
    ),
    Metric(
        key="kl",
        tag="train/kl",
        unit="nats",
        label="KL from the reference",
        doc="Mean KL divergence from the reference model (objective.kl_estimator); only with a reference model.",
        gauge="kl",
        sums=("kl",),
        reduce=lambda totals: totals.per_token("kl") if totals.with_reference else None,
    ),
    Metric(
        key="entropy_estimate",
        tag="other/entropy_estimate",
        unit="nats",
        label="entropy, estimated",
        doc="Negative mean log-probability of the sampled tokens; an unbiased estimate of the entropy only on-policy.",
        gauge="entropy_estimate",
        sums=("logprob",),
        reduce=lambda totals: -totals.per_token("logprob"),
    ),
    Metric(
        key="entropy",
        tag="train/entropy",
        unit="nats",
        label="entropy",
        doc="Mean entropy of the token distributions; only with an entropy bonus.",
        sums=("entropy",),
        reduce=lambda totals: totals.per_token("entropy") if totals.with_entropy else None,
    ),
    Metric(
        key="advantage_mean",
        tag="train/advantage_mean",
        unit="",
        label="advantage, mean",
        doc="Mean advantage of the samples with a gradient.",
        reduce=lambda totals: _mean(totals.advantages),
    ),
    Metric(
        key="advantage_std",
        tag="train/advantage_std",
        unit="",
        label="advantage, std",
        doc="Standard deviation of the advantages of the samples with a gradient.",
        reduce=lambda totals: _deviation(totals.advantages),
    ),
    Metric(
        key="trained_tokens",
        tag="train/tokens",
        unit="tokens",
        label="trained tokens",
        doc="Tokens with a gradient, counted once per training.",
        reduce=lambda totals: int(totals.sums["tokens"]),
    ),
    Metric(
        key="masked_tokens",
        tag="other/masked_tokens",
        unit="tokens",
        label="masked tokens",
        doc="Tokens without a gradient because they are too old.",
    ),
    Metric(
        key="age_mean",
        tag="staleness/age_mean",
        unit="steps",
        label="age, mean",
        doc="Mean age of the trained tokens in steps.",
        gauge="age_mean_steps",
    ),
    Metric(
        key="age_max",
        tag="staleness/age_max",
        unit="steps",
        label="age, max",
        doc="Age of the oldest trained token in steps.",
        gauge="age_max_steps",
    ),
    Metric(
        key="staleness",
        tag="staleness/s",
        unit="steps",
        label="staleness",
        doc="Effective S: max_staleness, or less with auto.",
        gauge="staleness_steps",
    ),
    Metric(
        key="age_histogram",
        tag="",
        unit="",
        label="age histogram",
        doc="Age -> number of trained tokens.",
    ),
    Metric(
        key="overlong_samples",
        tag="train/overlong_samples",
        unit="",
        label="overlong samples",
        doc="Samples truncated or dropped because they exceed a micro-batch.",
        reduce=lambda totals: totals.overlong,
    ),
    Metric(
        key="logprob_gap_mean",
        tag="logprob_gap/mean",
        unit="nats",
        label="log-probability gap, mean",
        doc="Mean |trainer - engine| log-probability over completions that this version sampled completely.",
        gauge="logprob_gap_mean",
        sums=("gap", "gap_tokens"),
        reduce=lambda totals: totals.sums["gap"] / totals.sums["gap_tokens"] if totals.sums["gap_tokens"] else None,
    ),
    Metric(
        key="logprob_gap_max",
        tag="logprob_gap/max",
        unit="nats",
        label="log-probability gap, max",
        doc="Maximum |trainer - engine| log-probability over the same completions.",
        gauge="logprob_gap_max",
        maxima=("gap",),
        reduce=lambda totals: totals.maxima["gap"] if totals.sums["gap_tokens"] else None,
    ),
    Metric(
        key="gap_tokens",
        tag="logprob_gap/tokens",
        unit="tokens",
        label="gap tokens",
        doc="Number of tokens in the measurement of the log-probability gap.",
        reduce=lambda totals: int(totals.sums["gap_tokens"]),
    ),
    Metric(
        key="updates",
        tag="train/updates",
        unit="",
        label="updates",
        doc="Optimizer updates of the step.",
        reduce=lambda totals: len(totals.norms),
    ),
    Metric(
        key="skipped_steps",
        tag="train/skipped_steps",
        unit="",
        label="skipped steps",
        doc="1 if the step was skipped: its loss or gradient was not finite.",
    ),
    Metric(
        key="micro_batches",
        tag="other/micro_batches",
        unit="",
        label="micro batches",
        doc="Micro-batches per data-parallel rank.",
        reduce=lambda totals: totals.micro_batches,
    ),
    Metric(
        key="packing_efficiency",
        tag="train/packing_efficiency",
        unit="share",
        label="packing efficiency",
        doc="read_tokens / (micro-batches * micro_batch_tokens).",
        reduce=lambda totals: sum(totals.lengths) / totals.token_capacity,
    ),
    Metric(
        key="rank_balance",
        tag="train/rank_balance",
        unit="share",
        label="rank balance",
        doc="Mean work of the data-parallel ranks / work of the busiest rank.",
        reduce=lambda totals: _mean(totals.balances),
    ),
    Metric(
        key="read_tokens",
        tag="train/read_tokens",
        unit="tokens",
        label="read tokens",
        doc="Tokens in the forward and backward passes, including prompts and other context.",
        reduce=lambda totals: sum(totals.lengths),
    ),
    Metric(
        key="model_flops",
        tag="speed/model_flops",
        unit="FLOP",
        label="model flops",
        doc="Useful floating-point operations of the forward and backward passes, all ranks.",
        reduce=lambda totals: totals.flops,
    ),
    Metric(
        key="tokens_per_s",
        tag="speed/tokens_per_s",
        unit="tokens/s",
        label="tokens trained per second",
        doc="trained_tokens / step_s; waits are included.",
        gauge="tokens_per_s",
    ),
    Metric(
        key="read_tokens_per_s",
        tag="speed/read_tokens_per_s",
        unit="tokens/s",
        label="tokens read per second of computing",
        doc="read_tokens / seconds in which the ranks compute.",
    ),
    Metric(
        key="mfu",
        tag="speed/mfu",
        unit="share",
        label="model FLOPs utilization",
        doc="model_flops / (seconds in which the ranks compute * peak FLOP/s of all devices), if the peak is known.",
    ),
    Metric(
        key="wait_s",
        tag="time/wait_s",
        unit="s",
        label="wait",
        doc="Seconds of waiting for groups.",
    ),
    Metric(
        key="start_s",
        tag="time/start_s",
        unit="s",
        label="start",
        doc="Seconds until the first batch of this process; not part of step_s.",
    ),
    Metric(
        key="pack_s",
        tag="time/pack_s",
        unit="s",
        label="pack",
        doc="Seconds of building sequences and packing them.",
    ),
    Metric(
        key="prox_s",
        tag="time/prox_s",
        unit="s",
        label="prox",
        doc="Seconds of evaluating the proximal policy.",
    ),
    Metric(
        key="reference_s",
        tag="time/reference_s",
        unit="s",
        label="reference",
        doc="Seconds of evaluating the reference model.",
    ),
    Metric(
        key="train_s",
        tag="time/train_s",
        unit="s",
        label="train",
        doc="Seconds of forward and backward passes.",
    ),
    Metric(
        key="optimizer_s",
        tag="time/optimizer_s",
        unit="s",
        label="optimizer",
        doc="Seconds of optimizer updates.",
    ),
    Metric(
        key="publish_s",
        tag="time/publish_s",
        unit="s",
        label="publish",
        doc="Seconds of publishing the weights, in which the trainer waits.",
    ),
    Metric(
        key="checkpoint_s",
        tag="time/checkpoint_s",
        unit="s",
        label="checkpoint",
        doc="Seconds for which the previous step's checkpoint held up the trainer.",
    ),
    Metric(
        key="step_s",
        tag="time/step_s",
        unit="s",
        label="step",
        doc="Seconds of the whole step.",
    ),
    Metric(
        key="cpu_wait_s",
        tag="cpu/wait_s",
        unit="s",
        label="cpu wait",
        doc="Seconds of the step in which a busy thread of a rank waited for a processor.",
    ),
)

SUMS: tuple[str, ...] = tuple(dict.fromkeys(name for metric in METRICS for name in metric.sums))
MAXIMA: tuple[str, ...] = tuple(dict.fromkeys(name for metric in METRICS for name in metric.maxima))
"""Statistics that trainer/step/statistics.py reduces, in this order."""


@dataclass(frozen=True, slots=True)
class ServerMetric:
    """One Prometheus metric of a rollout server."""

    key: str
    """Name without `async_grpo_`. Names that end in `_total` are counters, all others are gauges."""
    doc: str
    """One sentence, for docs/reference.md and the help text on /metrics."""
    labels: tuple[str, ...] = ()


SERVER_METRICS: tuple[ServerMetric, ...] = (
    ServerMetric("server_info", "This server, always 1.", ("run", "server")),
    ServerMetric("ready", "1 if the server is ready for completions and training."),
    ServerMetric("http_responses_total", "HTTP responses.", ("route", "status")),
    ServerMetric("generated_tokens_total", "Tokens generated for training and evaluation."),
    ServerMetric("evaluation_tokens_total", "Tokens generated for evaluation, counted when a sample is finished."),
    ServerMetric("http_tokens_total", "Tokens generated for HTTP, which the other two token counters exclude."),
    ServerMetric("requests_running", "Requests in the engine with at least one token, from any source."),
    ServerMetric("requests_waiting", "Requests in the engine without a token yet."),
    ServerMetric("kv_cache_use_ratio", "Share of the KV cache in use by requests in flight; 0 if unknown."),
    ServerMetric("http_completions_running", "HTTP completions in progress."),
    ServerMetric("logprob_proof_gap", "Maximum gap in the check of the engine's log-probabilities at its start."),
    ServerMetric("policy_version", "Version of the weights that generate the next token."),
    ServerMetric("policy_epoch", "Epoch of those weights."),
    ServerMetric("policy_versions_behind", "Newest published version minus this server's version."),
    ServerMetric("weight_updates_total", "Applied weight updates."),
    ServerMetric("weight_transfer_seconds", "Time from the last version's manifest until it was received completely."),
    ServerMetric("weight_pause_seconds", "Pause of generation during the last update."),
    ServerMetric("weight_load_seconds", "Part of the last pause in which the weights were copied into the engine."),
    ServerMetric("disputed_spans_total", "Completions for which vLLM and this server report other versions; expect 0."),
    ServerMetric("concurrency_limit_samples", "Maximum number of concurrent training samples."),
    ServerMetric("samples_running", "Training samples in progress."),
    ServerMetric("admission_open", "1 if the server admits new groups; 0 if paused or draining."),
    ServerMetric("leases", "Groups that this server is generating."),
    ServerMetric("leases_lost_total", "Groups dropped because their lease was lost to another server."),
    ServerMetric("groups_total", "Groups that ended here, by outcome or reason for discarding.", ("outcome",)),
    ServerMetric("samples_total", "Samples of inserted groups.", ("finish_reason",)),
    ServerMetric("reward_failures_total", "Completions that could not be judged.", ("kind",)),
    ServerMetric("buffer_up", "1 if the buffer responded; it is queried at most once per second."),
    ServerMetric("buffer_groups", "Groups of the whole run: waiting, inflight, ready or taken.", ("state",)),
    ServerMetric("window_groups", "Groups of the whole run in the staleness window."),
    ServerMetric("window_capacity_groups", "Size of the staleness window, (effective S + 1) * P."),
    ServerMetric("window_fill_ratio", "Share of the window in use, including groups in generation."),
)

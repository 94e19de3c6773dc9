"""METRICS: the table of what a training step measures.

A row of the table names the key in metrics.jsonl and summary.json, the tag of TensorBoard and other trackers, the gauge
of Prometheus, and the statistics that the value is computed from. The trainer adds up `SUMS` and `MAXIMA` over
micro-batches and ranks, `StepTotals.values` applies the table, and docs/reference.md is written from it.

To add a metric, add a row here and put its statistic into trainer/step/statistics.py. This module imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.telemetry.timeline import WAIT

PHASES = (WAIT, "pack", "prox", "reference", "train", "optimizer", "publish", "checkpoint")
"""The parts of a step, in order. A row has the seconds of each as `<phase>_s`."""

COMPUTE = ("pack", "prox", "reference", "train", "optimizer")
"""The phases in which the ranks compute."""


@dataclass(slots=True)
class StepTotals:
    """Totals of one step, over its micro-batches, ranks and updates; all counts are over the whole batch."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    """Statistic -> sum over the trained tokens, each as often as it was trained."""
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MAXIMA, 0.0))
    """Statistic -> largest value of a token; 0 if there is none."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each update."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence read, prompt included, as often as it was read."""
    slots: int = 0
    """Tokens that the micro-batches had room for."""
    micro_batches: int = 0
    balances: list[float] = field(default_factory=list)
    """For each packing: mean work of a data-parallel rank / work of the busiest."""
    advantages: list[float] = field(default_factory=list)
    """Advantage of each sample that a verifier could judge."""
    overlong: int = 0
    """Samples truncated or dropped because they fit no micro-batch."""
    lr_scale: float = 1.0
    flops: float = 0.0
    """Useful floating-point operations of the forward and backward passes, all ranks."""
    with_entropy: bool = False
    """Whether the objective has an entropy bonus, so that entropies were computed."""
    with_reference: bool = False
    """Whether there is a reference model."""

    def add(self, sums: dict[str, float], maxima: dict[str, float]) -> None:
        """Add the statistics of one update, reduced over micro-batches and ranks."""
        self.sums = {name: self.sums[name] + value for name, value in sums.items()}
        self.maxima = {name: max(self.maxima[name], value) for name, value in maxima.items()}

    def per_token(self, name: str) -> float:
        """A sum divided by the number of trained tokens; 0 if there are none."""
        return self.sums[name] / max(1.0, self.sums["tokens"])

    def values(self) -> dict[str, Any]:
        """Key -> value of every metric that is computed from totals; None where there is nothing to measure."""
        return {metric.key: metric.value(self) for metric in METRICS if metric.value is not None}


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    key: str
    """Key in metrics.jsonl."""
    doc: str
    """One sentence, for docs/reference.md and the gauge's help."""
    tag: str = ""
    """Tag of TensorBoard and other trackers; empty: not a scalar of the curves."""
    sums: tuple[str, ...] = ()
    """Statistics that are added up over tokens, micro-batches and ranks."""
    maxima: tuple[str, ...] = ()
    """Statistics of which the largest is kept."""
    value: Callable[[StepTotals], float | None] | None = None
    """Totals of a step -> value. None: the value comes from the batch or the clock (trainer/step/results.py)."""
    gauge: str = ""
    """Name of the Prometheus gauge, without `async_grpo_trainer_`; empty: not shown."""

    @property
    def label(self) -> str:
        """Name for titles and legends, without the unit.

        >>> [metric.label for metric in METRICS if metric.key in ("ess", "grad_norm", "step_s", "weight_max")]
        ['gradient norm', 'weight, max', 'effective sample size', 'step']
        """
        words = _LABELS.get(self.key) or self.key.removesuffix("_s").replace("_", " ")
        return re.sub(r",? (mean|max|std)$", r", \1", words.replace("logprob", "log-probability"))

    @property
    def unit(self) -> str:
        """`s`, `tokens`, `tokens/s`, `steps` (of the optimizer), `nats`, `FLOP`, `share` (0 to 1) or "".

        >>> {metric.key: metric.unit for metric in METRICS if metric.key in ("loss", "step_s", "clip_fraction")}
        {'loss': '', 'clip_fraction': 'share', 'step_s': 's'}
        """
        return next((unit for pattern, unit in _UNITS.items() if re.fullmatch(pattern, self.key)), "")

    @property
    def group(self) -> str:
        """The first part of the tag, such as `reward`; "" without a tag."""
        return self.tag.partition("/")[0]


_LABELS = {
    "step": "optimizer step",
    "reward_error": "reward, standard error",
    "informative_groups": "groups whose rewards differ",
    "completion_tokens_mean": "completion length, mean",
    "completion_tokens_max": "completion length, max",
    "tokens_per_s": "tokens trained per second",
    "read_tokens_per_s": "tokens read per second of computing",
    "truncated_fraction": "truncated completions",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "lr_scale": "learning-rate factor",
    "clip_fraction": "clipped tokens",
    "clip_low_fraction": "clipped below",
    "clip_high_fraction": "clipped above",
    "rejected_fraction": "rejected tokens",
    "ess": "effective sample size",
    "kl": "KL from the reference",
    "entropy_estimate": "entropy, estimated",
    "mfu": "model FLOPs utilization",
}
_UNITS = {
    r"(\w+_)?tokens_per_s": "tokens/s",
    r"\w+_s": "s",
    r"\w+_fraction|ess|mfu|informative_groups|packing_efficiency|rank_balance": "share",
    r"\w+_tokens|completion_tokens_\w+": "tokens",
    r"age_m\w+": "steps",
    r"kl|entropy\w*|logprob_gap_m\w+": "nats",
    r"model_flops": "FLOP",
}
"""Pattern of a whole key -> unit; the first that matches counts."""


def _ess(totals: StepTotals) -> float:
    squared = totals.sums["weight_squared"]
    tokens = max(1.0, totals.sums["tokens"])
    return totals.sums["weight"] ** 2 / (tokens * squared) if squared else 0.0


def _token_mean(statistic: str, key: str, doc: str, group: str = "train", gauge: str = "") -> Metric:
    """The mean of a statistic over the trained tokens."""
    return Metric(key, doc, f"{group}/{key}", sums=(statistic,), value=lambda t: t.per_token(statistic), gauge=gauge)


def _if_measured(total: float, totals: StepTotals) -> float | None:
    return total if totals.sums["gap_tokens"] else None


METRICS: tuple[Metric, ...] = (
    Metric("step", "Version that the step made."),
    Metric("version", "Version that the step started from.", "run/version"),
    Metric("epoch", "Rises by one each time a trainer takes over the run.", "run/epoch"),
    Metric("time_s", "Unix time at the end of the step."),
    Metric("replayed", "Whether the step was made once more after a crash.", "run/replayed"),
    Metric("groups", "Groups in the batch.", "rollout/groups"),
    Metric("buffer_groups", "State -> groups: tasks waiting, and groups inflight, ready and taken, after the step."),
    Metric("released_groups", "Reason -> groups released since the run began."),
    Metric("reward_mean", "Mean reward of the samples that were judged.", "reward/mean", gauge="reward_mean"),
    Metric("reward_std", "Standard deviation of those rewards.", "reward/std", gauge="reward_std"),
    Metric("reward_error", "Standard error of reward_mean over the groups of the batch.", "reward/error"),
    Metric("reward_by_function", "Reward function -> mean of its scores, before weights."),
    Metric("unverifiable_samples", "Samples that no verifier could judge.", "other/unverifiable_samples"),
    Metric(
        *("informative_groups", "Share of the groups whose rewards differ.", "other/informative_groups"),
        gauge="informative_groups",
    ),
    Metric(
        *("completion_tokens_mean", "Mean length of a completion in tokens.", "rollout/completion_tokens_mean"),
        gauge="completion_tokens_mean",
    ),
    Metric("completion_tokens_max", "Length of the longest completion.", "rollout/completion_tokens_max"),
    Metric(
        *("truncated_fraction", "Share of the completions that ran into a limit.", "rollout/truncated_fraction"),
        gauge="truncated_fraction",
    ),
    Metric(
        *("loss", "Mean loss over the updates of the step.", "train/loss"),
        gauge="loss",
        sums=("loss", "tokens"),
        value=lambda t: t.sums["loss"] / len(t.norms),
    ),
    Metric(
        *("grad_norm", "Mean gradient norm over the updates of the step, before clipping.", "train/grad_norm"),
        gauge="grad_norm",
        value=lambda t: _mean(t.norms),
    ),
    Metric("lr", "Learning rate of the step.", "train/lr", gauge="learning_rate"),
    Metric(
        *("lr_scale", "Factor on the learning rate; 1 without ess_lr.", "train/lr_scale"),
        sums=("sequence_weight", "sequence_weight_squared", "sequences"),
        value=lambda t: t.lr_scale,
    ),
    _token_mean(
        *("clipped", "clip_fraction", "Share of the trained tokens that left the trust region."), gauge="clip_fraction"
    ),
    _token_mean(
        "clipped_low", "clip_low_fraction", "Share of the trained tokens that left it below: their ratio fell."
    ),
    _token_mean("clipped_high", "clip_high_fraction", "Share of the trained tokens that left it above."),
    _token_mean("rejected", "rejected_fraction", "Share of the trained tokens that a correction multiplies by 0."),
    _token_mean(
        *("weight", "weight_mean"),
        "Mean of rho = pi / pi_behaviour before any cap; pi is the policy before the update.",
        "importance",
    ),
    Metric(
        *("weight_max", "Largest rho of a token.", "importance/weight_max"),
        maxima=("weight",),
        value=lambda t: t.maxima["weight"],
    ),
    Metric(
        *("ess", "Effective sample size (sum rho)^2 / sum rho^2, as a share of the trained tokens.", "importance/ess"),
        gauge="ess",
        sums=("weight_squared",),
        value=_ess,
    ),
    Metric(
        "kl",
        "Mean divergence from the reference model by objective.kl_estimator; only with a reference model.",
        "train/kl",
        gauge="kl",
        sums=("kl",),
        value=lambda t: t.per_token("kl") if t.with_reference else None,
    ),
    Metric(
        "entropy_estimate",
        "-mean log-probability of the sampled tokens: unbiased for the entropy only if on-policy.",
        "other/entropy_estimate",
        gauge="entropy_estimate",
        sums=("logprob",),
        value=lambda t: -t.per_token("logprob"),
    ),
    Metric(
        *("entropy", "Mean entropy of the distributions; only with an entropy bonus.", "train/entropy"),
        sums=("entropy",),
        value=lambda t: t.per_token("entropy") if t.with_entropy else None,
    ),
    Metric(
        *("advantage_mean", "Mean advantage of the samples that a verifier could judge.", "train/advantage_mean"),
        value=lambda t: _mean(t.advantages),
    ),
    Metric(
        *("advantage_std", "Standard deviation of those advantages.", "train/advantage_std"),
        value=lambda t: _deviation(t.advantages),
    ),
    Metric(
        "trained_tokens",
        "Tokens that got a gradient, each as often as it did.",
        "train/tokens",
        value=lambda t: int(t.sums["tokens"]),
    ),
    Metric("masked_tokens", "Tokens too old to get a gradient.", "other/masked_tokens"),
    Metric("age_mean", "Mean age of the trained tokens in steps.", "staleness/age_mean", gauge="age_mean_steps"),
    Metric("age_max", "Age of the oldest trained token in steps.", "staleness/age_max", gauge="age_max_steps"),
    Metric("staleness", "S in force: max_staleness, or less with auto.", "staleness/s", gauge="staleness_steps"),
    Metric("age_histogram", "Age -> number of trained tokens."),
    Metric(
        "overlong_samples",
        "Samples truncated or dropped because they fit no micro-batch.",
        "train/overlong_samples",
        value=lambda t: t.overlong,
    ),
    Metric(
        "logprob_gap_mean",
        "Mean |trainer - engine| log-probability over completions that this very version sampled whole.",
        "logprob_gap/mean",
        gauge="logprob_gap_mean",
        sums=("gap", "gap_tokens"),
        value=lambda t: _if_measured(t.sums["gap"] / max(1.0, t.sums["gap_tokens"]), t),
    ),
    Metric(
        *("logprob_gap_max", "Largest of those differences.", "logprob_gap/max"),
        gauge="logprob_gap_max",
        maxima=("gap",),
        value=lambda t: _if_measured(t.maxima["gap"], t),
    ),
    Metric(
        "gap_tokens",
        "Tokens that the gap was measured on.",
        "logprob_gap/tokens",
        value=lambda t: int(t.sums["gap_tokens"]),
    ),
    Metric("updates", "Optimizer updates of the step.", "train/updates", value=lambda t: len(t.norms)),
    Metric("skipped_steps", "1 if the step was skipped: its loss or gradient was not finite.", "train/skipped_steps"),
    Metric(
        "micro_batches",
        "Micro-batches on each data-parallel rank.",
        "other/micro_batches",
        value=lambda t: t.micro_batches,
    ),
    Metric(
        "packing_efficiency",
        "Tokens read / (micro-batches * micro_batch_tokens).",
        "train/packing_efficiency",
        value=lambda t: sum(t.lengths) / t.slots,
    ),
    Metric(
        "rank_balance",
        "Mean work of a data-parallel rank / work of the busiest.",
        "train/rank_balance",
        value=lambda t: _mean(t.balances),
    ),
    Metric(
        "read_tokens",
        "Positions that were trained through, with prompts and all other context.",
        "train/read_tokens",
        value=lambda t: sum(t.lengths),
    ),
    Metric(
        "model_flops",
        "Useful floating-point operations of the forward and backward passes, all ranks.",
        "speed/model_flops",
        value=lambda t: t.flops,
    ),
    Metric("tokens_per_s", "trained_tokens over step_s, waits included.", "speed/tokens_per_s", gauge="tokens_per_s"),
    Metric("read_tokens_per_s", "read_tokens over the seconds in which the ranks compute.", "speed/read_tokens_per_s"),
    Metric("mfu", "model_flops over those seconds and the peak of all devices, where it is known.", "speed/mfu"),
    Metric("wait_s", "Seconds of waiting for groups.", "time/wait_s"),
    Metric("start_s", "Seconds until the first batch of this process; not part of step_s.", "time/start_s"),
    Metric("pack_s", "Seconds of making sequences and packing them.", "time/pack_s"),
    Metric("prox_s", "Seconds of evaluating the proximal policy.", "time/prox_s"),
    Metric("reference_s", "Seconds of evaluating the reference model.", "time/reference_s"),
    Metric("train_s", "Seconds of forward and backward passes.", "time/train_s"),
    Metric("optimizer_s", "Seconds of optimizer updates.", "time/optimizer_s"),
    Metric("publish_s", "Seconds of handing over the weights.", "time/publish_s"),
    Metric("checkpoint_s", "Seconds of starting the checkpoint before this row.", "time/checkpoint_s"),
    Metric("step_s", "Seconds of the whole step.", "time/step_s"),
    Metric("cpu_wait_s", "Seconds of the step for which a busy thread of a rank waited for a processor.", "cpu/wait_s"),
)

SUMS: tuple[str, ...] = tuple(dict.fromkeys(name for metric in METRICS for name in metric.sums))
MAXIMA: tuple[str, ...] = tuple(dict.fromkeys(name for metric in METRICS for name in metric.maxima))
"""What trainer/step/statistics.py reduces, in this order."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    centre = _mean(values)
    return math.sqrt(_mean([(value - centre) ** 2 for value in values]))


@dataclass(frozen=True, slots=True)
class ServerMetric:
    """One row of what a rollout server shows to Prometheus."""

    key: str
    """Name without `async_grpo_`. A name that ends in `_total` is a counter, any other a gauge."""
    doc: str
    """One sentence, for docs/reference.md and the help on /metrics."""
    labels: tuple[str, ...] = ()


SERVER_METRICS: tuple[ServerMetric, ...] = (
    ServerMetric("server_info", "This server, always 1.", ("run", "server")),
    ServerMetric("ready", "1: ready for completions and training."),
    ServerMetric("http_responses_total", "Answers over HTTP.", ("route", "status")),
    ServerMetric("generated_tokens_total", "Tokens generated for training and evaluation."),
    ServerMetric("evaluation_tokens_total", "Tokens of those for evaluation, counted when a sample is finished."),
    ServerMetric("http_tokens_total", "Tokens generated for HTTP; they are in neither of the other two."),
    ServerMetric("requests_running", "Requests in the engine that have a first token, of any origin."),
    ServerMetric("requests_waiting", "Requests in the engine that have no token yet."),
    ServerMetric("kv_cache_use_ratio", "Share of the KV cache that requests in flight need; 0 if unknown."),
    ServerMetric("http_completions_running", "Completions under way for HTTP."),
    ServerMetric("logprob_proof_gap", "Largest gap in the proof of the engine's log-probabilities, made at its start."),
    ServerMetric("policy_version", "Version of the weights that generate the next token."),
    ServerMetric("policy_epoch", "Epoch of those weights."),
    ServerMetric("policy_versions_behind", "Newest published version minus this server's."),
    ServerMetric("weight_updates_total", "Weight updates applied."),
    ServerMetric("weight_transfer_seconds", "Time from the last version's manifest until all of it was received."),
    ServerMetric("weight_pause_seconds", "Time without a token during the last update."),
    ServerMetric("weight_load_seconds", "The part of that time in which the weights were copied into the engine."),
    ServerMetric("disputed_spans_total", "Completions with other versions by vLLM than by this server; should stay 0."),
    ServerMetric("concurrency_limit_samples", "Most training samples that may run at once."),
    ServerMetric("samples_running", "Training samples that run."),
    ServerMetric("admission_open", "1: takes up new groups; 0: paused or draining."),
    ServerMetric("leases", "Groups that this server is generating."),
    ServerMetric("leases_lost_total", "Groups dropped because another server holds them."),
    ServerMetric("groups_total", "Groups that ended here; a discarded one by its reason.", ("outcome",)),
    ServerMetric("samples_total", "Samples of inserted groups.", ("finish_reason",)),
    ServerMetric("reward_failures_total", "Completions that could not be judged.", ("kind",)),
    ServerMetric("buffer_up", "1: the buffer answered; it is asked at most once a second."),
    ServerMetric("buffer_groups", "Groups of the whole run: waiting, inflight, ready or taken.", ("state",)),
    ServerMetric("window_groups", "Groups of the whole run in the staleness window."),
    ServerMetric("window_capacity_groups", "Size of the staleness window, (S in force + 1) * P."),
    ServerMetric("window_fill_ratio", "Share of the window in use, groups in generation included."),
)

"""Charts of a run: curves that are drawn together, with title, unit, labels and colours for all displays.

    METRICS --> METRIC_CHARTS --+--> app/report      pictures of a run's report
    (a chart for each metric)   |--> lab/sweep       pictures of a sweep's report
                                |--> lab/view        the page of runs, by /api/metrics
    AGES, IDLE, BUFFER, ... ----+--> deploy/grafana  the dashboard, by make_dashboard.py
    (charts of several curves)  +--> trackers        names of the scalars that METRICS does not have

Displays add their own parts: smoothing and intervals, PromQL, pointer and keyboard. To add a metric, add a row to
METRICS. To add a chart with several curves, add a constant here and draw it by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from async_grpo.telemetry.metrics import METRICS, Unit

Dash = Literal["-", "--", ":", "-."]
"""Line style of Matplotlib."""


class Color(StrEnum):
    """Colours by name. Line colours are those of Okabe and Ito, which colour-blind readers can distinguish
    (https://jfly.uni-koeln.de/color/)."""

    BLUE = "#0072B2"
    """The typical value, and the trainer."""
    RED = "#D55E00"
    """The extreme value, and the rollout servers."""
    GREY = "#6b7079"
    """A limit."""
    ORANGE = "#E69F00"
    GREEN = "#009E73"
    PURPLE = "#CC79A7"
    SILVER = "#e3e5e9"
    SKY = "#9ecae1"
    TEAL = "#6f8f86"
    MOSS = "#a3b86c"
    NAVY = "#08306b"


class Kind(StrEnum):
    """Arrangement of the curves of a chart."""

    LINES = "lines"
    STACKED = "stacked"
    """Stacked areas."""
    HISTOGRAM = "histogram"
    """Shares by value, over the whole run or by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve. The curves of a chart also differ in line style, so that it is readable without colour."""

    key: str
    """Key of a step's row (`buffer_groups.ready`: an entry of a dictionary) or of an evaluation, TRAINER_IDLE,
    ROLLOUT_IDLE, or a limit of the run in summary.json, such as `age_bound`, which is a constant line."""
    label: str
    """Name in the legend."""
    color: Color = Color.BLUE
    dash: Dash = "-"
    hatch: str = ""
    """Hatching of a stacked area."""
    doc: str = ""
    """One sentence, if the label is not enough."""
    error: str = ""
    """Key of the standard error of the value, which is drawn as a band."""
    only_if_varying: bool = False
    """True if the curve is omitted for a constant value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Title, unit and curves of a chart."""

    title: str
    """Title without the unit."""
    unit: Unit
    group: str = ""
    """Section of the page with this chart."""
    doc: str = ""
    """One sentence, for the page."""
    series: tuple[Series, ...] = ()
    family: str = ""
    """Key of a step's row with a dictionary of numbers, of which each entry is a curve. `series` has the entries with a
    fixed label and colour."""
    kind: Kind = Kind.LINES

    @property
    def heading(self) -> str:
        """Title with the unit, unless the title contains the unit or the axis shows percent.

        >>> [METRIC_CHARTS[key].heading for key in ("kl", "ess", "tokens_per_s")]
        ['KL from the reference (nats)', 'Effective sample size', 'Tokens trained per second']
        """
        title = f"{self.title[0].upper()}{self.title[1:]}"
        has_unit = self.unit.removesuffix("/s") in title.lower().split()
        if self.unit in ("", "share") or has_unit:
            return title
        return f"{title} ({self.unit})"

    def label_of(self, name: str) -> str:
        """Return the label of an entry of the family.

        >>> [BUFFER.label_of(name) for name in ("inflight", "taken")]
        ['in flight', 'taken']
        """
        for series in self.series:
            if series.key == f"{self.family}.{name}":
                return series.label
        return name


TRAINER_IDLE, ROLLOUT_IDLE = "idle.trainer", "idle.rollout"
"""Keys of the idle shares by step (`telemetry.idle`)."""


def _single(key: str, title: str, unit: Unit, group: str, doc: str) -> Chart:
    return Chart(title=title, unit=unit, group=group, doc=doc, series=(Series(key=key, label=title),))


METRIC_CHARTS: dict[str, Chart] = {
    TRAINER_IDLE: _single(TRAINER_IDLE, "trainer idle", "share", "idle", "Share of a step spent waiting."),
    ROLLOUT_IDLE: _single(ROLLOUT_IDLE, "rollout servers idle", "share", "idle", "Share without any generation."),
    **{
        metric.key: _single(metric.key, metric.label, metric.unit, metric.group, metric.doc)
        for metric in METRICS
        if metric.tag
    },
}
"""Key -> chart with one curve, for all scalar metrics of a step."""

REWARD = Chart(
    title="training reward",
    unit="",
    group="reward",
    doc="Mean reward of the judged samples of a step.",
    series=(Series(key="reward_mean", label="mean reward", error="reward_error"),),
)

REWARD_BY_FUNCTION = Chart(
    title="reward by function, before weights",
    unit="",
    group="reward",
    doc="Mean score of each reward function, before weights.",
    family="reward_by_function",
)

HELD_OUT = Chart(
    title="held-out score",
    unit="",
    group="evaluation",
    doc="Mean score on held-out prompts at each evaluation.",
    series=(
        Series(key="sampled_accuracy", label="sampled"),
        Series(key="greedy_accuracy", label="greedy", color=Color.ORANGE, dash="--"),
    ),
)

LENGTHS = Chart(
    title="completion length",
    unit="tokens",
    group="rollout",
    doc="Lengths of the completions of a step.",
    series=(
        Series(key="completion_tokens_mean", label="mean"),
        Series(key="completion_tokens_max", label="longest", color=Color.RED, dash="--"),
        Series(key="max_tokens", label="limit", color=Color.GREY, dash="-."),
    ),
)

AGES = Chart(
    title="age of trained tokens",
    unit="steps",
    group="staleness",
    doc="Optimizer steps between generation and training.",
    series=(
        Series(key="age_mean", label="mean"),
        Series(key="age_max", label="oldest", color=Color.RED, dash=":"),
        Series(key="staleness", label="effective S", color=Color.ORANGE, dash="-.", only_if_varying=True),
        Series(key="age_bound", label="bound", color=Color.GREY, dash="--"),
    ),
)

TOKENS_BY_AGE = Chart(
    title="trained tokens by age",
    unit="share",
    group="staleness",
    doc="Share of the trained tokens of each age.",
    family="age_histogram",
    kind=Kind.HISTOGRAM,
)

IDLE = Chart(
    title="idle share of each side",
    unit="share",
    group="idle",
    doc="Trainer: waiting for a batch. Servers: generating nothing.",
    series=(
        Series(key=TRAINER_IDLE, label="trainer waits for a batch"),
        Series(key=ROLLOUT_IDLE, label="rollout servers generate nothing", color=Color.RED, dash="--"),
    ),
)

BUFFER = Chart(
    title="groups in the buffer",
    unit="groups",
    group="buffer",
    doc="After each step, once its groups are released.",
    family="buffer_groups",
    series=(
        Series(key="buffer_groups.inflight", label="in flight"),
        Series(key="buffer_groups.ready", label="ready", color=Color.RED, dash="--"),
        Series(key="capacity_groups", label="capacity", color=Color.GREY, dash="-."),
    ),
)

RELEASED = Chart(
    title="groups released, by reason",
    unit="groups",
    group="buffer",
    doc="Groups that left the buffer since the start of the run.",
    family="released_groups",
)

UNTRAINED = replace(
    RELEASED, title="groups released untrained, in total", doc="Groups that left the buffer for any other reason."
)

STEP_TIME = Chart(
    title="time of the trainer's step",
    unit="s",
    group="time",
    doc="Seconds of each part of a step.",
    kind=Kind.STACKED,
    series=(
        Series(
            key="wait_s",
            label="wait",
            color=Color.SILVER,
            doc="the trainer waited for a batch from the rollout servers",
        ),
        Series(
            key="pack_s",
            label="pack",
            color=Color.SKY,
            doc="packing sequences into micro-batches",
        ),
        Series(
            key="prox_s",
            label="prox",
            color=Color.TEAL,
            hatch="//",
            doc="evaluating the proximal policy",
        ),
        Series(
            key="reference_s",
            label="reference",
            color=Color.MOSS,
            hatch="\\\\",
            doc="evaluating the reference model",
        ),
        Series(
            key="train_s",
            label="train",
            color=Color.BLUE,
            doc="forward and backward",
        ),
        Series(
            key="optimizer_s",
            label="optimizer",
            color=Color.NAVY,
            doc="optimizer step",
        ),
        Series(
            key="publish_s",
            label="publish",
            color=Color.ORANGE,
            hatch="xx",
            doc="snapshot and announcement of the new weights",
        ),
        Series(
            key="checkpoint_s",
            label="checkpoint",
            color=Color.GREEN,
            hatch="..",
            doc="writing checkpoints",
        ),
        Series(
            key="other",
            label="other",
            color=Color.PURPLE,
            hatch="--",
            doc="everything else in a step",
        ),
    ),
)

OVERVIEW: dict[str, tuple[Chart, ...]] = {
    "learning": (REWARD, HELD_OUT),
    "speed": (METRIC_CHARTS["tokens_per_s"], IDLE),
    "soundness": (AGES, METRIC_CHARTS["logprob_gap_mean"]),
}
"""Question of `telemetry.verdict` -> charts that show its answer, on the overview of a run and first in its report."""

FAMILIES = (REWARD_BY_FUNCTION, BUFFER, RELEASED)
"""Charts whose curves depend on the run's data."""

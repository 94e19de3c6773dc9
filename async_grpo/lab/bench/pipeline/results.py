"""The comparison of the runs by staleness and repetition: measurements for the file, a table and a plot.

Runs of one repetition follow one another, so if something slows the machine down for a while, it slows down a value and
its baseline alike. Ratios are taken within a repetition, and their median is reported.

The times of the two sides, and the gain from overlapping them:

T_gen     time that a step of S = 0 waits for its batch: from the release that frees its slots (admission, new weights
          in the engine, generation, verdicts, insert) until the batch has been taken
T_train   the rest of that step: from the batch until its weights are published and its groups released
bound     (T_gen + T_train) / max(T_gen, T_train): sides that never wait for each other take the longer of the two

The bound covers overlap only, with T_gen of S = 0, where the engine runs empty at the end of every step while the
longest completions finish. At S > 0 the next groups fill these slots, so T_gen itself shrinks: where lengths differ, a
run may exceed the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from async_grpo.lab.bench.measure import Machine, Measurement, Spread, measurement_table
from async_grpo.lab.bench.pipeline.observe import RunMetrics
from async_grpo.telemetry.charts import Color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR_WIDTH = 0.36
MIN_PROMPT = 8
MAX_PROMPT = 384
"""Limits of the balanced prompt length in tokens."""
TOKENS = "tokens/s"
SHARE = "share of the overlap bound"
LOWEST = "lowest"
HIGHEST = "highest"
"""Parts of the names of measurements, from which `view` builds its table."""
_SYNC = "S=0 of the same repetition"
_METRICS: tuple[tuple[str, str, Callable[[RunMetrics], float]], ...] = (
    ("samples/s", "samples/s", attrgetter("samples_per_s")),
    ("step", "s", attrgetter("step_s")),
    ("trainer idle", "share", attrgetter("trainer_idle")),
    ("rollout idle", "share", attrgetter("rollout_idle")),
    ("weights into the engine", "s/step", attrgetter("update_s")),
    ("generated to trained", "x", attrgetter("generated")),
    ("age, mean", "steps", attrgetter("age_mean")),
    ("age, largest", "steps", attrgetter("age_max")),
)
"""(name, unit, value) of the measurements per S, next to tokens/s."""
_COLUMNS = (TOKENS, "samples/s", "step", "trainer idle", "rollout idle", "age, mean", "age, largest")


@dataclass(frozen=True, slots=True)
class Sides:
    """Seconds per step of each side, mean over the steps at S = 0."""

    gen_s: float
    train_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step if the sides work one after the other."""
        return self.gen_s + self.train_s

    @property
    def ratio(self) -> float:
        """T_gen / T_train; 1 is balanced."""
        return self.gen_s / self.train_s

    @property
    def bound(self) -> float:
        """Largest speedup from overlap alone, in [1, 2].

        >>> Sides(gen_s=2.0, train_s=1.0).bound
        1.5
        """
        return self.step_s / max(self.gen_s, self.train_s)


_SIDES: tuple[tuple[str, str, Callable[[Sides], float]], ...] = (
    ("T_gen, S=0", "s/step", attrgetter("gen_s")),
    ("T_train, S=0", "s/step", attrgetter("train_s")),
    ("T_gen / T_train, S=0", "x", attrgetter("ratio")),
    ("overlap bound, S=0", "x", attrgetter("bound")),
)


@dataclass(frozen=True, slots=True)
class PromptProbe:
    """Times of both sides with prompts of one length."""

    prompt_tokens: int
    sides: Sides


def balance_prompt(short: PromptProbe, long: PromptProbe) -> int:
    """Return the prompt length at which T_gen = T_train, between MIN_PROMPT and MAX_PROMPT.

    Longer prompts cost the trainer more than the engine: it reads them once per sample, forward and backward, while the
    engine only reads them forward. Both times are assumed to be linear in the length. If longer prompts do not shift
    the balance towards training (a wrong measurement), the better of the two probes is returned.

    >>> balance_prompt(PromptProbe(10, Sides(2.0, 1.0)), PromptProbe(110, Sides(2.2, 2.2)))
    110
    """
    short_excess = short.sides.gen_s - short.sides.train_s
    long_excess = long.sides.gen_s - long.sides.train_s
    if long_excess >= short_excess:
        return short.prompt_tokens if abs(short_excess) <= abs(long_excess) else long.prompt_tokens

    # Linear interpolation to an excess of 0.
    fraction = short_excess / (short_excess - long_excess)
    tokens = short.prompt_tokens + fraction * (long.prompt_tokens - short.prompt_tokens)
    return min(max(round(tokens), MIN_PROMPT), MAX_PROMPT)


@dataclass(frozen=True, slots=True)
class PipelineResults:
    """`by_staleness[S]` has one entry per repetition; S = 0 is always present."""

    by_staleness: Mapping[int, Sequence[RunMetrics]]

    @property
    def staleness(self) -> list[int]:
        """All measured S, ascending."""
        return sorted(self.by_staleness)

    @property
    def sides(self) -> list[Sides]:
        """T_gen and T_train of every repetition, from its run with S = 0."""
        return [Sides(run.wait_s, run.step_s - run.wait_s) for run in self.by_staleness[0]]

    def spread(self, staleness: int, metric: Callable[[RunMetrics], float]) -> Spread:
        """Return the spread of a metric over the repetitions of one S."""
        return Spread.of(metric(run) for run in self.by_staleness[staleness])

    def speedup(self, staleness: int) -> Spread:
        """Return the ratio of tokens per second to those of S = 0, repetition by repetition."""
        return Spread.of(self._speeds(staleness), self._speeds(0))

    def share_of_bound(self, staleness: int) -> Spread:
        """Return the ratio of the speedup to the overlap bound, repetition by repetition."""
        bounds = (sides.bound * speed for sides, speed in zip(self.sides, self._speeds(0), strict=True))
        return Spread.of(self._speeds(staleness), bounds)

    def _speeds(self, staleness: int) -> list[float]:
        return [run.tokens_per_s for run in self.by_staleness[staleness]]


def rotate_order(staleness: Sequence[int], repetitions: int) -> list[tuple[int, int]]:
    """Return (repetition, S); every repetition starts one position later, so that no S is always first.

    >>> rotate_order([0, 2], 2)
    [(0, 0), (0, 2), (1, 2), (1, 0)]
    """
    count = len(staleness)
    order = []
    for repetition in range(repetitions):
        for position in range(count):
            order.append((repetition, staleness[(repetition + position) % count]))
    return order


def make_measurements(results: PipelineResults) -> list[Measurement]:
    """Return the measurements of every S, then those of the two sides. Values are medians over the repetitions."""
    measurements = []
    for staleness in results.staleness:
        measurements += _measurements_at(results, staleness)
    for name, unit, value in _SIDES:
        measurements.append(Measurement(name, Spread.of(map(value, results.sides)).median, unit))
    return measurements


def view(title: str, measurements: Sequence[Measurement], machine: Machine) -> RenderableType:
    """Return a table with a row per S, and below it one of the other measurements."""
    by_name = {measurement.name: measurement for measurement in measurements}
    others = [measurement for measurement in measurements if not measurement.name.startswith("S=")]
    rows = dict.fromkeys(name.partition(":")[0] for name in by_name if name.startswith("S="))

    caption = "medians of the repetitions, in brackets lowest to highest"
    table = Table(title=title, caption=caption, caption_justify="left")
    for column in ("", TOKENS, "to S=0", "of the bound", *_COLUMNS[1:]):
        table.add_column(column, justify="right")
    for row in rows:
        speedup = by_name[f"{row}: {TOKENS}"].ratio
        share = by_name.get(f"{row}: {SHARE}")
        table.add_row(
            row,
            _format_with_spread(by_name, f"{row}: {TOKENS}"),
            "" if speedup is None else f"{speedup:.2f}",
            "" if share is None else f"{share.value:.2f}",
            *(_format_value(by_name[f"{row}: {column}"]) for column in _COLUMNS[1:]),
        )
    return Group(table, measurement_table("", others, machine))


def _measurements_at(results: PipelineResults, staleness: int) -> list[Measurement]:
    name = f"S={staleness}"
    tokens_per_s = attrgetter("tokens_per_s")
    speed = results.spread(staleness, tokens_per_s)
    speed_measurement = Measurement(f"{name}: {TOKENS}", speed.median, "tokens/s")
    if staleness:
        speed_measurement = Measurement(
            f"{name}: {TOKENS}",
            speed.median,
            "tokens/s",
            baseline=results.spread(0, tokens_per_s).median,
            baseline_name=_SYNC,
            ratio=results.speedup(staleness).median,
        )
    measurements = [speed_measurement, *_extremes(f"{name}: {TOKENS}", speed, "tokens/s")]
    if staleness:
        share = results.share_of_bound(staleness)
        measurements.append(Measurement(f"{name}: {SHARE}", share.median, "x"))
        measurements += _extremes(f"{name}: {SHARE}", share, "x")
    for label, unit, metric in _METRICS:
        measurements.append(Measurement(f"{name}: {label}", results.spread(staleness, metric).median, unit))
    return measurements


def _extremes(name: str, spread: Spread, unit: str) -> list[Measurement]:
    return [
        Measurement(f"{name}, {LOWEST}", spread.lowest, unit),
        Measurement(f"{name}, {HIGHEST}", spread.highest, unit),
    ]


def _format_with_spread(by_name: dict[str, Measurement], name: str) -> str:
    median_value = by_name[name].value
    low = by_name[f"{name}, {LOWEST}"].value
    high = by_name[f"{name}, {HIGHEST}"].value
    return f"{median_value:,.0f} ({low:,.0f} to {high:,.0f})"


def _format_value(measurement: Measurement) -> str:
    return f"{measurement.value:.0%}" if measurement.unit == "share" else f"{measurement.value:.3g}"


def write_plot(path: Path, results: PipelineResults, subtitle: str) -> None:
    """Draw a PNG file: tokens per second with the overlap bound above, idle shares of both sides below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    speed, idle = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_speed(speed, results)
    _draw_idle(idle, results)
    for axes in (speed, idle):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    speed.set_title("The same work at every staleness", loc="left", fontweight="bold", pad=22)
    speed.annotate(subtitle, (0, 1.03), xycoords="axes fraction", color="#555", fontsize=9)
    idle.set_xticks(range(len(results.staleness)), [str(staleness) for staleness in results.staleness])
    idle.set_xlabel("max_staleness S")
    figure.savefig(path, dpi=144, format="png")


def _draw_speed(axes: Axes, results: PipelineResults) -> None:
    spreads = [results.spread(staleness, attrgetter("tokens_per_s")) for staleness in results.staleness]
    xs = list(range(len(spreads)))
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.lowest for spread in spreads]
    above = [spread.highest - spread.median for spread in spreads]
    pairs = zip(results.sides, results.by_staleness[0], strict=True)
    bounds = [sides.bound * sync.tokens_per_s for sides, sync in pairs]

    axes.axhspan(min(bounds), max(bounds), color=Color.ORANGE, alpha=0.15, linewidth=0)
    axes.axhline(median(bounds), color=Color.ORANGE, linestyle="--", linewidth=1.4, label="bound of overlap alone")
    axes.axhline(medians[0], color=Color.GREY, linestyle=":", linewidth=1.2, label="synchronous (S = 0)")
    axes.errorbar(xs, medians, [below, above], color=Color.BLUE, marker="o", linewidth=2, capsize=4, label="measured")
    for x, staleness in zip(xs[1:], results.staleness[1:], strict=True):
        text = f"{results.speedup(staleness).median:.2f}x"
        axes.annotate(text, (x, medians[x]), (8, -16), textcoords="offset points", color=Color.BLUE)
    axes.set_ylim(0, 1.12 * max(*bounds, *(spread.highest for spread in spreads)))
    axes.set_ylabel("completion tokens per second")
    axes.legend(loc="lower right")


def _draw_idle(axes: Axes, results: PipelineResults) -> None:
    _draw_bars(axes, results, "trainer", Color.GREEN, -_BAR_WIDTH / 2, attrgetter("trainer_idle"))
    _draw_bars(axes, results, "rollout server", Color.ORANGE, _BAR_WIDTH / 2, attrgetter("rollout_idle"))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("idle")
    axes.legend(loc="upper right")


def _draw_bars(
    axes: Axes, results: PipelineResults, label: str, color: str, offset: float, share: Callable[[RunMetrics], float]
) -> None:
    """Draw a bar per S with its value above."""
    shares = [results.spread(staleness, share).median for staleness in results.staleness]
    xs = [x + offset for x in range(len(shares))]
    bars = axes.bar(xs, shares, width=_BAR_WIDTH, color=color, label=label)
    axes.bar_label(bars, [f"{value:.0%}" for value in shares], padding=2, fontsize=8)

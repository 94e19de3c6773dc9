"""The comparison of the runs, by staleness and repetition: figures for the file, a table and a picture.

Runs of one repetition follow each other, so what slows the machine down for a while slows down a value and its baseline
alike: ratios are taken within a repetition, and the figure is their median.

The times of the two sides, and what overlapping them gains:

T_gen     what a step of S = 0 waits for its batch: from the release that frees its slots (admission, new weights
          into the engine, generation, verdicts, insert) until the batch has been taken
T_train   the rest of that step: from the batch until its weights are published and its groups released
bound     (T_gen + T_train) / max(T_gen, T_train): sides that never wait for each other take the longer of the two

The bound is that of overlap alone, with T_gen as it is at S = 0, where the engine runs empty at the end of every step
while the longest completions end. At S > 0 the next groups take the places of those that have ended, so T_gen itself
shrinks: where lengths differ, a run may exceed the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from async_grpo.lab.bench.measure import Machine, Measurement, Spread, measurement_table
from async_grpo.lab.bench.pipeline.observe import Observed
from async_grpo.telemetry.charts import Color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 0.36
"""Width of a bar."""
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 384
TOKENS, SHARE = "tokens/s", "share of the overlap bound"
LOWEST, HIGHEST = "lowest", "highest"
_SYNC = "S=0 of the same repetition"
_MEASURES: tuple[tuple[str, str, Callable[[Observed], float]], ...] = (
    ("samples/s", "samples/s", lambda one: one.samples_per_s),
    ("step", "s", lambda one: one.step_s),
    ("trainer idle", "share", lambda one: one.trainer_idle),
    ("rollout idle", "share", lambda one: one.rollout_idle),
    ("weights into the engine", "s/step", lambda one: one.update_s),
    ("generated to trained", "x", lambda one: one.generated),
    ("age, mean", "steps", lambda one: one.age_mean),
    ("age, largest", "steps", lambda one: one.age_max),
)
_COLUMNS = (TOKENS, "samples/s", "step", "trainer idle", "rollout idle", "age, mean", "age, largest")


@dataclass(frozen=True, slots=True)
class Sides:
    """Seconds that each side takes for a step, mean over the steps at S = 0."""

    gen_s: float
    train_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step in which the sides work one after the other."""
        return self.gen_s + self.train_s

    @property
    def ratio(self) -> float:
        """T_gen / T_train: 1 is balanced."""
        return self.gen_s / self.train_s

    @property
    def bound(self) -> float:
        """By how much overlap alone can be faster, in [1, 2].

        >>> Sides(gen_s=2.0, train_s=1.0).bound
        1.5
        """
        return self.step_s / max(self.gen_s, self.train_s)


@dataclass(frozen=True, slots=True)
class PromptProbe:
    """The times of both sides with prompts of so many tokens."""

    prompt_tokens: int
    sides: Sides


def balanced_prompt(short: PromptProbe, long: PromptProbe) -> int:
    """The length of the prompts at which T_gen = T_train, between the two limits above.

    Longer prompts are more work for the trainer, which reads them once a sample, forward and backward, and less so for
    the engine, which reads them forward. Both times are taken for linear in the length; where more prompt does not
    shift the balance towards training (a measurement that went wrong), the better of the two probes is kept.

    >>> balanced_prompt(PromptProbe(10, Sides(2.0, 1.0)), PromptProbe(110, Sides(2.2, 2.2)))
    110
    """
    lead_of_short, lead_of_long = (probe.sides.gen_s - probe.sides.train_s for probe in (short, long))
    if lead_of_long >= lead_of_short:
        return min((short, long), key=lambda probe: abs(probe.sides.gen_s - probe.sides.train_s)).prompt_tokens
    way = lead_of_short / (lead_of_short - lead_of_long)
    wanted = short.prompt_tokens + way * (long.prompt_tokens - short.prompt_tokens)
    return min(max(round(wanted), SHORTEST_PROMPT), LONGEST_PROMPT)


@dataclass(frozen=True, slots=True)
class Results:
    """`by_staleness[S]` has one entry a repetition; S = 0 is always there."""

    by_staleness: Mapping[int, Sequence[Observed]]

    @property
    def staleness(self) -> list[int]:
        """Every S that was measured, ascending."""
        return sorted(self.by_staleness)

    @property
    def sides(self) -> list[Sides]:
        """T_gen and T_train of every repetition, from its run with S = 0."""
        return [Sides(one.wait_s, one.step_s - one.wait_s) for one in self.by_staleness[0]]

    def spread(self, staleness: int, figure: Callable[[Observed], float]) -> Spread:
        """A figure of that staleness, over the repetitions."""
        return Spread.of(figure(one) for one in self.by_staleness[staleness])

    def speedup(self, staleness: int) -> Spread:
        """Tokens a second to those of S = 0, repetition by repetition."""
        return Spread.of(self._speeds(staleness), self._speeds(0))

    def share_of_bound(self, staleness: int) -> Spread:
        """The speedup to the overlap bound, repetition by repetition."""
        bounds = (sides.bound * speed for sides, speed in zip(self.sides, self._speeds(0), strict=True))
        return Spread.of(self._speeds(staleness), bounds)

    def _speeds(self, staleness: int) -> list[float]:
        return [one.tokens_per_s for one in self.by_staleness[staleness]]


def rotated_turns(staleness: Sequence[int], repetitions: int) -> list[tuple[int, int]]:
    """(repetition, S), every repetition beginning one further along, so that no S is always first.

    >>> rotated_turns([0, 2], 2)
    [(0, 0), (0, 2), (1, 2), (1, 0)]
    """
    count = len(staleness)
    return [(turn, staleness[(turn + place) % count]) for turn in range(repetitions) for place in range(count)]


def figures_of(results: Results) -> list[Measurement]:
    """The figures of every S, then those of the two sides. Values are medians over the repetitions."""
    found = [figure for staleness in results.staleness for figure in _measurements_at(results, staleness)]
    sides = (
        ("T_gen, S=0", "s/step", lambda one: one.gen_s),
        ("T_train, S=0", "s/step", lambda one: one.train_s),
        ("T_gen / T_train, S=0", "x", lambda one: one.ratio),
        ("overlap bound, S=0", "x", lambda one: one.bound),
    )
    return found + [Measurement(name, Spread.of(map(side, results.sides)).median, unit) for name, unit, side in sides]


def view(title: str, figures: Sequence[Measurement], machine: Machine) -> RenderableType:
    """A table with a row for each staleness, and below it one of the other figures."""
    rest = [figure for figure in figures if not figure.name.startswith("S=")]
    by_name = {figure.name: figure for figure in figures}
    rows = dict.fromkeys(name.partition(":")[0] for name in by_name if name.startswith("S="))
    caption = "medians of the repetitions, in brackets lowest to highest"
    shown = Table(title=title, caption=caption, caption_justify="left")
    for column in ("", TOKENS, "to S=0", "of the bound", *_COLUMNS[1:]):
        shown.add_column(column, justify="right")
    for row in rows:
        own = {column: by_name[f"{row}: {column}"] for column in _COLUMNS}
        ratio, share = own[TOKENS].ratio, by_name.get(f"{row}: {SHARE}")
        cells = ["" if ratio is None else f"{ratio:.2f}", "" if share is None else f"{share.value:.2f}"]
        shown.add_row(row, _with_spread(by_name, row, TOKENS), *cells, *(_short(own[name]) for name in _COLUMNS[1:]))
    return Group(shown, measurement_table("", rest, machine))


def _measurements_at(results: Results, staleness: int) -> list[Measurement]:
    name = f"S={staleness}"
    speed = results.spread(staleness, _tokens_per_s)
    sync = (results.spread(0, _tokens_per_s).median, _SYNC, results.speedup(staleness).median) if staleness else ()
    found = [Measurement(f"{name}: {TOKENS}", speed.median, "tokens/s", *sync)]
    found += _ends(f"{name}: {TOKENS}", speed, "tokens/s")
    if staleness:
        share = results.share_of_bound(staleness)
        found += [Measurement(f"{name}: {SHARE}", share.median, "x"), *_ends(f"{name}: {SHARE}", share, "x")]
    return found + [
        Measurement(f"{name}: {what}", results.spread(staleness, measure).median, unit)
        for what, unit, measure in _MEASURES
    ]


def _tokens_per_s(one: Observed) -> float:
    return one.tokens_per_s


def _ends(name: str, spread: Spread, unit: str) -> list[Measurement]:
    return [
        Measurement(f"{name}, {LOWEST}", spread.lowest, unit),
        Measurement(f"{name}, {HIGHEST}", spread.highest, unit),
    ]


def _with_spread(by_name: dict[str, Measurement], row: str, what: str) -> str:
    middle, low, high = (by_name[f"{row}: {what}{end}"].value for end in ("", f", {LOWEST}", f", {HIGHEST}"))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def _short(figure: Measurement) -> str:
    return f"{figure.value:.0%}" if figure.unit == "share" else f"{figure.value:.3g}"


def write_plot(path: Path, results: Results, subtitle: str) -> None:
    """Draw a PNG file: tokens a second with the overlap bound above, idle shares of both sides below."""
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
    idle.set_xticks(range(len(results.staleness)), [str(one) for one in results.staleness])
    idle.set_xlabel("max_staleness S")
    figure.savefig(path, dpi=144, format="png")


def _draw_speed(axes: Axes, results: Results) -> None:
    places = list(range(len(results.staleness)))
    found = [results.spread(one, lambda seen: seen.tokens_per_s) for one in results.staleness]
    middle = [one.median for one in found]
    errors = [[one.median - one.lowest for one in found], [one.highest - one.median for one in found]]
    pairs = zip(results.sides, results.by_staleness[0], strict=True)
    bounds = [sides.bound * sync.tokens_per_s for sides, sync in pairs]
    axes.axhspan(min(bounds), max(bounds), color=Color.ORANGE, alpha=0.15, linewidth=0)
    bound = median(bounds)
    axes.axhline(bound, color=Color.ORANGE, linestyle="--", linewidth=1.4, label="bound of overlap alone")
    axes.axhline(middle[0], color=Color.GREY, linestyle=":", linewidth=1.2, label="synchronous (S = 0)")
    axes.errorbar(places, middle, errors, color=Color.BLUE, marker="o", linewidth=2, capsize=4, label="measured")
    for place, staleness in zip(places[1:], results.staleness[1:], strict=True):
        text = f"{results.speedup(staleness).median:.2f}x"
        axes.annotate(text, (place, middle[place]), (8, -16), textcoords="offset points", color=Color.BLUE)
    axes.set_ylim(0, 1.12 * max(*bounds, *(one.highest for one in found)))
    axes.set_ylabel("completion tokens per second")
    axes.legend(loc="lower right")


def _draw_idle(axes: Axes, results: Results) -> None:
    _draw_bars(axes, results, "trainer", Color.GREEN, -_BAR / 2, lambda seen: seen.trainer_idle)
    _draw_bars(axes, results, "rollout server", Color.ORANGE, _BAR / 2, lambda seen: seen.rollout_idle)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("idle")
    axes.legend(loc="upper right")


def _draw_bars(
    axes: Axes, results: Results, label: str, color: str, offset: float, share: Callable[[Observed], float]
) -> None:
    """Draw a bar for each staleness, with its value above."""
    shares = [results.spread(one, share).median for one in results.staleness]
    bars = axes.bar([place + offset for place in range(len(shares))], shares, width=_BAR, color=color, label=label)
    axes.bar_label(bars, [f"{value:.0%}" for value in shares], padding=2, fontsize=8)

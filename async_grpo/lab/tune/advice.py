"""What `async-grpo tune` says: the Pareto front as a table and a plot, and a configuration with a reason for every line
that it changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.box import SIMPLE
from rich.table import Table

from async_grpo.app.report.drawing import BLUE, GREEN, GREY, RED, legend_above, new_figure
from async_grpo.config.load import find_key_lines, read_raw_config
from async_grpo.lab.simulate.calibrate import MeasuredMetrics
from async_grpo.lab.sweep.plots import place_labels
from async_grpo.lab.tune.goals import UNITS, Goal
from async_grpo.lab.tune.search import Places, TunedPoint, TuningSearch, front_of
from async_grpo.lab.tune.space import CHANGES_DATA, SELECTOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIMULATED_ONLY = "by simulation alone: nothing was measured. --real 3 compares the best by short runs"


@dataclass(frozen=True, slots=True)
class Advice:
    """The outcome of a tuning."""

    goal: Goal
    points: Sequence[TunedPoint]
    present: TunedPoint
    chosen: TunedPoint
    reasons: Mapping[str, str]
    """Configuration key -> why its value is changed."""
    measured: Mapping[Places, MeasuredMetrics]
    notes: Sequence[str]
    """Where the timings come from, what was assumed, and which real runs failed."""

    @property
    def front(self) -> list[TunedPoint]:
        """The points that no other beats in both, and the present and the chosen one."""
        kept = front_of(self.points, self.goal)
        extra = [one for one in (self.present, self.chosen) if one not in kept]
        return sorted([*kept, *extra], key=lambda one: one.figures.age_mean)

    def label(self, one: TunedPoint) -> str:
        """What the point changes; `present` if it changes nothing."""
        return ", ".join(_shown(changes_of(one, self.present))) or "present"

    @property
    def verdict(self) -> str:
        """The recommendation in a sentence or two."""
        goal, chosen, present = self.goal, self.chosen, self.present
        if chosen is present:
            return f"the present configuration is the best found{self._under}; {self._basis}"
        ours, theirs = self._figures(chosen), self._figures(present)
        only = " (simulated: its run failed)" if self.measured and present.places not in self.measured else ""
        return (
            f"recommended{self._under}: {self.label(chosen)}: {in_figures(ours[0])} {UNITS[goal.name]} at a mean age "
            f"of {ours[1]:.2f}, now {in_figures(theirs[0])} at {theirs[1]:.2f}{only}; {self._basis}"
        )

    @property
    def _under(self) -> str:
        return f" under {self.goal.bounds}" if self.goal.bounds else ""

    @property
    def _basis(self) -> str:
        return f"measured in {len(self.measured)} short runs" if self.measured else SIMULATED_ONLY

    def _figures(self, one: TunedPoint) -> tuple[float, float]:
        """Value by the goal and mean age: measured if there are runs, else simulated."""
        found = self.measured.get(one.places)
        figures = one.figures if found is None else one.measured(found)
        return self.goal.value(figures), figures.age_mean

    def table(self) -> Table:
        """The front, one point a row."""
        table = Table(title="simulated: the fastest point for each mean age", title_justify="left", box=SIMPLE)
        table.add_column("changes", overflow="fold", min_width=24)
        weighs = self.goal.name != "throughput"
        columns = ["tokens/s", *([UNITS[self.goal.name]] if weighs else []), "age (max)", "trainer idle"]
        for column in [*columns, "servers idle", *(["measured", "age"] if self.measured else [])]:
            table.add_column(column, justify="right")
        for one in self.front:
            figures, real = one.simulated, self.measured.get(one.places)
            cells = [f"{figures.tokens_per_s:,.0f}"]
            cells += [in_figures(self.goal.value(one.figures))] if weighs else []
            cells += [f"{figures.age_mean:.2f} ({figures.age_max})", f"{figures.trainer_idle:.0%}"]
            cells += [f"{figures.rollout_idle:.0%}"]
            if self.measured:
                cells += ["", ""] if real is None else [f"{real.tokens_per_s:,.0f}", f"{real.age_mean:.2f}"]
            style = "bold" if one is self.chosen else None
            table.add_row(self.label(one), *cells, style=style)
        return table

    def figure(self) -> Figure:
        """Speed against mean age: all points, the front, and the present and the chosen point."""
        figure, (axes,) = new_figure(1, 1, (8, 5))
        axes.set_title(f"{UNITS[self.goal.name]} against mean age", loc="left", fontweight="bold")

        def spots(points: Sequence[TunedPoint]) -> tuple[list[float], list[float]]:
            return [p.figures.age_mean for p in points], [self.goal.value(p.figures) for p in points]

        axes.scatter(*spots(self.points), s=12, color=GREY, alpha=0.5, label="simulated")
        axes.plot(*spots(front_of(self.points, self.goal)), "o-", color=BLUE, label="not beaten in both")
        axes.plot(*spots([self.present]), "s", color=GREEN, markersize=10, label="present")
        axes.plot(*spots([self.chosen]), "o", color=RED, fillstyle="none", markersize=15, label="recommended")
        real = [self._figures(one) for one in self.points if one.places in self.measured]
        if real:
            axes.plot([age for _, age in real], [value for value, _ in real], "x", color=RED, label="measured")
        if self.goal.max_age is not None:
            axes.axvline(self.goal.max_age, color=GREY, linestyle=":", label="--max-age")
        axes.set_xlabel("mean age of the trained tokens, optimizer steps")
        axes.set_ylim(bottom=0)
        legend_above(axes)
        named = [self.present] if self.chosen is self.present else [self.present, self.chosen]
        place_labels(figure, axes, list(zip(*spots(named), strict=True)), [self.label(one)[:60] for one in named])
        return figure

    def plain(self) -> dict[str, object]:
        """Every figure, as JSON takes it."""
        front = [one.places for one in self.front]
        return {
            "goal": asdict(self.goal),
            "verdict": self.verdict,
            "recommended": changes_of(self.chosen, self.present),
            "chosen": dict(self.chosen.overrides),
            "reasons": dict(self.reasons),
            "notes": list(self.notes),
            "points": [
                {
                    "values": dict(one.overrides),
                    "value": self.goal.value(one.figures),
                    "on_front": one.places in front,
                    "measured": asdict(self.measured[one.places]) if one.places in self.measured else None,
                    **asdict(one.simulated),
                }
                for one in self.points
            ],
        }


def changes_of(one: TunedPoint, present: TunedPoint) -> dict[str, str]:
    """The overrides that make the point of the present configuration."""
    return {key: value for key, value in one.overrides.items() if present.overrides.get(key) != value}


def reasons_for(search: TuningSearch, goal: Goal, chosen: TunedPoint) -> dict[str, str]:
    """Why each key is changed: what the chosen point would be with its present value."""
    found = {}
    for axis, other in search.without(chosen):
        before = axis.choices[0]
        was = ", ".join(_shown(before))
        said = f"as before ({was}), it would be refused or stall"
        if other is not None:
            now, then = goal.value(chosen.figures), goal.value(other.figures)
            said = (
                f"simulated {in_figures(now)} {UNITS[goal.name]} at a mean age of {chosen.figures.age_mean:.2f}; with "
                f"{was} as before {in_figures(then)} at {other.figures.age_mean:.2f}"
            )
        for key, value in axis.choices[chosen.places[search.axes.index(axis)]].items():
            if before.get(key) != value:
                caution = CHANGES_DATA.get(key) if value not in ("fifo", "windowed_fifo") else None
                found[key] = said + (f". Note: {caution}" if caution else "")
    return found


def recommended_yaml(file: Path, overrides: Sequence[str], advice: Advice, command: str) -> str:
    """The configuration with the recommended values, for `async-grpo run`; the reason stands behind every change."""
    changed = changes_of(advice.chosen, advice.present)
    plain, source = read_raw_config(file, [*overrides, *(f"{key}={value}" for key, value in changed.items())])
    plain["name"] = f"{plain['name']}-tuned"[:64]
    lines = yaml.safe_dump(plain, sort_keys=False).splitlines()
    places = find_key_lines("\n".join(lines))
    for key, why in advice.reasons.items():
        lines[places[key] - 1] += f"  # {why}"
    head = [f"{source} as tuned by: {command}", advice.verdict, *advice.notes]
    return "\n".join([*(f"# {' '.join(line.split())}" for line in head), *lines]) + "\n"


def in_figures(value: float) -> str:
    """A value with about three figures.

    >>> in_figures(15499.6), in_figures(0.01234)
    ('15,500', '0.0123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shown(overrides: Mapping[str, str]) -> list[str]:
    """The overrides in short form, without the window of fifo, which has none."""
    names = {key: "selector" if key == f"{SELECTOR}.kind" else key.split(".")[-1] for key in overrides}
    fifo = overrides.get(f"{SELECTOR}.kind") == "fifo"
    return [f"{names[key]}={value}" for key, value in overrides.items() if not (fifo and key == f"{SELECTOR}.window")]


def as_json(advice: Advice) -> str:
    """tune.json."""
    return json.dumps(advice.plain(), indent=2) + "\n"

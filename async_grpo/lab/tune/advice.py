"""The recommendation of `async-grpo tune`: the Pareto front as a table and a plot, and a configuration with a reason
for every changed line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.box import SIMPLE
from rich.table import Table

from async_grpo.app.report.drawing import BLUE, GREEN, GREY, RED, make_figure, place_legend_above
from async_grpo.config.load import find_key_lines, read_raw_config
from async_grpo.lab.simulate.calibrate import MeasuredMetrics
from async_grpo.lab.sweep.plots import place_labels
from async_grpo.lab.tune.goals import UNITS, Goal
from async_grpo.lab.tune.search import Choices, TunedPoint, TuningSearch, find_pareto_front
from async_grpo.lab.tune.space import CHANGES_DATA, SELECTOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIMULATED_ONLY = "by simulation alone: nothing was measured. --real 3 compares the best by short runs"


@dataclass(frozen=True, slots=True)
class Advice:
    """The result of `async-grpo tune`."""

    goal: Goal
    points: Sequence[TunedPoint]
    present: TunedPoint
    chosen: TunedPoint
    reasons: Mapping[str, str]
    """Changed configuration key -> reason."""
    measured: Mapping[Choices, MeasuredMetrics]
    notes: Sequence[str]
    """Origin of the timings, assumptions, and failed real runs."""

    @property
    def front(self) -> list[TunedPoint]:
        """The Pareto front, with the present and the chosen point added."""
        points = find_pareto_front(self.points, self.goal)
        for point in (self.present, self.chosen):
            if point not in points:
                points.append(point)
        return sorted(points, key=lambda point: point.metrics.age_mean)

    def label(self, point: TunedPoint) -> str:
        """Changes of the point in short form; `present` if there are none."""
        return ", ".join(_shorten_overrides(list_changes(point, self.present))) or "present"

    @property
    def verdict(self) -> str:
        """The recommendation in a sentence or two."""
        bounds = f" under {self.goal.bounds}" if self.goal.bounds else ""
        basis = f"measured in {len(self.measured)} short runs" if self.measured else SIMULATED_ONLY
        if self.chosen is self.present:
            return f"the present configuration is the best found{bounds}; {basis}"

        value, age = self._value_and_age(self.chosen)
        present_value, present_age = self._value_and_age(self.present)
        caution = ""
        if self.measured and self.present.choices not in self.measured:
            caution = " (simulated: its run failed)"
        return (
            f"recommended{bounds}: {self.label(self.chosen)}: {format_value(value)} {UNITS[self.goal.name]} at a mean "
            f"age of {age:.2f}, now {format_value(present_value)} at {present_age:.2f}{caution}; {basis}"
        )

    def _value_and_age(self, point: TunedPoint) -> tuple[float, float]:
        """Value by the goal and mean age: measured if the point was run, else simulated."""
        measured = self.measured.get(point.choices)
        metrics = point.metrics if measured is None else point.with_measurement(measured)
        return self.goal.value(metrics), metrics.age_mean

    def table(self) -> Table:
        """The front as a table with a row per point."""
        shows_value = self.goal.name != "throughput"
        columns = ["tokens/s"]
        if shows_value:
            columns.append(UNITS[self.goal.name])
        columns += ["age (max)", "trainer idle", "servers idle"]
        if self.measured:
            columns += ["measured", "age"]

        table = Table(title="simulated: the fastest point for each mean age", title_justify="left", box=SIMPLE)
        table.add_column("changes", overflow="fold", min_width=24)
        for column in columns:
            table.add_column(column, justify="right")

        for point in self.front:
            simulated = point.simulated
            cells = [f"{simulated.tokens_per_s:,.0f}"]
            if shows_value:
                cells.append(format_value(self.goal.value(point.metrics)))
            cells.append(f"{simulated.age_mean:.2f} ({simulated.age_max})")
            cells.append(f"{simulated.trainer_idle:.0%}")
            cells.append(f"{simulated.rollout_idle:.0%}")
            measured = self.measured.get(point.choices)
            if measured is not None:
                cells += [f"{measured.tokens_per_s:,.0f}", f"{measured.age_mean:.2f}"]
            table.add_row(self.label(point), *cells, style="bold" if point is self.chosen else None)
        return table

    def figure(self) -> Figure:
        """Plot of value against mean age: all points, the front, and the present and the chosen point."""
        figure, (axes,) = make_figure(1, 1, (8, 5))
        axes.set_title(f"{UNITS[self.goal.name]} against mean age", loc="left", fontweight="bold")

        def coordinates(points: Sequence[TunedPoint]) -> tuple[list[float], list[float]]:
            return [point.metrics.age_mean for point in points], [self.goal.value(point.metrics) for point in points]

        front = find_pareto_front(self.points, self.goal)
        axes.scatter(*coordinates(self.points), s=12, color=GREY, alpha=0.5, label="simulated")
        axes.plot(*coordinates(front), "o-", color=BLUE, label="Pareto front")
        axes.plot(*coordinates([self.present]), "s", color=GREEN, markersize=10, label="present")
        axes.plot(*coordinates([self.chosen]), "o", color=RED, fillstyle="none", markersize=15, label="recommended")

        measured = [self._value_and_age(point) for point in self.points if point.choices in self.measured]
        if measured:
            ages = [age for _, age in measured]
            values = [value for value, _ in measured]
            axes.plot(ages, values, "x", color=RED, label="measured")
        if self.goal.max_age is not None:
            axes.axvline(self.goal.max_age, color=GREY, linestyle=":", label="--max-age")

        axes.set_xlabel("mean age of the trained tokens, optimizer steps")
        axes.set_ylim(bottom=0)
        place_legend_above(axes)
        labelled = [self.present] if self.chosen is self.present else [self.present, self.chosen]
        positions = list(zip(*coordinates(labelled), strict=True))
        place_labels(figure, axes, positions, [self.label(point)[:60] for point in labelled])
        return figure

    def as_plain(self) -> dict[str, object]:
        """All metrics and reasons as values for JSON."""
        front = [point.choices for point in self.front]
        points: list[dict[str, object]] = []
        for point in self.points:
            measured = self.measured.get(point.choices)
            points.append(
                {
                    "values": dict(point.overrides),
                    "value": self.goal.value(point.metrics),
                    "on_front": point.choices in front,
                    "measured": None if measured is None else asdict(measured),
                    **asdict(point.simulated),
                }
            )
        return {
            "goal": asdict(self.goal),
            "verdict": self.verdict,
            "recommended": list_changes(self.chosen, self.present),
            "chosen": dict(self.chosen.overrides),
            "reasons": dict(self.reasons),
            "notes": list(self.notes),
            "points": points,
        }


def list_changes(point: TunedPoint, present: TunedPoint) -> dict[str, str]:
    """Overrides that turn the present configuration into the point."""
    return {key: value for key, value in point.overrides.items() if present.overrides.get(key) != value}


def explain_changes(search: TuningSearch, goal: Goal, chosen: TunedPoint) -> dict[str, str]:
    """Give a reason per changed key: the metrics that the chosen point would have with the present value."""
    reasons: dict[str, str] = {}
    for axis, reverted in search.simulate_reverts(chosen):
        present_choice = axis.choices[0]
        present_values = ", ".join(_shorten_overrides(present_choice))
        if reverted is None:
            reason = f"as before ({present_values}), it would be refused or stall"
        else:
            reason = (
                f"simulated {format_value(goal.value(chosen.metrics))} {UNITS[goal.name]} at a mean age of "
                f"{chosen.metrics.age_mean:.2f}; with {present_values} as before "
                f"{format_value(goal.value(reverted.metrics))} at {reverted.metrics.age_mean:.2f}"
            )

        chosen_choice = axis.choices[chosen.choices[search.axes.index(axis)]]
        for key, value in chosen_choice.items():
            if present_choice.get(key) == value:
                continue
            reasons[key] = reason
            # fifo and windowed_fifo train all groups in about their order, so they do not change the data.
            if key in CHANGES_DATA and value not in ("fifo", "windowed_fifo"):
                reasons[key] += f". Note: {CHANGES_DATA[key]}"
    return reasons


def render_recommended_yaml(file: Path, overrides: Sequence[str], advice: Advice, command: str) -> str:
    """Render the configuration with the recommended values, for `async-grpo run`. Each change has its reason behind
    it."""
    changes = [f"{key}={value}" for key, value in list_changes(advice.chosen, advice.present).items()]
    raw_config, source = read_raw_config(file, [*overrides, *changes])
    raw_config["name"] = f"{raw_config['name']}-tuned"[:64]

    lines = yaml.safe_dump(raw_config, sort_keys=False).splitlines()
    line_numbers = find_key_lines("\n".join(lines))
    for key, reason in advice.reasons.items():
        lines[line_numbers[key] - 1] += f"  # {reason}"

    header = [f"{source} as tuned by: {command}", advice.verdict, *advice.notes]
    comments = [f"# {' '.join(text.split())}" for text in header]
    return "\n".join([*comments, *lines]) + "\n"


def format_value(value: float) -> str:
    """Format a value with about three significant digits.

    >>> format_value(15499.6), format_value(0.01234)
    ('15,500', '0.0123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shorten_overrides(overrides: Mapping[str, str]) -> list[str]:
    """Overrides with the last part of their keys, without the window of fifo, which has no effect."""
    is_fifo = overrides.get(f"{SELECTOR}.kind") == "fifo"
    texts: list[str] = []
    for key, value in overrides.items():
        if key == f"{SELECTOR}.kind":
            texts.append(f"selector={value}")
        elif not (is_fifo and key == f"{SELECTOR}.window"):
            texts.append(f"{key.split('.')[-1]}={value}")
    return texts


def as_json(advice: Advice) -> str:
    """Content of tune.json."""
    return json.dumps(advice.as_plain(), indent=2) + "\n"

"""Compares runs: the settings in which they differ, and their figures.

Run, Run, ... --compare--> Comparison --> `async-grpo runs compare`: a table, JSON, or a picture
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.app.runs.run import Run
from async_grpo.config.load import differing_keys
from async_grpo.errors import ConfigError
from async_grpo.telemetry.rows import Facts
from async_grpo.utils.dotted import look_up

FIGURES = {
    "steps": ("optimizer steps", ",.0f"),
    "accuracy_before": ("held-out score, before", ".3f"),
    "accuracy_after": ("held-out score, after", ".3f"),
    "greedy_accuracy_after": ("held-out score, greedy, after", ".3f"),
    "reward_first": ("training reward, first tenth", ".3f"),
    "reward_last": ("training reward, last tenth", ".3f"),
    "tokens_per_s": ("tokens trained per second", ",.0f"),
    "trained_tokens": ("tokens trained", ",.0f"),
    "generated_tokens": ("tokens generated", ",.0f"),
    "wall_s": ("wall time, seconds", ",.0f"),
    "trainer_idle": ("trainer idle", ".0%"),
    "rollout_idle": ("rollout servers idle", ".0%"),
    "max_age": ("age of trained tokens, max", ",.0f"),
    "mean_age": ("age of trained tokens, mean", ".2f"),
    "logprob_gap_mean": ("log-probability gap, mean", ".1e"),
}
"""Key of the summary -> label and format."""
_PLACE = ("name", "runs_dir")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The settings that differ and the figures of several runs, one column for each run."""

    names: list[str]
    settings: dict[str, list[Any]]
    """Dotted key -> its value in each run, of the keys whose values differ; None where a run does not have it."""
    figures: dict[str, list[float | None]]
    """Key of FIGURES -> its value in each run."""

    def ratio(self, key: str) -> float | None:
        """The figure of the last run divided by that of the first; None where either is missing or 0."""
        first, last = self.figures[key][0], self.figures[key][-1]
        return last / first if first and last else None


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare two runs or more. Raises ConfigError for fewer."""
    if len(runs) < 2:
        raise ConfigError(f"a comparison needs two runs or more, and this is {len(runs)}. Name another run folder")
    settings, summaries = [run.settings() for run in runs], [run.summary() for run in runs]
    keys = sorted({key for other in settings[1:] for key in differing_keys(settings[0], other, ignored=_PLACE)})
    return Comparison(
        names=_short_names([run.path for run in runs]),
        settings={key: [look_up(one, key) for one in settings] for key in keys},
        figures={key: [_number(summary, key) for summary in summaries] for key in FIGURES},
    )


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The names of the folders, or their paths if two folders have the same name."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _number(summary: Facts, key: str) -> float | None:
    value = summary.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def plot_rewards(runs: Sequence[Run], file: Path) -> None:
    """Draw the training reward of each run, and below it its throughput, over the steps, into `file` (PNG)."""
    from async_grpo.app.report.drawing import draw_series, legend_above, panels_over_steps, save_figures

    figure, panels = panels_over_steps(["training reward", "tokens trained per second"])
    for number, (run, name) in enumerate(zip(runs, _short_names([run.path for run in runs]), strict=True)):
        steps, color = run.steps(), f"C{number % 10}"
        for axes, key in zip(panels, ("reward_mean", "tokens_per_s"), strict=True):
            draw_series(axes, steps, key, label=name, color=color)
    legend_above(panels[0])
    save_figures(file.parent, {file.stem: figure})

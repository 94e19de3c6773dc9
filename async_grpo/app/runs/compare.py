"""Comparison of runs: settings that differ, and results.

Run, Run, ... --compare_runs--> Comparison --> `async-grpo runs compare`: a table, JSON, or a picture
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
from async_grpo.telemetry.charts import METRIC_CHARTS, REWARD
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
    """Differing settings and results of several runs, one column per run."""

    names: list[str]
    settings: dict[str, list[Any]]
    """Dotted key with differing values -> value in each run; None for a run without the key."""
    figures: dict[str, list[float | None]]
    """Key of FIGURES -> value in each run."""

    def ratio(self, key: str) -> float | None:
        """Return the value of the last run divided by that of the first; None if either is missing or 0."""
        first = self.figures[key][0]
        last = self.figures[key][-1]
        return last / first if first and last else None


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare two or more runs. Raises ConfigError for fewer."""
    if len(runs) < 2:
        raise ConfigError(f"a comparison needs at least two runs, but got {len(runs)}. Name another run folder")
    settings = [run.settings() for run in runs]
    summaries = [run.summary() for run in runs]

    keys: set[str] = set()
    for other in settings[1:]:
        keys.update(differing_keys(settings[0], other, ignored=_PLACE))
    return Comparison(
        names=_short_names([run.path for run in runs]),
        settings={key: [look_up(values, key) for values in settings] for key in sorted(keys)},
        figures={key: [_number(summary, key) for summary in summaries] for key in FIGURES},
    )


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the folders; their paths if two folders have the same name."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _number(summary: Facts, key: str) -> float | None:
    value = summary.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def plot_rewards(runs: Sequence[Run], file: Path) -> None:
    """Draw training reward and throughput of each run over the steps into `file` (PNG)."""
    from async_grpo.app.report.drawing import draw_series, make_step_figure, place_legend_above, save_figures

    charts = {"reward_mean": REWARD, "tokens_per_s": METRIC_CHARTS["tokens_per_s"]}
    figure, panels = make_step_figure([chart.title for chart in charts.values()])
    names = _short_names([run.path for run in runs])
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        steps = run.steps()
        for axes, key in zip(panels, charts, strict=True):
            draw_series(axes, steps, key, label=name, color=f"C{number % 10}")
    place_legend_above(panels[0])
    save_figures(file.parent, {file.stem: figure})

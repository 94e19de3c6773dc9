"""Plots of a run: the curves, bands, marks and legends on their axes."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from async_grpo.app.report import plots
from async_grpo.app.report.drawing import errors_of_means, smoothing_window
from async_grpo.telemetry.rows import Row
from async_grpo.utils.text import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVENTS = {"evaluation": [0.0, 2.0], "trainer restarted": [3.0]}


def step_row(step: int, rng: random.Random) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": 1 + (step > 2),
        "time_s": 10.0 * step,
        "step_s": 8.0 + rng.random(),
        "wait_s": 4.0,
        "train_s": 3.0,
        "publish_s": 0.5,
        "trained_tokens": 1000 + rng.randrange(100),
        "reward_mean": rng.random(),
        "reward_error": 0.05,
        "reward_by_function": {"right": rng.random(), "short": 1.0},
        "completion_tokens_mean": 30.0,
        "completion_tokens_max": 60,
        "truncated_fraction": 0.1 * rng.random(),
        "loss": rng.gauss(0, 1),
        "grad_norm": rng.random(),
        "entropy_estimate": 0.5,
        "kl": 0.01,
        "ess": 0.9,
        "clip_fraction": 0.0,
        "age_mean": 0.7,
        "age_max": 2,
        "buffer_groups": {"inflight": 5, "ready": 3},
        "released_groups": {"trained": 4 * step, "stale": step // 2, "filtered": 1, "failed": 0},
    }


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.125, "high": value + 0.0625}


EVALUATIONS = [
    {
        "version": version,
        "samples": 4,
        "sampled_accuracy": mean,
        "greedy_accuracy": greedy,
        "figures": {"mean": estimate(mean), "greedy": estimate(greedy)},
    }
    for version, mean, greedy in ((0, 0.25, 0.125), (2, 0.5, 0.75))
]
SUMMARY = {
    "evaluations": EVALUATIONS,
    "held_out_score": "accuracy",
    "tokens_by_age": {"0": 60, "1": 40},
    "age_bound": 1,
    "tokens_per_s": 117.5,
    "max_tokens": 64,
    "capacity_groups": 12,
}
SERVERS = [[{"track": "generation", "start_s": 0.0, "end_s": 25.0}]]


def plot_steps(count: int, summary: dict[str, Any]) -> dict[str, Figure]:
    """Draw all plots of a run of `count` steps."""
    rng = random.Random(1)
    steps = [step_row(step, rng) for step in range(1, count + 1)]
    figures = {
        "held_out": plots._plot_held_out(summary),
        "reward": plots._plot_reward(steps, summary, EVENTS),
        "lengths": plots._plot_lengths(steps, summary, EVENTS),
        "optimization": plots._plot_optimization(steps, EVENTS),
        "staleness": plots._plot_staleness(steps, summary, EVENTS),
        "buffer": plots._plot_buffer(steps, summary, EVENTS),
        "time_split": plots._plot_time_split(steps, SERVERS, EVENTS),
        "throughput": plots._plot_throughput(steps, summary, EVENTS),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return plot_steps(30, SUMMARY)


def find_line(axes: Axes, label: str) -> Any:
    """Return the line whose label starts with `label`."""
    return next(line for line in axes.lines if str(line.get_label()).startswith(label))


def test_smoothing_does_not_lag() -> None:
    ramp = [float(x) for x in range(20)]
    assert smooth(ramp, 5)[2:-2] == ramp[2:-2]
    assert smooth([1, 3, 8, 4, 5], 3) == [2, 4, 5, 17 / 3, 4.5]
    assert smooth([], 3) == [] and smooth([2.0], 9) == [2.0]
    assert [smoothing_window(points) for points in (1, 19, 100, 400, 5000)] == [1, 1, 9, 25, 99]


def test_the_bars_of_held_out_scores_are_their_intervals(figures: dict[str, Figure]) -> None:
    collections = figures["held_out"].axes[0].collections
    sampled, greedy = (segments(lines) for lines in collections if has_segments(lines))
    assert sampled == [(0, 0.125, 0.3125), (2, 0.375, 0.5625)]
    assert greedy == [(0, 0.0, 0.1875), (2, 0.625, 0.8125)]
    assert "with 95% intervals" in figures["held_out"].axes[0].get_title("left")


def has_segments(collection: Any) -> bool:
    return hasattr(collection, "get_segments")


def segments(collection: Any) -> list[tuple[float, float, float]]:
    return [(low[0], low[1], high[1]) for low, high in collection.get_segments()]


def test_the_reward_band_is_1_96_standard_errors_of_the_smoothed_mean() -> None:
    steps = [{"step": n, "reward_mean": 0.5 * n, "reward_error": 0.1 * n} for n in (1, 2)]
    figure = plots._plot_reward(steps, {}, {})
    assert figure is not None
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert {(round(x, 6), round(y, 6)) for x, y in band} == {(1, 0.304), (1, 0.696), (2, 0.608), (2, 1.392)}
    assert errors_of_means([0.3, 0.4, 0.3], 3) == pytest.approx([0.25, math.sqrt(0.34) / 3, 0.25])


def test_evaluations_and_restarts_are_marked_in_every_panel(figures: dict[str, Figure]) -> None:
    assert plots.find_restarts([{"step": 1, "epoch": 1}, {"step": 2, "epoch": 1}, {"step": 3, "epoch": 2}]) == [3]
    for name in ("reward", "lengths", "optimization", "buffer", "time_split", "throughput"):
        for axes in figures[name].axes:
            if axes.lines:  # an empty cell of the grid has none
                assert list(find_line(axes, "evaluation").get_xdata()) == [0, 2], name
                assert list(find_line(axes, "trainer restarted").get_xdata()) == [3], name


def test_legends_cover_no_panel(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        figure.draw_without_rendering()
        legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]
        for legend in legends:
            assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes), name
            assert legend.get_window_extent().x1 <= figure.bbox.x1, name


def test_lines_in_a_panel_differ_without_colour(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        for axes in figure.axes:
            labelled = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
            styles = [(line.get_linestyle(), line.get_marker()) for line in labelled if line.get_linestyle() != "None"]
            assert len(set(styles)) == len(styles), axes.get_title("left")


def test_reward_functions_have_lines_and_measured_metrics_have_panels(figures: dict[str, Figure]) -> None:
    assert list(find_line(figures["reward"].axes[1], "short").get_ydata()) == pytest.approx([1.0] * 30)
    titles = [axes.get_title("left") for axes in figures["optimization"].axes]
    assert titles[:3] == ["Loss", "Gradient norm", "Entropy, estimated (nats)"]
    assert {"KL from the reference (nats)", "Clipped tokens", "Effective sample size"} <= set(titles)


def test_throughput_is_tokens_over_seconds_of_the_window() -> None:
    steps: list[Row] = [{"step": n, "trained_tokens": 90 if n % 2 else 10, "step_s": n} for n in range(1, 31)]
    figure = plots._plot_throughput(steps, {"tokens_per_s": 4.5}, {})
    assert figure is not None
    assert find_line(figure.axes[0], "over 3 steps").get_ydata()[1] == pytest.approx((90 + 10 + 90) / (1 + 2 + 3))
    assert set(find_line(figure.axes[0], "run: 4/s").get_ydata()) == {4.5}


def test_idle_shares_are_per_step() -> None:
    steps: list[Row] = [
        {"step": 1, "time_s": 20.0, "step_s": 10.0, "wait_s": 2.0},
        {"step": 2, "time_s": 30.0, "step_s": 10.0, "wait_s": 5.0},
    ]
    figure = plots._plot_time_split(steps, SERVERS, {})
    assert figure is not None
    assert list(find_line(figure.axes[1], "trainer waits").get_ydata()) == [0.2, 0.5]
    assert list(find_line(figure.axes[1], "rollout servers").get_ydata()) == [0.0, 0.5]


def test_the_buffer_plot_shows_capacity_and_occurring_reasons(
    figures: dict[str, Figure],
) -> None:
    groups, released = figures["buffer"].axes
    assert set(find_line(groups, "in flight").get_ydata()) == {5} and set(find_line(groups, "ready").get_ydata()) == {3}
    assert set(find_line(groups, "capacity: 12").get_ydata()) == {12}
    assert find_line(released, "stale").get_ydata()[-1] == 15 and find_line(released, "filtered").get_ydata()[-1] == 1
    assert not {"trained", "failed"} & {line.get_label() for line in released.lines}


def test_graded_answers_are_plotted_as_reward_without_percent() -> None:
    figure = plots._plot_held_out({**SUMMARY, "held_out_score": "reward"})
    assert figure is not None
    assert figure.axes[0].get_title("left").startswith("Reward on held-out prompts")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.250", "0.125", "0.750", "0.500"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_short_run_is_plotted_with_markers(count: int) -> None:
    figures = plot_steps(count, {**SUMMARY, "evaluations": EVALUATIONS[:1]})
    assert find_line(figures["reward"].axes[0], "mean reward").get_marker() == "o"
    assert len(figures) == 8


@pytest.mark.slow
def test_plots_of_5000_steps_are_small(tmp_path: Path) -> None:
    rng = random.Random(1)
    steps = [step_row(step, rng) for step in range(1, 5001)]
    files = plots.write_plots(tmp_path, steps, SUMMARY, SERVERS)
    assert len(files) == 8
    assert max(file.stat().st_size for file in files) < 100_000

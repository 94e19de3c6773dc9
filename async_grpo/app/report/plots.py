"""The plots of a run: run_dir/plots/*.png, drawn from its rows and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.app.report.drawing import (
    BLUE,
    DASHES,
    GREEN,
    GREY,
    MAX_MARKED_POINTS,
    ORANGE,
    PURPLE,
    RED,
    draw_curve,
    draw_limit,
    draw_series,
    extract_entry,
    format_y_as_percent,
    format_y_by_unit,
    make_step_figure,
    mark_events,
    place_legend_above,
    save_figures,
    smoothing_window,
)
from async_grpo.app.report.summary import choose_score_format
from async_grpo.telemetry.charts import (
    AGES,
    BUFFER,
    HELD_OUT,
    IDLE,
    LENGTHS,
    METRIC_CHARTS,
    REWARD,
    REWARD_BY_FUNCTION,
    STEP_TIME,
    TOKENS_BY_AGE,
    UNTRAINED,
)
from async_grpo.telemetry.idle import rollout_idle_s
from async_grpo.telemetry.rows import Facts, Row, latest_rows, number, numbers, seconds_by_part, tokens_per_s
from async_grpo.utils.text import smooth
from async_grpo.wire import ReleaseReason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OPTIMIZATION_KEYS = ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "ess", "logprob_gap_mean", "lr")
"""Metrics that get a small panel each."""
_FAMILY_COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, GREY)
"""Colours of the curves of a family, in order."""
_GREEDY_TEXT_COLOR = "#9a6a00"
"""Darker than the greedy line, because text in its colour is hard to read."""
_MAX_BAR_LABELS = 9
"""Most bars of an age histogram that are labelled with their shares."""
OVERVIEW_PLOTS = ("held_out", "reward", "staleness", "throughput")
"""Plots at the top of a report: of the charts in `telemetry.charts.OVERVIEW`. The others are folded."""
Events = Mapping[str, Sequence[float]]
"""Kind of event -> steps."""


def write_plots(
    run_dir: Path, rows: Sequence[Row], summary: Facts, servers: Sequence[Sequence[Row]] = ()
) -> list[Path]:
    """Draw every plot that has data. Returns the files in the order of the report.

    `rows`: rows of the steps. `servers`: rows of each timeline/rollout-*.jsonl.
    """
    steps = latest_rows(rows, "step")
    events: Events = {}
    if steps:
        evaluated = [float(row["version"]) for row in summary.get("evaluations") or []]
        events = {"evaluation": evaluated, "trainer restarted": find_restarts(steps)}
    figures = {
        "held_out": _plot_held_out(summary),
        "reward": _plot_reward(steps, summary, events),
        "lengths": _plot_lengths(steps, summary, events),
        "optimization": _plot_optimization(steps, events),
        "staleness": _plot_staleness(steps, summary, events),
        "buffer": _plot_buffer(steps, summary, events),
        "time_split": _plot_time_split(steps, servers, events),
        "throughput": _plot_throughput(steps, summary, events),
    }
    return save_figures(run_dir / "plots", figures)


def find_restarts(steps: Sequence[Row]) -> list[float]:
    """Return the first step of each restarted trainer, which has a higher epoch than the step before."""
    return [
        row["step"]
        for previous, row in pairwise(steps)
        if (number(row, "epoch") or 0) > (number(previous, "epoch") or 0)
    ]


def _plot_held_out(summary: Facts) -> Figure | None:
    """Plot the held-out scores by policy version, with 95% intervals. The first and last version are labelled."""
    evaluations = summary.get("evaluations") or []
    if not evaluations:
        return None
    score = summary.get("held_out_score", "accuracy")
    figure, (axes,) = make_step_figure([f"{score.capitalize()} on held-out prompts, with 95% intervals"])
    axes.set_xlabel("policy version (optimizer steps)")

    sampled, greedy = HELD_OUT.series
    sampled = replace(sampled, label=f"{sampled.label}, mean@{evaluations[0].get('samples', 'k')}")
    for series, estimate, marker in ((sampled, "mean", "o"), (greedy, "greedy", "s")):
        _draw_scores(
            axes,
            evaluations,
            series.key,
            estimate,
            label=series.label,
            color=series.color,
            marker=marker,
            linestyle=series.dash,
        )

    _label_first_and_last(axes, evaluations, choose_score_format(score))
    axes.margins(x=0.08, y=0.16)
    if score == "accuracy":
        format_y_as_percent(axes)
    place_legend_above(axes)
    return figure


def _draw_scores(axes: Axes, evaluations: Sequence[Row], key: str, estimate: str, **style: Any) -> None:
    """Draw the scores `key` of the measured versions, and their intervals where they were computed.

    `estimate`: name of the estimate in `figures` with the interval of the score.
    """
    points = [(row["version"], value) for row in evaluations if (value := number(row, key)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), markersize=5 if len(points) <= 40 else 2, **style)

    intervals = []
    for row in evaluations:
        interval = (row.get("figures") or {}).get(estimate)
        if interval:
            intervals.append((row["version"], interval["low"], interval["high"]))
    if not intervals:
        return
    versions, low, high = zip(*intervals, strict=True)
    axes.vlines(versions, low, high, color=style["color"], linewidth=2)
    if style["linestyle"]:
        axes.fill_between(versions, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _label_first_and_last(axes: Axes, evaluations: Sequence[Row], form: str) -> None:
    """Label the scores of the first and last version: the higher one above its point, the lower one below."""
    sampled, greedy = HELD_OUT.series
    ends = evaluations if len(evaluations) == 1 else [evaluations[0], evaluations[-1]]
    for row in ends:
        scores = []
        for key, color in ((sampled.key, sampled.color), (greedy.key, _GREEDY_TEXT_COLOR)):
            value = number(row, key)
            if value is not None:
                scores.append((value, color))

        for rank, (value, color) in enumerate(sorted(scores, reverse=True)):
            axes.annotate(
                format(value, form),
                (row["version"], value),
                (0, 11) if rank == 0 else (0, -20),
                textcoords="offset points",
                ha="center",
                color=color,
                fontweight="bold",
            )


def _plot_reward(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Plot the training reward with its 95% interval over groups, and below it the score of each reward function.

    Held-out scores are those of the first function, so they are drawn in the last panel.
    """
    functions = sorted({name for row in steps for name in row.get("reward_by_function") or {}})
    titles = [REWARD.heading]
    if len(functions) > 1:
        titles.append(REWARD_BY_FUNCTION.heading)
    figure, panels = make_step_figure(titles)

    (reward,) = REWARD.series
    if any(reward.error in row for row in steps):
        reward = replace(reward, label=f"{reward.label}, 95% interval over groups")
    if not draw_curve(panels[0], steps, reward):
        return None

    sampled = HELD_OUT.series[0]
    _draw_scores(
        panels[-1],
        summary.get("evaluations") or [],
        sampled.key,
        "mean",
        color=RED,
        marker="D",
        linestyle="",
        label=f"held-out {summary.get('held_out_score')}, {sampled.label}",
    )
    for axes in panels[1:]:
        for index, name in enumerate(functions):
            rows = extract_entry(steps, REWARD_BY_FUNCTION.family, name)
            color = _FAMILY_COLORS[index % len(_FAMILY_COLORS)]
            draw_series(axes, rows, "value", color=color, linestyle=DASHES[index % len(DASHES)], label=name)

    mark_events(panels, events)
    for axes in panels:
        place_legend_above(axes, columns=2)
    return figure


def _plot_lengths(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Plot the lengths of the completions, their limit if it is near, and the truncated share."""
    truncated = METRIC_CHARTS["truncated_fraction"]
    has_share = any(number(row, "truncated_fraction") is not None for row in steps)
    titles = [LENGTHS.heading]
    if has_share:
        titles.append(truncated.heading)
    figure, panels = make_step_figure(titles)

    mean, longest, limit = LENGTHS.series
    lengths = panels[0]
    if not draw_curve(lengths, steps, mean):
        return None
    draw_curve(lengths, steps, longest)
    max_tokens = summary.get(limit.key)
    # A limit far above the curves would flatten them.
    if max_tokens and lengths.get_ylim()[1] > max_tokens / 2:
        draw_limit(lengths, limit, max_tokens)
    lengths.set_ylim(0)

    if has_share:
        draw_series(panels[1], steps, "truncated_fraction", color=RED)
        _scale_share_axis(panels[1], steps, "truncated_fraction")
    mark_events(panels, events)
    place_legend_above(lengths)
    return figure


def _scale_share_axis(axes: Axes, steps: Sequence[Row], key: str) -> None:
    """Scale the y axis from 0 to the largest share, at least 1%, so that shares of 0 lie on the axis."""
    axes.set_ylim(0, max(0.01, 1.05 * max(numbers(steps, key))))
    format_y_as_percent(axes)


def _plot_optimization(steps: Sequence[Row], events: Events) -> Figure | None:
    """Plot the optimizer's metrics in small panels. If only the entropy's estimate was measured, it is shown."""
    measured = {key for row in steps for key in row if number(row, key) is not None}
    keys = []
    for key in _OPTIMIZATION_KEYS:
        if key == "entropy" and key not in measured:
            key = "entropy_estimate"
        if key in measured:
            keys.append(key)
    if not keys:
        return None

    figure, panels = make_step_figure([METRIC_CHARTS[key].heading for key in keys], columns=2)
    for axes, key in zip(panels, keys, strict=True):
        draw_series(axes, steps, key, color=BLUE, exact=key == "lr")
        format_y_by_unit(axes, METRIC_CHARTS[key])
        if key == "clip_fraction":
            _scale_share_axis(axes, steps, key)
    mark_events(panels, events)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    return figure


def _plot_staleness(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Plot the shares of the trained tokens by age, and the ages by step, both with the age bound."""
    tokens_by_age = {int(age): tokens for age, tokens in (summary.get("tokens_by_age") or {}).items()}
    if not sum(tokens_by_age.values()):
        return None
    bound = summary.get("age_bound", max(tokens_by_age))
    figure, (shares, ages) = make_step_figure([TOKENS_BY_AGE.heading, AGES.heading], shared=False)
    _draw_age_shares(shares, tokens_by_age, bound)

    mean, oldest, effective, limit = AGES.series
    draw_curve(ages, steps, mean)
    for series, width in ((oldest, 1.0), (effective, 1.2)):
        points = [(row["step"], value) for row in steps if (value := number(row, series.key)) is not None]
        is_constant = len({value for _, value in points}) <= 1
        if points and not (series.only_if_varying and is_constant):
            ages.step(
                *zip(*points, strict=True),
                linewidth=width,
                where="mid",
                color=series.color,
                linestyle=series.dash,
                label=series.label,
            )
    draw_limit(ages, limit, bound)
    ages.set_ylim(-0.05 * (bound + 1), (bound + 1) * 1.05)
    mark_events([ages], events)
    place_legend_above(ages)
    return figure


def _draw_age_shares(axes: Axes, tokens_by_age: Mapping[int, int], bound: int) -> None:
    """Draw the share of the tokens of each age as bars. Ages beyond the bound are red and hatched."""
    from matplotlib.ticker import MaxNLocator

    total = sum(tokens_by_age.values())
    ages = range(max(bound, *tokens_by_age, 0) + 2)
    bars = axes.bar(
        ages,
        [tokens_by_age.get(age, 0) / total for age in ages],
        width=0.7,
        color=[GREEN if age <= bound else RED for age in ages],
        hatch=["" if age <= bound else "//" for age in ages],
    )
    if len(ages) <= _MAX_BAR_LABELS:
        labels = [f"{tokens_by_age[age] / total:.1%}" if tokens_by_age.get(age) else "" for age in ages]
        axes.bar_label(bars, labels, padding=2)
    axes.axvline(bound + 0.5, color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(f" bound: {bound}", (bound + 0.5, 0.92), xycoords=("data", "axes fraction"), color="#555")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.15)
    axes.set_xlabel("age in optimizer steps")
    axes.set_ylabel("share of the tokens")
    format_y_as_percent(axes)


def _plot_buffer(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Plot the groups in the buffer after each step with its capacity, and the groups released untrained by reason.

    The second panel has only the reasons that occurred, and is omitted without any.
    """
    if not any(row.get(BUFFER.family) for row in steps):
        return None
    untrained = {}
    for reason in ReleaseReason:
        rows = extract_entry(steps, UNTRAINED.family, reason.value)
        if reason is not ReleaseReason.TRAINED and any(number(row, "value") for row in rows):
            untrained[reason.value] = rows
    titles = [BUFFER.heading]
    if untrained:
        titles.append(UNTRAINED.heading)
    figure, panels = make_step_figure(titles)

    inflight, ready, limit = BUFFER.series
    draw_curve(panels[0], steps, inflight)
    draw_curve(panels[0], steps, ready)
    capacity = summary.get(limit.key)
    if capacity:
        draw_limit(panels[0], limit, capacity)

    for index, (reason_name, rows) in enumerate(untrained.items()):
        color, dash = _FAMILY_COLORS[index], DASHES[index % len(DASHES)]
        draw_series(panels[1], rows, "value", exact=True, color=color, linestyle=dash, label=reason_name)

    mark_events(panels, events)
    for axes in panels:
        axes.set_ylim(0)
        place_legend_above(axes, columns=2)
    return figure


def _plot_time_split(steps: Sequence[Row], servers: Sequence[Sequence[Row]], events: Events) -> Figure | None:
    """Plot the parts of each step's wall time as stacked areas, and the idle shares of both sides."""
    seconds = [seconds_by_part(row) for row in steps]
    parts = [series for series in STEP_TIME.series if any(row.get(series.label) for row in seconds)]
    if not parts:
        return None
    figure, (split, idle) = make_step_figure([STEP_TIME.title.capitalize(), IDLE.heading])

    window = smoothing_window(len(steps))
    split.stackplot(
        [row["step"] for row in steps],
        [smooth([row[series.label] for row in seconds], window) for series in parts],
        labels=[series.label for series in parts],
        colors=[series.color for series in parts],
        hatch=[series.hatch for series in parts],
        linewidth=0,
    )
    split.set_ylabel(f"seconds (mean of {window})" if window > 1 else "seconds")
    split.margins(x=0.02)
    split.set_ylim(0)

    _draw_idle_shares(idle, steps, servers, window)
    mark_events([split, idle], events)
    place_legend_above(split, columns=5)
    place_legend_above(idle)
    return figure


def _draw_idle_shares(axes: Axes, steps: Sequence[Row], servers: Sequence[Sequence[Row]], window: int) -> None:
    timed = [row for row in steps if number(row, "time_s") is not None and number(row, "step_s")]
    trainer_idle_s = [number(row, "wait_s") or 0.0 for row in timed]
    servers_idle_s = rollout_idle_s(timed, servers)
    for series, idle_s in zip(IDLE.series, (trainer_idle_s, servers_idle_s), strict=True):
        if idle_s:
            axes.plot(
                [row["step"] for row in timed],
                _windowed_ratio(idle_s, [row["step_s"] for row in timed], window),
                linewidth=2,
                color=series.color,
                linestyle=series.dash,
                label=series.label,
            )
    axes.set_ylim(-0.02, 1.02)
    format_y_by_unit(axes, IDLE)


def _windowed_ratio(numerators: Sequence[float], denominators: Sequence[float], window: int) -> list[float]:
    """Return the ratio of the sums over a window around each step, which weights steps by their duration."""
    ratios = []
    for numerator, denominator in zip(smooth(numerators, window), smooth(denominators, window), strict=True):
        ratios.append(numerator / denominator)
    return ratios


def _plot_throughput(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Plot the tokens trained per second of each step, and the value for the whole run from the report."""
    timed = [row for row in steps if tokens_per_s([row]) is not None]
    if not timed:
        return None
    figure, (axes,) = make_step_figure([METRIC_CHARTS["tokens_per_s"].heading])
    step_numbers = [row["step"] for row in timed]
    window = smoothing_window(len(timed))
    if window > 1:
        exact = [tokens_per_s([row]) or 0.0 for row in timed]
        axes.plot(step_numbers, exact, color=GREEN, alpha=0.3, linewidth=0.8)

    axes.plot(
        step_numbers,
        _windowed_ratio([row["trained_tokens"] for row in timed], [row["step_s"] for row in timed], window),
        color=GREEN,
        linewidth=2,
        marker="o" if len(timed) <= MAX_MARKED_POINTS else None,
        label=f"over {window} steps" if window > 1 else "step",
    )
    run_tokens_per_s = summary.get("tokens_per_s")
    if run_tokens_per_s is not None:
        label = f"run: {run_tokens_per_s:,.0f}/s"
        axes.axhline(run_tokens_per_s, color=GREY, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    mark_events([axes], events)
    place_legend_above(axes, columns=4)
    return figure

"""The plots of a run: PNG files in run_dir/plots, drawn from its rows and its summary."""

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
    ORANGE,
    PURPLE,
    RED,
    draw_curve,
    draw_limit,
    draw_series,
    entries_of,
    legend_above,
    mark_events,
    panels_over_steps,
    percent,
    save_figures,
    scale_by_unit,
    smoothing_window,
)
from async_grpo.app.report.summary import score_format
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

_OPTIMIZATION = ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "ess", "logprob_gap_mean", "lr")
"""Keys of the small panels."""
_NAMED_COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, GREY)
"""Colours of the curves of a family, in order."""
_MOST_LABELS = 9
"""Most bars of an age histogram that are labelled with their figures."""
Events = Mapping[str, Sequence[float]]


def write_plots(
    run_dir: Path, rows: Sequence[Row], summary: Facts, servers: Sequence[Sequence[Row]] = ()
) -> list[Path]:
    """Draw every plot for which there are data; returns the files in the order of the report.

    `rows` are those of the steps, `servers` those of each timeline/rollout-*.jsonl.
    """
    steps = latest_rows(rows, "step")
    evaluated = [float(row["version"]) for row in summary.get("evaluations") or []]
    events = {"evaluation": evaluated, "trainer restarted": restarts(steps)} if steps else {}
    figures = {
        "held_out": _held_out(summary),
        "reward": _reward(steps, summary, events),
        "lengths": _lengths(steps, summary, events),
        "optimization": _optimization(steps, events),
        "staleness": _staleness(steps, summary, events),
        "buffer": _buffer(steps, summary, events),
        "time_split": _time_split(steps, servers, events),
        "throughput": _throughput(steps, summary, events),
    }
    return save_figures(run_dir / "plots", figures)


def restarts(steps: Sequence[Row]) -> list[float]:
    """The steps before which another trainer took over: their epoch is higher than that of the step before."""
    return [
        step["step"]
        for before, step in pairwise(steps)
        if (number(step, "epoch") or 0) > (number(before, "epoch") or 0)
    ]


def _held_out(summary: Facts) -> Figure | None:
    """The score of held-out prompts by policy version with its 95% interval, and labels at the ends."""
    evaluations = summary.get("evaluations") or []
    if not evaluations:
        return None
    score = summary.get("held_out_score", "accuracy")
    figure, (axes,) = panels_over_steps([f"{score.capitalize()} on held-out prompts, with 95% intervals"])
    sampled, greedy = HELD_OUT.series
    axes.set_xlabel("policy version (optimizer steps)")
    sampled = replace(sampled, label=f"{sampled.label}, mean@{evaluations[0].get('samples', 'k')}")
    for series, kind, marker in ((sampled, "mean", "o"), (greedy, "greedy", "s")):
        style = {"label": series.label, "color": series.color, "marker": marker, "linestyle": series.dash}
        _draw_scores(axes, evaluations, series.key, kind, **style)
    _label_ends(axes, evaluations, score_format(score))
    axes.margins(x=0.08, y=0.16)
    if score == "accuracy":
        percent(axes)
    legend_above(axes)
    return figure


def _draw_scores(axes: Axes, evaluations: Sequence[Row], key: str, kind: str, **style: Any) -> None:
    """Draw a line through the measured versions, and its interval as an area with whiskers where it was computed."""
    points = [(row["version"], value) for row in evaluations if (value := number(row, key)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), markersize=5 if len(points) <= 40 else 2, **style)
    known = [(row["version"], (row.get("figures") or {}).get(kind)) for row in evaluations]
    bands = [(version, found["low"], found["high"]) for version, found in known if found]
    if bands:
        xs, lows, highs = zip(*bands, strict=True)
        axes.vlines(xs, lows, highs, color=style["color"], linewidth=2)
        if style["linestyle"]:
            axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.2, linewidth=0)


def _label_ends(axes: Axes, evaluations: Sequence[Row], form: str) -> None:
    """Label the first and the last version: the higher point above, the lower one below."""
    for row in evaluations[:: max(1, len(evaluations) - 1)][:2]:
        sampled, greedy = HELD_OUT.series
        keys = ((sampled.key, sampled.color), (greedy.key, "#9a6a00"))  # darker than the line: it is text
        found = [(value, color) for key, color in keys if (value := number(row, key)) is not None]
        for rank, (value, color) in enumerate(sorted(found, reverse=True)):
            style: dict[str, Any] = {"ha": "center", "color": color, "fontweight": "bold"}
            place = (0, 11) if rank == 0 else (0, -20)
            axes.annotate(format(value, form), (row["version"], value), place, textcoords="offset points", **style)


def _reward(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """The training reward with the 95% interval over groups, and that of each function. Held-out scores, which are
    those of the first function, stand beside the functions."""
    names = sorted({name for row in steps for name in row.get("reward_by_function") or {}})
    figure, panels = panels_over_steps([REWARD.heading, *([REWARD_BY_FUNCTION.heading] if len(names) > 1 else [])])
    (reward,) = REWARD.series
    if any(reward.error in row for row in steps):
        reward = replace(reward, label=f"{reward.label}, 95% interval over groups")
    if not draw_curve(panels[0], steps, reward):
        return None
    evaluations = summary.get("evaluations") or []
    sampled = HELD_OUT.series[0]
    held_out = f"held-out {summary.get('held_out_score')}, {sampled.label}"
    _draw_scores(panels[-1], evaluations, sampled.key, "mean", color=RED, marker="D", linestyle="", label=held_out)
    for axes in panels[1:]:
        for place, name in enumerate(names):
            rows, color = entries_of(steps, REWARD_BY_FUNCTION.family, name), _NAMED_COLORS[place % len(_NAMED_COLORS)]
            draw_series(axes, rows, "value", color=color, linestyle=DASHES[place % 4], label=name)
    mark_events(panels, events)
    for axes in panels:
        legend_above(axes, columns=2)
    return figure


def _lengths(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Lengths of the completions, with the limit where it is near, and the truncated share."""
    truncated = METRIC_CHARTS["truncated_fraction"]
    has_share = any(number(row, "truncated_fraction") is not None for row in steps)
    figure, panels = panels_over_steps([LENGTHS.heading, *([truncated.heading] if has_share else [])])
    mean, longest, limit = LENGTHS.series
    if not draw_curve(panels[0], steps, mean):
        return None
    draw_curve(panels[0], steps, longest)
    max_tokens = summary.get(limit.key)
    if max_tokens and panels[0].get_ylim()[1] > max_tokens / 2:
        draw_limit(panels[0], limit, max_tokens)
    panels[0].set_ylim(0)
    if has_share:
        draw_series(panels[1], steps, "truncated_fraction", color=RED)
        _share_axis(panels[1], steps, "truncated_fraction")
    mark_events(panels, events)
    legend_above(panels[0])
    return figure


def _share_axis(axes: Axes, steps: Sequence[Row], key: str) -> None:
    """Scale the axis from 0 to the largest share in percent, at least to 1%, so that shares of 0 lie on the axis."""
    axes.set_ylim(0, max(0.01, 1.05 * max(numbers(steps, key))))
    percent(axes)


def _optimization(steps: Sequence[Row], events: Events) -> Figure | None:
    """Small panels of what the optimizer sees; the entropy is the estimate if only that was measured."""
    measured = {key for row in steps for key in row if number(row, key) is not None}
    keys = ["entropy_estimate" if key == "entropy" and key not in measured else key for key in _OPTIMIZATION]
    keys = [key for key in keys if key in measured]
    if not keys:
        return None
    figure, panels = panels_over_steps([METRIC_CHARTS[key].heading for key in keys], columns=2)
    for axes, key in zip(panels, keys, strict=True):
        draw_series(axes, steps, key, color=BLUE, exact=key == "lr")
        scale_by_unit(axes, METRIC_CHARTS[key])
        if key == "clip_fraction":
            _share_axis(axes, steps, key)
    mark_events(panels, events)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    return figure


def _staleness(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Shares of the trained tokens by age, and ages by step, both with the age bound."""
    tokens = {int(age): count for age, count in (summary.get("tokens_by_age") or {}).items()}
    if not sum(tokens.values()):
        return None
    bound = summary.get("age_bound", max(tokens))
    figure, (shares, ages) = panels_over_steps([TOKENS_BY_AGE.heading, AGES.heading], shared=False)
    mean, oldest, effective, limit = AGES.series
    _draw_ages(shares, tokens, bound)
    draw_curve(ages, steps, mean)
    for series, width in ((oldest, 1.0), (effective, 1.2)):
        points = [(row["step"], value) for row in steps if (value := number(row, series.key)) is not None]
        is_shown = len({value for _, value in points}) > 1 if series.only_if_varying else bool(points)
        if is_shown:
            style: dict[str, Any] = {"color": series.color, "linestyle": series.dash, "label": series.label}
            ages.step(*zip(*points, strict=True), linewidth=width, where="mid", **style)
    draw_limit(ages, limit, bound)
    ages.set_ylim(-0.05 * (bound + 1), (bound + 1) * 1.05)
    mark_events([ages], events)
    legend_above(ages)
    return figure


def _draw_ages(axes: Axes, tokens: Mapping[int, int], bound: int) -> None:
    """Bars: the share of the tokens of each age. Those beyond the bound are red and hatched."""
    from matplotlib.ticker import MaxNLocator

    total, ages = sum(tokens.values()), range(max(bound, *tokens, 0) + 2)
    bars = axes.bar(
        ages,
        [tokens.get(age, 0) / total for age in ages],
        width=0.7,
        color=[GREEN if age <= bound else RED for age in ages],
        hatch=["" if age <= bound else "//" for age in ages],
    )
    if len(ages) <= _MOST_LABELS:
        axes.bar_label(bars, [f"{tokens[age] / total:.1%}" if tokens.get(age) else "" for age in ages], padding=2)
    axes.axvline(bound + 0.5, color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(f" bound: {bound}", (bound + 0.5, 0.92), xycoords=("data", "axes fraction"), color="#555")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.15)
    axes.set_xlabel("age in optimizer steps")
    axes.set_ylabel("share of the tokens")
    percent(axes)


def _buffer(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Groups in the buffer after each step, with its capacity; and groups released untrained so far, if there are any,
    by reason."""
    if not any(row.get(BUFFER.family) for row in steps):
        return None
    reasons = [reason.value for reason in ReleaseReason if reason is not ReleaseReason.TRAINED]
    untrained = {reason: entries_of(steps, UNTRAINED.family, reason) for reason in reasons}
    untrained = {name: rows for name, rows in untrained.items() if any(number(row, "value") for row in rows)}
    figure, panels = panels_over_steps([BUFFER.heading, *([UNTRAINED.heading] if untrained else [])])
    inflight, ready, limit = BUFFER.series
    for series in (inflight, ready):
        draw_curve(panels[0], steps, series)
    if capacity := summary.get(limit.key):
        draw_limit(panels[0], limit, capacity)
    for place, (name, rows) in enumerate(untrained.items()):
        color = _NAMED_COLORS[place]
        draw_series(panels[1], rows, "value", exact=True, color=color, linestyle=DASHES[place % 4], label=name)
    mark_events(panels, events)
    for axes in panels:
        axes.set_ylim(0)
        legend_above(axes, columns=2)
    return figure


def _time_split(steps: Sequence[Row], servers: Sequence[Sequence[Row]], events: Events) -> Figure | None:
    """The parts of each step's wall time as stacked areas, and the idle shares of both sides."""
    parts = [seconds_by_part(row) for row in steps]
    shown = [series for series in STEP_TIME.series if any(part.get(series.label) for part in parts)]
    if not shown:
        return None
    figure, (split, idle) = panels_over_steps([STEP_TIME.title.capitalize(), IDLE.heading])
    window = smoothing_window(len(steps))
    split.stackplot(
        [row["step"] for row in steps],
        [smooth([part[series.label] for part in parts], window) for series in shown],
        labels=[series.label for series in shown],
        colors=[series.color for series in shown],
        hatch=[series.hatch for series in shown],
        linewidth=0,
    )
    split.set_ylabel(f"seconds (mean of {window})" if window > 1 else "seconds")
    split.margins(x=0.02)
    split.set_ylim(0)
    _draw_idle(idle, steps, servers, window)
    mark_events([split, idle], events)
    legend_above(split, columns=5)
    legend_above(idle)
    return figure


def _draw_idle(axes: Axes, steps: Sequence[Row], servers: Sequence[Sequence[Row]], window: int) -> None:
    timed = [row for row in steps if number(row, "time_s") is not None and number(row, "step_s")]
    idle_s = ([number(row, "wait_s") or 0.0 for row in timed], rollout_idle_s(timed, servers))
    for series, seconds in zip(IDLE.series, idle_s, strict=True):
        if seconds:
            shares = _ratio(seconds, [row["step_s"] for row in timed], window)
            style: dict[str, Any] = {"color": series.color, "linestyle": series.dash, "label": series.label}
            axes.plot([row["step"] for row in timed], shares, linewidth=2, **style)
    axes.set_ylim(-0.02, 1.02)
    scale_by_unit(axes, IDLE)


def _ratio(above: Sequence[float], below: Sequence[float], window: int) -> list[float]:
    """Ratio of the sums over the window: the rate over all its time, not a mean of rates."""
    return [a / b for a, b in zip(smooth(above, window), smooth(below, window), strict=True)]


def _throughput(steps: Sequence[Row], summary: Facts, events: Events) -> Figure | None:
    """Tokens trained per second of each step, and that of the run as in the report."""
    timed = [row for row in steps if tokens_per_s([row]) is not None]
    if not timed:
        return None
    figure, (axes,) = panels_over_steps([METRIC_CHARTS["tokens_per_s"].heading])
    window, xs = smoothing_window(len(timed)), [row["step"] for row in timed]
    if window > 1:
        axes.plot(xs, [tokens_per_s([row]) or 0.0 for row in timed], color=GREEN, alpha=0.3, linewidth=0.8)
    rates = _ratio([row["trained_tokens"] for row in timed], [row["step_s"] for row in timed], window)
    marker = "o" if len(xs) <= 20 else None
    axes.plot(
        xs, rates, color=GREEN, linewidth=2, marker=marker, label=f"over {window} steps" if window > 1 else "step"
    )
    if (whole := summary.get("tokens_per_s")) is not None:
        axes.axhline(whole, color=GREY, linestyle="--", linewidth=1.2, label=f"run: {whole:,.0f}/s")
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    mark_events([axes], events)
    legend_above(axes, columns=4)
    return figure

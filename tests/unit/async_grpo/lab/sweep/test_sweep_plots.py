"""Labels of a sweep's plots: nothing is printed over anything else."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from async_grpo.lab.sweep import plots
from async_grpo.lab.sweep.recommend import make_candidates, recommend
from async_grpo.lab.sweep.results import Curve
from async_grpo.lab.sweep.settings import GridSetting, group_by_setting
from tests.support.sweep_fakes import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE = Curve(steps=[1, 2, 3], seconds=[1.0, 2.0, 3.0], reward=[0.1, 0.2, 0.3])
LONG = "gspo-with-a-very-long-name-of-a-preset"


def settings(staleness: list[int], presets: list[str], *, ratio: float = 1.5, step: float = 0.001) -> list[GridSetting]:
    """Settings that lie close to each other: presets differ in speed by one percent."""
    found = [
        figures(
            *(bound, seed),
            values={"max_staleness": str(bound), "trainer.objective.preset": preset},
            samples_per_s=10.0 * ratio**place * (1 + 0.01 * rank),
            accuracy_after=0.9 - step * place,
            curve=CURVE,
        )
        for place, bound in enumerate(staleness)
        for rank, preset in enumerate(presets)
        for seed in (1, 2)
    ]
    return group_by_setting(found)


def tradeoff(found: list[GridSetting]) -> Figure:
    choice = recommend(found)
    candidates = make_candidates(found, choice.measure)
    figure = plots._draw_tradeoff(candidates, {each.label: each for each in found}, plots.assign_styles(found), choice)
    assert figure is not None
    return figure


def boxes(texts: list[Any]) -> list[Any]:
    from matplotlib.text import Text

    return [Text.get_window_extent(text) for text in texts if text.get_text()]


MANY = settings([0, 1, 2, 4, 8, 16], ["grpo", "dapo", LONG])


@pytest.mark.parametrize(
    ("found", "first"),
    [
        (settings([0, 1, 2], ["grpo"]), "0, grpo"),
        (settings([0, 1], ["grpo", "dapo"], ratio=1.001, step=0.0), "0, grpo"),
        (settings([0, 1], ["grpo", LONG]), "1"),
        (MANY, "1"),
    ],
    ids=["few", "on one spot", "long names", "many"],
)
def test_labels_overlap_neither_each_other_nor_a_point(found: list[GridSetting], first: str) -> None:
    figure = tradeoff(found)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = boxes(axes.texts)
    assert len(labels) == len(found) and axes.texts[0].get_text() == first
    assert not any(a.overlaps(b) for a, b in combinations(labels, 2))
    points = [axes.transData.transform(text.xy) for text in axes.texts]
    assert not any(box.contains(*point) for box in labels for point in points)
    key = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert first != "1" or key[-1].endswith(LONG)


def test_throughputs_that_differ_tenfold_get_a_logarithmic_axis() -> None:
    axes = tradeoff(settings([0, 1, 2, 4, 8, 16], ["grpo"], ratio=2.0)).axes[0]
    assert axes.get_xscale() == "log"
    shown = [axes.xaxis.get_major_formatter()(value) for value in (20.0, 500.0)]
    assert shown == ["20", "500"]
    assert tradeoff(settings([0, 1], ["grpo"])).axes[0].get_xscale() == "linear"


@pytest.mark.parametrize("values", [["0", "1", "2", "4"], [f"async-reward-function-{n}" for n in range(9)]])
def test_tick_labels_of_small_panels_do_not_overlap(values: list[str]) -> None:
    found = group_by_setting([figures(0, values={"preset": value}, tokens_per_s=100.0) for value in values])
    figure = plots._draw_metrics(found, plots.assign_styles(found))
    assert figure is not None
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert not any(a.overlaps(b) for a, b in combinations(boxes(axes.get_xticklabels()), 2))


def test_legends_and_titles_cover_no_reward_curve() -> None:
    figure = plots._draw_rewards(MANY, plots.assign_styles(MANY), over_seconds=False)
    assert figure is not None
    figure.draw_without_rendering()
    shown = [axes for axes in figure.axes if axes.axison]
    (legend,) = figure.legends
    titles = [axes.title if axes.title.get_text() else axes._left_title for axes in shown]
    taken = [legend.get_window_extent(), *(title.get_window_extent() for title in titles)]
    assert not any(box.overlaps(axes.get_window_extent()) for box in taken for axes in shown)
    assert not any(a.overlaps(b) for a, b in combinations(taken, 2))
    looks = [line.get_linestyle() for line in shown[0].lines[:4]]
    assert len(set(looks)) == 4, "settings differ without colour"


def test_several_lines_in_a_panel_have_different_colours() -> None:
    found = settings([0, 2, 8], ["grpo", "dapo", "areal"])
    figure = plots._draw_metrics(found, plots.assign_styles(found))
    assert figure is not None
    lines = figure.axes[0].get_lines()
    assert len(lines) == 3 and len({str(line.get_color()) for line in lines}) == 3

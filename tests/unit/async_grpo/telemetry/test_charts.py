"""The table of charts: its keys exist, its curves can be told apart, and every display can draw them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import async_grpo.lab.view
from async_grpo.app.report.summary import summarize
from async_grpo.config import RunConfig
from async_grpo.lab.sweep.plots import _PANELS
from async_grpo.lab.sweep.results import PointMetrics
from async_grpo.telemetry import charts
from async_grpo.telemetry.charts import METRIC_CHARTS, STEP_TIME, Chart, Kind
from async_grpo.telemetry.metrics import METRICS
from async_grpo.telemetry.rows import seconds_by_part
from async_grpo.wire.board import Evaluation

CHARTS = {name: value for name, value in vars(charts).items() if isinstance(value, Chart)}


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
def test_every_curve_is_a_value_that_a_run_has(chart: Chart) -> None:
    config = RunConfig.model_validate({"name": "run", "model": {"random": {}}})
    limits = {key for key, value in summarize(config, [], [], [], {}, {}, 0.0).items() if isinstance(value, int)}
    known = {metric.key for metric in METRICS} | set(METRIC_CHARTS) | set(Evaluation.__struct_fields__) | limits
    keys = {series.key if series.key in known else series.key.partition(".")[0] for series in chart.series}
    keys |= {series.error for series in chart.series if series.error} | ({chart.family} if chart.family else set())
    assert keys and keys <= known | {"other"}


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
def test_the_curves_of_a_chart_differ_with_and_without_colour(chart: Chart) -> None:
    assert len({series.label for series in chart.series}) == len(chart.series)
    assert len({series.color for series in chart.series}) == len(chart.series)
    if chart.kind is Kind.LINES:
        assert len({series.dash for series in chart.series}) == len(chart.series)


def test_the_parts_of_a_step_have_an_area_each() -> None:
    assert [series.label for series in STEP_TIME.series] == list(seconds_by_part({}))


def test_the_page_has_a_colour_for_every_line() -> None:
    script = (Path(async_grpo.lab.view.__file__).parent / "static" / "charts.js").read_text()
    kinds = re.search(r"const KINDS = \{(.+)\};", script)
    assert kinds
    colors = {
        series.color.name.lower() for chart in CHARTS.values() if chart.kind is Kind.LINES for series in chart.series
    }
    assert colors <= set(re.findall(r"(\w+):", kinds[1]))


def test_the_panels_of_a_sweep_are_figures_of_its_runs() -> None:
    assert set(_PANELS) <= set(PointMetrics.__struct_fields__)

"""Published measurements of other systems, predicted from a few of their own figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.published.published import Cell, Study, fit_baseline
from benchmarks.published.studies import applied_compute, areal_table, marin_sync_bound, one_step_off


def test_errors_are_relative_or_absolute() -> None:
    cell = Cell("there", "s", 200.0, 150.0, baseline=210.0)
    assert (cell.error, cell.baseline_error, cell.is_hit) == (-0.25, pytest.approx(0.05), False)
    assert Cell("there", "steps", 2.0, 2.3, tolerance=0.4, absolute=True).is_hit


def test_the_baseline_is_fitted_in_one_over_s_plus_one() -> None:
    line = fit_baseline([(0, 30.0), (1, 20.0), (4, 14.0)])  # 10 + 20 / (S + 1)
    assert [line(staleness) for staleness in (0, 3, 9)] == pytest.approx([30, 15, 12])


@pytest.mark.slow
@pytest.mark.parametrize("predict_study", [areal_table, one_step_off, applied_compute, marin_sync_bound])
def test_predictions_are_within_their_limits(predict_study: Callable[[], Study]) -> None:
    study = predict_study()
    assert [cell.where for cell in study.cells if not cell.is_hit] == []
    assert any(not cell.calibrates for cell in study.cells)
    assert study.assumptions and study.source

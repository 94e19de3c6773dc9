"""Ranges of predictions, the simple baseline, and timings from a file and a run together."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.lab.simulate.calibrate import calibrate
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.recorded import RecordedRun, read_recorded
from async_grpo.lab.simulate.results import summarize_run
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings
from async_grpo.lab.simulate.uncertainty import (
    describe_uncertainty,
    predict_by_baseline,
    uncertainty_of_estimate,
    uncertainty_of_runs,
)
from tests.support.recorded_runs import recorded_run, settings_of

TRUE = Timings(
    prompt_tokens=20,
    lengths=LengthModel(kind="lognormal", mean=60, sigma=0.7, cap=200),
    engine=EngineTimings(step_s=0.004, request_s=0.0002, prefill_s=0.0015, call_s=0.003),
    trainer=TrainerTimings(base_s=0.2, token_s=5e-5, take_s=0.004),
    sync=SyncTimings(stall_s=0.02, transfer_s=0.03, load_s=0.05),
    engine_beside=1.4,
    trainer_beside=1.4,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return recorded_run(tmp_path_factory.mktemp("runs"), 2, TRUE)


@pytest.fixture(scope="module")
def fitted(run: RecordedRun) -> Timings:
    return calibrate([run]).timings


def test_the_range_after_a_single_run_includes_the_true_speed(
    run: RecordedRun, fitted: Timings, tmp_path: Path
) -> None:
    settings, _ = settings_of(tmp_path, 0)
    true, predicted = (summarize_run(simulate(settings, timings)).tokens_per_s for timings in (TRUE, fitted))
    assert predicted < 0.95 * true  # alone, the sides are faster than next to each other
    uncertainty = uncertainty_of_runs([run], fitted)
    span = uncertainty.predict_range(settings, fitted, seed=1)
    assert span.low < true < span.high
    assert "poorly determined" in describe_uncertainty([span], uncertainty)


def test_the_recorded_run_itself_is_well_determined(run: RecordedRun, fitted: Timings, tmp_path: Path) -> None:
    settings, _ = settings_of(tmp_path, 2)
    uncertainty = uncertainty_of_runs([run], fitted)
    span = uncertainty.predict_range(settings, fitted, seed=1)
    assert span.half_width < 0.1
    assert "well determined" in describe_uncertainty([span], uncertainty)


def test_an_estimate_has_a_range_on_both_sides(tmp_path: Path) -> None:
    settings, _ = settings_of(tmp_path, 2)
    alone = summarize_run(simulate(settings, TRUE)).tokens_per_s
    span = uncertainty_of_estimate(TRUE).predict_range(settings, TRUE, seed=1)
    assert span.low < 0.9 * alone and span.high > 1.02 * alone


def test_the_baseline_interpolates_two_measured_bounds_and_needs_two(run: RecordedRun, tmp_path: Path) -> None:
    serial = recorded_run(tmp_path, 0, TRUE)
    # 1 / 500 = a + b and 1 / 1000 = a + b / 3, so that at S = 1: a + b / 2
    assert predict_by_baseline([serial, run], [500.0, 1000.0], 1) == pytest.approx(800.0)
    assert predict_by_baseline([run], [1000.0], 1) is None


def test_a_file_replaces_some_timings_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "timings.yaml"
    file.write_text("trainer: {base_s: 9}\nlengths: {kind: constant, mean: 10}\n")
    mixed = Timings.read(file, base=TRUE)
    assert (mixed.trainer.base_s, mixed.trainer.token_s) == (9, TRUE.trainer.token_s)
    assert (mixed.lengths, mixed.engine) == (LengthModel(mean=10), TRUE.engine)


def test_a_run_of_three_steps_is_enough_to_calibrate_from(tmp_path: Path) -> None:
    short = recorded_run(tmp_path, 1, TRUE, steps=3)
    assert read_recorded(short.path).steps == short.steps
    assert calibrate([short]).timings.engine.step_s > 0

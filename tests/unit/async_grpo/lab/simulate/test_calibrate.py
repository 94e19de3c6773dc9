"""Calibration: the timings of a simulated run are recovered from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import DataError
from async_grpo.lab.simulate.calibrate import calibrate, fit_task_source, fit_verifier, measure_run
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.prediction import compare_with_runs
from async_grpo.lab.simulate.recorded import RecordedRun, read_recorded
from async_grpo.lab.simulate.results import summarize_run
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings, VerifierTimings
from async_grpo.lab.simulate.whatif import simulate_changes
from tests.support.recorded_runs import recorded_run, settings_of

TRUE = Timings(
    prompt_tokens=20,
    lengths=LengthModel(kind="lognormal", mean=60, sigma=0.7, cap=200),
    engine=EngineTimings(step_s=0.004, request_s=0.0002, prefill_s=0.0015, call_s=0.003),
    trainer=TrainerTimings(base_s=0.2, token_s=5e-5, take_s=0.004),
    sync=SyncTimings(stall_s=0.02, transfer_s=0.03, load_s=0.05),
    verifier=VerifierTimings(latency_s=0.02),
    engine_beside=1.4,
    trainer_beside=1.2,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedRun]:
    folder = tmp_path_factory.mktemp("runs")
    return [recorded_run(folder, max_staleness, TRUE) for max_staleness in (0, 2)]


@pytest.fixture(scope="module")
def fitted(recorded: list[RecordedRun]) -> Timings:
    return calibrate(recorded).timings


def test_repetitions_of_a_run_are_compared_as_one(fitted: Timings, tmp_path: Path) -> None:
    other = TRUE.model_copy(update={"trainer": TRUE.trainer.model_copy(update={"base_s": 0.15})})
    runs = [recorded_run(tmp_path / name, 1, timings) for name, timings in (("a", TRUE), ("b", other))]
    (comparison,) = compare_with_runs(runs, fitted)
    assert comparison.runs == runs
    assert comparison.label == "run-1 x 2, S = 1"
    assert len(comparison.tokens_per_s) == len(comparison.age_mean) == 2
    measured = sum(comparison.tokens_per_s) / 2
    assert comparison.speed_error == pytest.approx(comparison.simulated.tokens_per_s / measured - 1)
    assert comparison.speed_error < 0 < 0.1 + comparison.speed_error
    assert abs(comparison.age_error) < 0.2


def test_two_runs_determine_every_speed(fitted: Timings) -> None:
    assert fitted.prompt_tokens == pytest.approx(20, abs=0.1)
    assert fitted.engine.step_s == pytest.approx(TRUE.engine.step_s, rel=0.1)
    assert fitted.engine.request_s == pytest.approx(TRUE.engine.request_s, rel=0.1)
    assert fitted.engine.prefill_s == pytest.approx(TRUE.engine.prefill_s, rel=0.3)
    assert fitted.engine_beside == pytest.approx(1.4, abs=0.1)
    assert fitted.trainer_beside == pytest.approx(1.2, abs=0.05)
    assert fitted.trainer.token_s == pytest.approx(5e-5, rel=0.1)
    assert fitted.trainer.base_s == pytest.approx(0.2, rel=0.15)
    assert (fitted.sync.stall_s, fitted.sync.transfer_s, fitted.sync.load_s) == pytest.approx((0.02, 0.03, 0.05))
    assert fitted.engine.call_s == pytest.approx(0.003)


def test_fitted_timings_predict_other_staleness_bounds(fitted: Timings, tmp_path: Path) -> None:
    for max_staleness in (1, 4):
        settings, _ = settings_of(tmp_path, max_staleness)
        true, predicted = (summarize_run(simulate(settings, timings)) for timings in (TRUE, fitted))
        assert predicted.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.04)
        assert predicted.age_mean == pytest.approx(true.age_mean, abs=0.15)


def test_simulations_reproduce_the_calibrated_runs(recorded: list[RecordedRun], fitted: Timings) -> None:
    for run in recorded:
        simulated = summarize_run(simulate(SimulatedSettings.from_config(run.config), fitted)).tokens_per_s
        assert simulated == pytest.approx(measure_run(run).tokens_per_s, rel=0.04)


def test_evaluations_and_the_steps_between_them_take_their_recorded_time(tmp_path: Path) -> None:
    short_evaluations = TRUE.model_copy(update={"evaluation_factor": 0.4, "engine_beside": 1.0, "trainer_beside": 1.0})
    run = recorded_run(tmp_path, 2, short_evaluations, eval={"every_steps": 8, "prompts": 60})
    recorded = run.servers[0].evaluations
    simulated = simulate(SimulatedSettings.from_config(run.config), calibrate([run]).timings)
    assert mean_length(simulated.evaluations) == pytest.approx(mean_length(recorded), rel=0.03)
    recorded_steps = [(row["time_s"] - row["step_s"], row["time_s"], row["trained_tokens"]) for row in run.steps]
    simulated_steps = [(row.ended_s - row.step_s, row.ended_s, row.tokens) for row in simulated.steps]
    assert speed_between(simulated.evaluations, simulated_steps) == pytest.approx(
        speed_between(recorded, recorded_steps), rel=0.05
    )


def mean_length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans) / len(spans)


def speed_between(evaluations: Sequence[tuple[float, float]], steps: Sequence[tuple[float, float, float]]) -> float:
    """Tokens per second of the steps during which nothing was evaluated."""
    alone = [
        (end - start, tokens)
        for start, end, tokens in steps[5:-2]
        if not any(since < end and start < until for since, until in evaluations)
    ]
    return sum(tokens for _, tokens in alone) / sum(seconds for seconds, _ in alone)


def test_one_run_leaves_open_how_much_the_sides_slow_each_other(recorded: list[RecordedRun]) -> None:
    alone = calibrate(recorded[1:])
    assert (alone.timings.engine_beside, alone.timings.trainer_beside) == (1.0, 1.0)
    assert len([note for note in alone.notes if "a single run leaves that open" in note]) == 2


def test_a_folder_without_steps_is_refused(recorded: list[RecordedRun], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((recorded[0].path / "config.yaml").read_text())
    with pytest.raises(DataError, match="0 steps and 0 groups in its timeline"):
        read_recorded(tmp_path)


def test_slow_verifiers_and_task_sources_are_recovered(tmp_path: Path) -> None:
    judging = TRUE.model_copy(update={"verifier": VerifierTimings(sample_s=0.1, workers=4)})
    run = recorded_run(tmp_path / "verifiers", 2, judging, rewards={"workers": 4})
    assert fit_verifier([run], 0.0).sample_s == pytest.approx(0.1, rel=0.1)
    assert fit_task_source([run]) == 0
    run = recorded_run(tmp_path / "tasks", 2, TRUE.model_copy(update={"task_s": 0.3}))
    run.servers[0].starved = run.servers[0].ticket_waits
    assert fit_task_source([run]) == pytest.approx(0.3, rel=0.2)
    assert fit_verifier([run], 0.02) == TRUE.verifier


def test_a_slow_server_does_not_distort_the_fit_of_the_others(tmp_path: Path) -> None:
    slow = TRUE.model_copy(update={"slow_servers": [8.0], "engine_beside": 1.0, "trainer_beside": 1.0})
    run = recorded_run(tmp_path, 1, slow, rollout={"servers": 3, "max_concurrency": 32})
    timings = calibrate([run]).timings
    assert timings.slow_servers == pytest.approx([8.0], rel=0.3)
    assert timings.engine.step_s == pytest.approx(TRUE.engine.step_s, rel=0.3)


@pytest.mark.parametrize(
    ("hindrance", "label"),
    [
        ({"verifier": VerifierTimings(sample_s=0.1)}, "verifiers in half the time"),
        ({"task_s": 0.3}, "tasks in half the time"),
        ({"slow_servers": [8.0]}, "no server slower than the others"),
        ({"engine_contended": 0.6, "trainer_contended": 0.6}, "processors of their own"),
    ],
)
def test_the_best_change_removes_the_hindrance(hindrance: dict[str, Any], label: str, tmp_path: Path) -> None:
    settings, _ = settings_of(tmp_path, 1, rollout={"servers": 2, "max_concurrency": 32})
    assert simulate_changes(settings, TRUE.model_copy(update=hindrance))[0].label == label


def test_more_slots_than_one_are_at_least_two(tmp_path: Path) -> None:
    settings, _ = settings_of(tmp_path, 1, rollout={"max_concurrency": 1})
    speedups = {change.key: change.speedup for change in simulate_changes(settings, TRUE, steps=4)}
    assert speedups["rollout.max_concurrency=2"] > 1.5

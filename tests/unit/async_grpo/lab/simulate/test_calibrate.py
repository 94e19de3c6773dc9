"""Calibration: the timings of a simulated run are found again in what it leaves behind."""

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
def found(recorded: list[RecordedRun]) -> Timings:
    return calibrate(recorded).timings


def test_repetitions_of_a_run_that_was_not_fitted_to_are_compared_as_one(found: Timings, tmp_path: Path) -> None:
    other = TRUE.model_copy(update={"trainer": TRUE.trainer.model_copy(update={"base_s": 0.15})})
    runs = [recorded_run(tmp_path / name, 1, timings) for name, timings in (("a", TRUE), ("b", other))]
    (one,) = compare_with_runs(runs, found)
    assert one.runs == runs
    assert one.label == "run-1 x 2, S = 1"
    assert len(one.tokens_per_s) == len(one.age_mean) == 2
    assert one.speed_error == pytest.approx(one.simulated.tokens_per_s * 2 / sum(one.tokens_per_s) - 1)
    assert one.speed_error < 0 < 0.1 + one.speed_error
    assert abs(one.age_error) < 0.2


def test_two_runs_tell_every_speed(found: Timings) -> None:
    assert found.prompt_tokens == pytest.approx(20, abs=0.1)
    assert found.engine.step_s == pytest.approx(TRUE.engine.step_s, rel=0.1)
    assert found.engine.request_s == pytest.approx(TRUE.engine.request_s, rel=0.1)
    assert found.engine.prefill_s == pytest.approx(TRUE.engine.prefill_s, rel=0.3)
    assert found.engine_beside == pytest.approx(1.4, abs=0.1)
    assert found.trainer_beside == pytest.approx(1.2, abs=0.05)
    assert found.trainer.token_s == pytest.approx(5e-5, rel=0.1)
    assert found.trainer.base_s == pytest.approx(0.2, rel=0.15)
    assert (found.sync.stall_s, found.sync.transfer_s, found.sync.load_s) == pytest.approx((0.02, 0.03, 0.05))
    assert found.engine.call_s == pytest.approx(0.003)


def test_it_predicts_the_staleness_bounds_that_it_has_not_seen(found: Timings, tmp_path: Path) -> None:
    for max_staleness in (1, 4):
        settings, _ = settings_of(tmp_path, max_staleness)
        true, predicted = (summarize_run(simulate(settings, timings)) for timings in (TRUE, found))
        assert predicted.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.04)
        assert predicted.age_mean == pytest.approx(true.age_mean, abs=0.15)


def test_what_it_was_calibrated_on_is_simulated_again(recorded: list[RecordedRun], found: Timings) -> None:
    for run in recorded:
        simulated = summarize_run(simulate(SimulatedSettings.from_config(run.config), found)).tokens_per_s
        assert simulated == pytest.approx(measure_run(run).tokens_per_s, rel=0.04)


def test_evaluations_and_the_steps_between_them_each_take_their_recorded_time(tmp_path: Path) -> None:
    brief = TRUE.model_copy(update={"evaluation_factor": 0.4, "engine_beside": 1.0, "trainer_beside": 1.0})
    run = recorded_run(tmp_path, 2, brief, eval={"every_steps": 8, "prompts": 60})
    recorded = run.servers[0].evaluations
    simulated = simulate(SimulatedSettings.from_config(run.config), calibrate([run]).timings)
    assert mean_length(simulated.evaluations) == pytest.approx(mean_length(recorded), rel=0.03)
    made = [(row["time_s"] - row["step_s"], row["time_s"], row["trained_tokens"]) for row in run.steps]
    again = [(row.ended_s - row.step_s, row.ended_s, row.tokens) for row in simulated.steps]
    assert speed_between(simulated.evaluations, again) == pytest.approx(speed_between(recorded, made), rel=0.05)


def mean_length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans) / len(spans)


def speed_between(evaluations: Sequence[tuple[float, float]], steps: Sequence[tuple[float, float, float]]) -> float:
    """Tokens a second of the steps during which nothing was evaluated."""
    alone = [
        (end - start, tokens)
        for start, end, tokens in steps[5:-2]
        if not any(since < end and start < until for since, until in evaluations)
    ]
    return sum(tokens for _, tokens in alone) / sum(seconds for seconds, _ in alone)


def test_one_run_does_not_tell_how_much_the_sides_slow_each_other(recorded: list[RecordedRun]) -> None:
    alone = calibrate(recorded[1:])
    assert (alone.timings.engine_beside, alone.timings.trainer_beside) == (1.0, 1.0)
    assert len([note for note in alone.notes if "a single run leaves that open" in note]) == 2


def test_a_folder_with_too_little_is_refused(recorded: list[RecordedRun], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((recorded[0].path / "config.yaml").read_text())
    with pytest.raises(DataError, match="0 steps and 0 groups in its timeline"):
        read_recorded(tmp_path)


def test_what_holds_a_run_up_is_found_again(tmp_path: Path) -> None:
    judging = TRUE.model_copy(update={"verifier": VerifierTimings(sample_s=0.1, workers=4)})
    run = recorded_run(tmp_path / "verifiers", 2, judging, rewards={"workers": 4})
    assert fit_verifier([run], 0.0).sample_s == pytest.approx(0.1, rel=0.1)
    assert fit_task_source([run]) == 0
    run = recorded_run(tmp_path / "tasks", 2, TRUE.model_copy(update={"task_s": 0.3}))
    run.servers[0].starved = run.servers[0].ticket_waits
    assert fit_task_source([run]) == pytest.approx(0.3, rel=0.2)
    assert fit_verifier([run], 0.02) == TRUE.verifier


def test_the_time_of_a_slow_server_does_not_count_as_that_of_the_others(tmp_path: Path) -> None:
    slow = TRUE.model_copy(update={"slow_servers": [8.0], "engine_beside": 1.0, "trainer_beside": 1.0})
    run = recorded_run(tmp_path, 1, slow, rollout={"servers": 3, "max_concurrency": 32})
    found = calibrate([run]).timings
    assert found.slow_servers == pytest.approx([8.0], rel=0.3)
    assert found.engine.step_s == pytest.approx(TRUE.engine.step_s, rel=0.3)


@pytest.mark.parametrize(
    ("hindrance", "label"),
    [
        ({"verifier": VerifierTimings(sample_s=0.1)}, "verifiers in half the time"),
        ({"task_s": 0.3}, "tasks in half the time"),
        ({"slow_servers": [8.0]}, "no server slower than the others"),
        ({"engine_contended": 0.6, "trainer_contended": 0.6}, "processors of their own"),
    ],
)
def test_the_change_that_gives_most_undoes_what_holds_a_run_up(
    hindrance: dict[str, Any], label: str, tmp_path: Path
) -> None:
    settings, _ = settings_of(tmp_path, 1, rollout={"servers": 2, "max_concurrency": 32})
    assert simulate_changes(settings, TRUE.model_copy(update=hindrance))[0].label == label


def test_one_slot_becomes_two(tmp_path: Path) -> None:
    settings, _ = settings_of(tmp_path, 1, rollout={"max_concurrency": 1})
    found = {change.key: change.speedup for change in simulate_changes(settings, TRUE, steps=4)}
    assert found["rollout.max_concurrency=2"] > 1.5

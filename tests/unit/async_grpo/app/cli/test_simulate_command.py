"""`async-grpo simulate`: timings from a file, a device or a run; tables, a plot and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.lab.simulate.timings import Timings
from tests.support.recorded_runs import recorded_run

TIMINGS = """\
lengths: {kind: lognormal, mean: 20, sigma: 0.8}
engine: {step_s: 0.01}
trainer: {base_s: 0.5}
"""
RUNNER = CliRunner(env={"COLUMNS": "120"})
QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture
def timings(tmp_path: Path) -> str:
    path = tmp_path / "timings.yaml"
    path.write_text(TIMINGS)
    return str(path)


def test_a_grid_is_one_row_a_point_with_a_plot_and_all_figures_as_json(timings: str, tmp_path: Path) -> None:
    grid = ["--grid", "max_staleness=0,2", "--steps", "12", "--json", str(tmp_path / "out.json")]
    answer = RUNNER.invoke(app, ["simulate", QUICKSTART, "--timings", timings, *grid, "--plots", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    points = json.loads((tmp_path / "out.json").read_text())["points"]
    assert [point["point"] for point in points] == ["max_staleness=0", "max_staleness=2"]
    assert points[1]["tokens_per_s"] > points[0]["tokens_per_s"]
    assert (points[0]["age_max"], points[1]["age_max"] <= 2) == (0, True)
    assert (tmp_path / "simulation.png").stat().st_size > 5000


def test_no_column_is_cut_in_a_terminal_of_80_columns(timings: str) -> None:
    grid = ["--grid", "rollout.servers=1,2", "--steps", "8"]
    answer = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["simulate", QUICKSTART, "--timings", timings, *grid])
    assert all(word in answer.output for word in ("tokens/s", "trainer", "servers", "age (max)", "wasted"))


def test_without_a_grid_it_says_what_one_change_would_give(timings: str) -> None:
    answer = RUNNER.invoke(app, ["simulate", QUICKSTART, "--timings", timings, "--steps", "12"])
    assert "effect of single changes" in answer.output
    assert "rollout.servers=2" in answer.output
    assert "bottleneck" in answer.output


def test_a_run_that_is_checked_stands_beside_its_simulation(timings: str, tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 1, Timings.read(Path(timings)))
    options = ["--timings", timings, "--check", str(run.path), "--steps", "12", "--json", str(tmp_path / "out.json")]
    answer = RUNNER.invoke(app, ["simulate", QUICKSTART, *options])
    assert answer.exit_code == 0, answer.output
    assert "simulated and measured" in answer.output
    assert "run-1, S = 1" in answer.output
    (check,) = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert check["simulated"]["tokens_per_s"] == pytest.approx(check["tokens_per_s"][0], rel=0.05)


def test_a_device_gives_an_estimate_that_states_its_assumptions() -> None:
    config = "configs/qwen2.5_7b_gsm8k_ascend.yaml"
    answer = RUNNER.invoke(app, ["simulate", config, "--device", "910b", "--steps", "8"])
    assert answer.exit_code == 0, answer.output
    assert "estimated: 910b, 320 TFLOPS and 1.6 TB/s" in answer.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "a simulation needs timings from one place"),
        (["--device", "abacus"], "--device 'abacus' is unknown"),
        (["--device", "h100"], "model.architecture"),
        (["--timings", "nowhere.yaml"], "cannot read timings from nowhere.yaml"),
        (["--from", "nowhere"], "nowhere is not the folder of a run"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_simulated(options: list[str], said: str) -> None:
    answer = RUNNER.invoke(app, ["simulate", QUICKSTART, *options])
    assert answer.exit_code == 1
    assert said in " ".join(answer.output.split())

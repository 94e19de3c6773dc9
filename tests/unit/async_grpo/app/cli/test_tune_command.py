"""`async-grpo tune`: options in, a table, a plot, JSON and a configuration that loads out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.config import load

TIMINGS = """\
lengths: {kind: constant, mean: 20}
engine: {step_s: 0.01, request_s: 0.0001}
trainer: {base_s: 0.5}
"""
RUNNER = CliRunner(env={"COLUMNS": "120"})
QUICKSTART = "configs/quickstart.yaml"
SMALL = ["-o", "group_size=2", "--fix", "buffer.selector", "--vary", "max_staleness=0,2"]


@pytest.fixture
def timings(tmp_path: Path) -> list[str]:
    path = tmp_path / "timings.yaml"
    path.write_text(TIMINGS)
    return ["--timings", str(path), "--out", str(tmp_path / "out")]


def test_it_writes_a_configuration_with_a_reason_for_every_change(timings: list[str], tmp_path: Path) -> None:
    answer = RUNNER.invoke(app, ["tune", QUICKSTART, *timings, *SMALL, "-o", "rollout.max_concurrency=8"])
    assert answer.exit_code == 0, answer.output
    assert "by simulation alone" in answer.output
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    file = tmp_path / "out" / "recommended.yaml"
    tuned = load(file)
    assert tuned.name == "quickstart-tuned" and tuned.group_size == 2
    assert str(tuned.rollout.max_concurrency) == found["recommended"]["rollout.max_concurrency"] == "16"
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("  max_concurrency")]
    assert line.startswith("  max_concurrency: 16  # simulated ") and "max_concurrency=8 as before" in line
    assert (tmp_path / "out" / "plots" / "pareto.png").stat().st_size > 5000


def test_a_bound_on_the_age_is_kept_and_all_figures_are_there_as_json(timings: list[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    answer = RUNNER.invoke(app, ["tune", QUICKSTART, *timings, *SMALL, "--max-age", "0.1", "--json", str(file)])
    assert answer.exit_code == 0, answer.output
    found = json.loads(file.read_text())
    assert found["chosen"]["max_staleness"] == "0" and "under mean age <= 0.1" in found["verdict"]
    assert len(found["points"]) == 12 and found["goal"]["name"] == "throughput"


def test_the_present_configuration_is_simulated_as_simulate_does(timings: list[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    given = [QUICKSTART, *timings[:2], "-o", "group_size=2", "-o", "steps=50", "--json", str(file)]
    answer = RUNNER.invoke(app, ["simulate", *given])
    assert answer.exit_code == 0, answer.output
    (alone,) = json.loads(file.read_text())["points"]
    options = ["--vary", "max_staleness=2,4", "--fix", "buffer.selector", "--fix", "rollout.max_concurrency"]
    answer = RUNNER.invoke(app, ["tune", *given, *timings[2:], *options])
    assert answer.exit_code == 0, answer.output
    present = json.loads(file.read_text())["points"][0]
    assert present["tokens_per_s"] == alone["tokens_per_s"]
    assert present["age_mean"] == alone["age_mean"]


def test_every_point_is_judged_by_the_same_evaluations(timings: list[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    slow = ["-o", "group_size=2", "-o", "steps=100"]
    grid = ["--grid", "max_staleness=8,16", "--json", str(file)]
    answer = RUNNER.invoke(app, ["simulate", QUICKSTART, *timings[:2], *slow, *grid])
    assert answer.exit_code == 0, answer.output
    less, more = json.loads(file.read_text())["points"]
    assert less["steps"] == more["steps"] == 100
    assert more["tokens_per_s"] >= 0.99 * less["tokens_per_s"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min-ess", "0.9"], "--ess-decay"),
        (["--goal", "reward", "--learning", "nowhere"], "--age-cost"),
        (["--vary", "seed=1,2"], "Give one seed with --seed N"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_simulated(
    options: list[str], said: str, timings: list[str], tmp_path: Path
) -> None:
    answer = RUNNER.invoke(app, ["tune", QUICKSTART, *timings, *options])
    assert answer.exit_code == 1 and said in " ".join(answer.output.split())
    assert not (tmp_path / "out").exists()

"""`async-grpo why`: of a finished run, a live one, and of folders that say too little."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.lab.simulate.timings import EngineTimings, Timings, TrainerTimings
from async_grpo.telemetry.jsonl import read_rows
from tests.support.recorded_runs import recorded_run

RUNNER = CliRunner(env={"COLUMNS": "160"})
SLOW_TRAINER = Timings(engine=EngineTimings(step_s=0.001), trainer=TrainerTimings(base_s=3.0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded_run(tmp_path, 1, SLOW_TRAINER).path


def test_a_finished_run_is_explained_in_words_and_as_json(run: Path, tmp_path: Path) -> None:
    answer = RUNNER.invoke(app, ["why", str(run), "--json", str(tmp_path / "why.json")])
    assert answer.exit_code == 0, answer.output
    assert "Bottleneck: computing" in answer.output
    assert "Critical path of a step" in answer.output
    assert "groups_per_step=4" in answer.output
    found = json.loads((tmp_path / "why.json").read_text())
    assert (found["cause"], found["steps"]) == ("computing", 39)
    assert found["shares"]["computing"] == pytest.approx(found["share"], abs=1e-9)
    assert [server["name"] for server in found["servers"]] == ["rollout-0"]
    assert found["critical_path"][-1]["link"] in ("computing", "publishing")
    assert found["changes"][0]["label"] == "a trainer twice as fast"


def test_only_the_last_steps_and_no_simulation(run: Path) -> None:
    answer = RUNNER.invoke(app, ["why", str(run), "--last", "5", "--no-changes"])
    assert answer.exit_code == 0, answer.output
    assert answer.output.startswith("5 steps took 16 s")
    assert "effect of single changes" not in answer.output


def test_a_live_run_is_explained_after_every_step_until_it_is_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]))  # it has only begun
    states = iter([lines[:10], lines[:10], lines[:11], lines])

    def pass_time(seconds: float) -> None:
        metrics.write_text("".join(next(states)))
        if len(list(read_rows(metrics))) == len(lines):
            held.close()

    monkeypatch.setattr("async_grpo.app.cli.why.time.sleep", pass_time)
    held = ExitStack()
    held.enter_context(RunFolder(run).locked())
    answer = RUNNER.invoke(app, ["why", str(run), "--follow", "--no-changes"])
    assert answer.exit_code == 0, answer.output
    assert answer.output.count("after step 10 of 40") == 1
    assert answer.output.count("after step 11 of 40") == 1
    assert "the run is over" in answer.output
    assert "39 steps took" in answer.output.rpartition("the run is over")[2]


def _without_timelines(run: Path) -> None:
    shutil.rmtree(run / "timeline")


def _begun(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


def _empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_timelines, "40 steps and 0 groups in its timeline"),
        (_begun, "0 steps and 320 groups"),
        (_empty, "is not the folder of a run"),
        (shutil.rmtree, "is not the folder of a run"),
    ],
)
def test_a_folder_that_says_too_little_is_an_error(run: Path, change: Callable[[Path], None], said: str) -> None:
    change(run)
    answer = RUNNER.invoke(app, ["why", str(run)])
    assert answer.exit_code != 0
    assert said in answer.output.replace("\n", " ")

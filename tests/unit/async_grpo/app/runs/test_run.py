"""A run folder, read: state, steps, evaluations and figures, also of torn and old files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from async_grpo.app.launch.run_folder import RunFolder, RunState
from async_grpo.app.runs.format import list_facts
from async_grpo.app.runs.run import Run, RunStatus, list_runs
from async_grpo.config import dump, validate
from async_grpo.errors import ConfigError
from async_grpo.telemetry.jsonl import read_rows

SETTINGS = {"name": "small", "steps": 3, "data": {"kind": "arithmetic"}, "model": {"random": {}}}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "runs" / "small"
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.config_file.write_text(dump(validate(SETTINGS, "test")))
    return folder


def write_rows(path: Path, *rows: dict[str, object] | str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def test_a_row_of_the_list_reads_the_metrics_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(folder.path / "metrics.jsonl", {"kind": "step", "step": 1, "time_s": 1.0})
    read: list[str] = []

    def count_reads(path: Path) -> list[dict[str, object]]:
        read.append(path.name)
        return read_rows(path)

    monkeypatch.setattr("async_grpo.app.runs.run.read_rows", count_reads)
    assert list_facts(Run(folder.path))["steps"] == 1
    assert read.count("metrics.jsonl") == 1


def test_a_run_is_live_while_a_process_holds_its_lock(folder: RunFolder) -> None:
    run = Run.open(folder.path)
    assert run.status() is RunStatus.INTERRUPTED
    with folder.locked():
        assert run.status() is RunStatus.LIVE
    assert run.status() is RunStatus.INTERRUPTED


def test_a_run_is_live_while_a_separately_started_role_runs(folder: RunFolder) -> None:
    (folder.path / "roles").mkdir()
    role = os.fork()
    if role == 0:
        folder.lock_role("trainer-0")
        os.execvp("sleep", ["sleep", "60"])
    try:
        for _ in range(1000):
            if Run(folder.path).status() is RunStatus.LIVE:
                break
        assert Run(folder.path).status() is RunStatus.LIVE
    finally:
        os.kill(role, 9)
        os.waitpid(role, 0)
    assert Run(folder.path).status() is RunStatus.INTERRUPTED


def test_reading_the_status_does_not_block_a_start(folder: RunFolder) -> None:
    for _ in range(20):
        Run(folder.path).status()
        with folder.locked():
            pass


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (RunState(finished_steps=3), RunStatus.FINISHED),
        (RunState(finished_steps=2), RunStatus.INTERRUPTED),  # its steps were raised since
        (RunState(failure="RoleFailed: out of memory"), RunStatus.FAILED),
        (RunState(), RunStatus.INTERRUPTED),
    ],
)
def test_run_json_says_how_a_run_ended(folder: RunFolder, state: RunState, status: RunStatus) -> None:
    folder.write_state(state)
    assert Run(folder.path).status() is status
    assert Run(folder.path).reason == state.failure


def test_steps_that_were_repeated_count_once_and_torn_rows_not_at_all(folder: RunFolder) -> None:
    write_rows(
        folder.path / "metrics.jsonl",
        {"kind": "step", "step": 1, "loss": 1.0},
        {"kind": "step", "step": 2, "loss": 2.0},
        {"kind": "step", "step": 2, "loss": 3.0},
        {"kind": "warning", "message": "slow"},
        '{"kind": "step", "st',
    )
    run = Run(folder.path)
    assert [(row["step"], row["loss"]) for row in run.steps()] == [(1, 1.0), (2, 3.0)]
    assert [row["message"] for row in run.warnings()] == ["slow"]
    assert run.summary()["steps"] == 2


def test_evaluations_come_from_the_servers_files_before_the_summary_is_written(folder: RunFolder) -> None:
    facts = {"prompts": 8, "samples": 1, "wall_s": 1.0}
    write_rows(folder.path / "evaluations" / "b.jsonl", {"version": 2, "sampled_accuracy": 0.75, **facts})
    write_rows(folder.path / "evaluations" / "a.jsonl", {"version": 0, "sampled_accuracy": 0.5, **facts})
    run = Run(folder.path)
    assert [row["version"] for row in run.evaluations()] == [0, 2]
    assert (run.summary()["accuracy_before"], run.summary()["accuracy_after"]) == (0.5, 0.75)
    (folder.path / "summary.json").write_text(json.dumps({"evaluations": [{"version": 3, "sampled_accuracy": 1.0}]}))
    assert [row["version"] for row in run.evaluations()] == [0, 2, 3]


def test_a_configuration_of_another_release_still_opens(folder: RunFolder) -> None:
    folder.config_file.write_text("name: old\nsteps: 3\nno_longer_a_key: 1\n")
    run = Run.open(folder.path)
    assert run.name == "old"
    assert run.summary() == {"name": "old", "steps": 0, "wall_s": 0.0}
    folder.config_file.write_text("{")
    assert run.settings() == {}
    assert run.name == "small"


def test_runs_of_sweeps_are_found_and_the_latest_comes_first(folder: RunFolder, tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "sweeps" / "lr" / "a"
    sweep.mkdir(parents=True)
    (sweep / "config.yaml").write_text("name: a\n")
    os.utime(folder.config_file, (1, 1))
    assert [run.name for run in list_runs(tmp_path / "runs")] == ["a", "small"]
    assert [run.path for run in list_runs(sweep)] == [sweep]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        Run.open(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        list_runs(tmp_path / "nowhere")


def test_a_summary_from_before_an_extension_is_not_shown(folder: RunFolder) -> None:
    write_rows(folder.path / "metrics.jsonl", *({"kind": "step", "step": step} for step in (1, 2)))
    (folder.path / "summary.json").write_text(json.dumps({"steps": 2, "written": True}))
    assert Run(folder.path).summary()["written"]
    write_rows(folder.path / "metrics.jsonl", *({"kind": "step", "step": step} for step in (1, 2, 3)))
    assert Run(folder.path).summary()["steps"] == 3
    assert "written" not in Run(folder.path).summary()

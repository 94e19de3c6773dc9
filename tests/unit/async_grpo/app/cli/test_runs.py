"""`async-grpo runs`, as a user types it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.app.launch.run_folder import RunFolder, RunState
from async_grpo.config import dump, validate
from async_grpo.lab.sweep.results import summary_metrics


def type_in(*words: object) -> Result:
    return CliRunner().invoke(app, ["runs", *map(str, words)], env={"COLUMNS": "200"})


def make_run(root: Path, name: str, *, trained: int = 2, finished: int = 2, failure: str = "", **settings: Any) -> Path:
    """A run of 2 steps, of which `trained` are in its metrics, with a group of samples a step."""
    folder = RunFolder(root / name)
    (folder.path / "samples").mkdir(parents=True)
    basis = {"name": name, "steps": 2, "data": {"kind": "arithmetic"}, "model": {"random": {}}}
    folder.config_file.write_text(dump(validate(basis | settings, "test")))
    folder.write_state(RunState(finished_steps=finished, failure=failure, wall_s=10.0))
    rows = [{"kind": "step", "step": step, "reward_mean": step / 4, "time_s": step} for step in range(1, trained + 1)]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = [
        {
            "seq": seq,
            "prompt": f"{seq}+1=",
            "answer": str(seq + 1),
            "time_s": seq,
            "completions": [{"text": text, "reward": float(seq == 1)}] * 2,
        }
        for seq, text in enumerate(("\x1b[2Jgone", "<script>"))
    ]
    (folder.path / "samples" / "rollout-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in groups))
    return folder.path


def test_the_list_shows_every_run_with_its_state(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad", trained=1, finished=0, failure="RoleFailed: no memory")
    listed = json.loads(type_in("list", tmp_path, "--json").output)
    found = {row["name"]: (row["state"], row["steps"], row["of_steps"]) for row in listed}
    assert found == {"good": ("finished", 2, 2), "bad": ("failed", 1, 2)}
    assert "failed" in type_in("list", tmp_path).output
    assert "no run in" in type_in("list", tmp_path / "good" / "samples").output


def test_the_list_in_a_file_has_every_name_on_one_line(tmp_path: Path) -> None:
    sweep = tmp_path / ("sweep-over-" + "staleness-" * 15)
    runs = [make_run(sweep, f"quickstart-steps.2-max_staleness.{window}") for window in (0, 4)]
    shown = type_in("list", tmp_path).output
    assert all(str(run) in shown for run in runs)


def test_show_says_why_a_run_failed_and_what_to_do_next(tmp_path: Path) -> None:
    path = make_run(tmp_path, "bad", trained=1, finished=0, failure="RoleFailed: no memory")
    shown = type_in("show", path).output
    assert "RoleFailed: no memory" in shown
    assert f"async-grpo resume {path}" in shown
    assert json.loads(type_in("show", path, "--json").output)["figures"]["steps"] == 1


def test_compare_shows_the_settings_that_differ_and_the_ratio(tmp_path: Path) -> None:
    first, second = make_run(tmp_path, "a"), make_run(tmp_path, "b", trained=1, seed=5, max_staleness=1)
    found = json.loads(type_in("compare", first, second, "--json", "--plot", tmp_path / "c.png").output)
    assert found["settings"]["seed"] == [1, 5]
    assert found["settings"].keys() == {"seed", "max_staleness"}
    assert (found["figures"]["steps"], found["ratios"]["steps"]) == ([2, 1], 0.5)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "max_staleness" in type_in("compare", first, second).output
    assert "at least two runs" in type_in("compare", first).output


def test_samples_are_chosen_sorted_and_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a")
    (path / "trained.jsonl").write_text('{"step": 1, "groups": {"0": [0.0]}}\n')
    assert "group 1," in type_in("samples", path, "--best", "-n", 1).output
    worst = type_in("samples", path, "--worst", "-n", 1).output
    assert "(2 times) \\x1b[2Jgone" in worst
    assert "\x1b" not in worst
    assert "<script>" in type_in("samples", path, "--grep", "SCRIPT").output
    assert "group 1," not in type_in("samples", path, "--step", 1).output
    assert "group 0," in type_in("samples", path, "--seq", 0).output
    assert type_in("samples", path, "--seq", 7).exit_code == 1
    assert "not a regular expression" in type_in("samples", path, "--grep", "(").output


def test_samples_are_scored_again_with_another_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path, "a")
    (tmp_path / "fixed_reward.py").write_text("def score(completion, answer):\n    return float(answer == '1')\n")
    monkeypatch.chdir(tmp_path)
    shown = type_in("samples", path, "--rescore", "fixed_reward:score").output
    assert "0.00 -> 1.00" in shown
    assert "1.00 -> 0.00" in shown
    assert "rescored 4 completions: 4 have another reward, mean 0.500 -> 0.500" in shown
    refused = type_in("samples", path, "--rescore", "fixed_reward:nothing")
    assert refused.exit_code == 1


def test_samples_are_filtered_by_the_reward_of_a_completion(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run")  # group 0 has the reward 0, group 1 the reward 1
    assert "group 1," in (shown := type_in("samples", path, "--reward-min", 0.5).output) and "group 0," not in shown
    assert "group 0," in (shown := type_in("samples", path, "--reward-max", 0.5).output) and "group 1," not in shown
    assert type_in("samples", path, "--reward-min", 2).exit_code == 1


def test_the_report_of_a_killed_run_is_written_from_its_files(tmp_path: Path) -> None:
    path = make_run(tmp_path, "killed", finished=0)
    assert type_in("report", path).exit_code == 0
    assert json.loads((path / "summary.json").read_text())["steps"] == 2
    account = {"groups": {"admitted": 32, "trained": 32}, "balanced": True}
    written = json.loads((path / "summary.json").read_text()) | account
    (path / "summary.json").write_text(json.dumps(written))
    assert type_in("report", path).exit_code == 0
    assert "32 admitted = 32 trained" in (path / "report.md").read_text()


def test_a_report_written_again_keeps_that_the_groups_do_not_balance(tmp_path: Path) -> None:
    path = make_run(tmp_path, "unbalanced")
    type_in("report", path)
    account = {"groups": {"admitted": 32, "trained": 31}, "balanced": False}
    written = json.loads((path / "summary.json").read_text()) | account
    (path / "summary.json").write_text(json.dumps(written))
    assert type_in("report", path).exit_code == 0
    summary = json.loads((path / "summary.json").read_text())
    assert summary["balanced"] is False
    assert summary_metrics(summary)["balanced"] is False, "a sweep recommends no such setting"


def test_clean_lists_and_deletes_only_with_yes_and_never_a_live_run(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "old"), make_run(tmp_path, "new", trained=1, finished=0)
    for file in (*old.glob("*.*"), old):
        os.utime(file, (1, 1))
    assert "would delete all runs" in type_in("clean", tmp_path).output
    assert f"{old} " in type_in("clean", tmp_path, "--keep-last", 1).output
    assert f"{old} " not in type_in("clean", tmp_path, "--failed").output
    assert old.exists()
    with RunFolder(old).locked():
        assert "0 to delete" in type_in("clean", tmp_path, "--older-than", 1, "--yes").output
    assert type_in("clean", tmp_path, "--older-than", 1, "--yes").exit_code == 0
    assert not old.exists()
    assert new.exists()


def test_clean_of_checkpoints_keeps_exports_and_runs_that_may_resume(tmp_path: Path) -> None:
    done, stopped = make_run(tmp_path, "done"), make_run(tmp_path, "stopped", finished=0)
    for path in (done, stopped):
        for name in ("00000002", "hf"):
            (path / "checkpoints" / name).mkdir(parents=True)
    assert type_in("clean", tmp_path, "--checkpoints", "--yes").exit_code == 0
    assert [path.name for path in (done / "checkpoints").iterdir()] == ["hf"]
    assert (stopped / "checkpoints" / "00000002").exists()


def test_a_mistake_is_explained_without_a_traceback(tmp_path: Path) -> None:
    for words in (["list", tmp_path / "no"], ["show", tmp_path], ["samples", tmp_path], ["report", tmp_path]):
        result = type_in(*words)
        assert result.exit_code == 1
        assert "ConfigError" in result.output


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    assert "contradict" in type_in("samples", make_run(tmp_path, "a"), "--best", "--worst").output
    assert "not both" in type_in("clean", tmp_path, "--checkpoints", "--redis").output

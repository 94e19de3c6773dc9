"""What roles that were started one by one leave behind, and what the run's folder makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.errors import RoleFailed, TrainingError
from async_grpo.telemetry.logging import report_fatal


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "roles").mkdir()
    return RunFolder(tmp_path)


def write(folder: RunFolder, role: str, *kinds: str) -> None:
    rows = [{"kind": kind, "message": "TrainingError: loss is nan"} for kind in kinds]
    (folder.path / "roles" / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_restarts_follow_deaths_and_not_ends(folder: RunFolder) -> None:
    write(folder, "trainer-0", "start", "error", "start", "end", "start", "start", "error")
    write(folder, "rollout-a", "start", "start", "start", "end")
    write(folder, "rollout-b", "start", "end")
    assert folder.count_restarts() == {"trainer": 2, "rollout-a": 2}
    assert RunFolder(folder.path / "none").count_restarts() == {"trainer": 0}


def test_the_run_fails_with_its_trainer_or_with_its_last_server(folder: RunFolder) -> None:
    write(folder, "trainer-0", "start", "end")
    write(folder, "rollout-a", "start")
    write(folder, "rollout-b", "start", "end")
    assert folder.find_role_failure() == ""
    write(folder, "rollout-b", "start", "error")
    assert folder.find_role_failure() == "rollout-b: TrainingError: loss is nan"
    write(folder, "trainer-0", "start")
    assert folder.find_role_failure().startswith("trainer-0 ended")


def test_a_role_at_work_has_not_failed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_GRPO_ROLE_HISTORY", "")  # put back afterwards
    folder.register_role("trainer-0")
    assert folder.find_role_failure() == ""


def test_the_last_words_of_a_role_are_kept_without_secrets(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.path / "roles" / "trainer-0.jsonl"
    monkeypatch.setenv("ASYNC_GRPO_ROLE_HISTORY", str(file))
    report_fatal(TrainingError("loss is nan; password=hunter2"))
    assert folder.find_role_failure().startswith("trainer-0: TrainingError: loss is nan; password=")
    assert "hunter2" not in file.read_text()


def test_the_last_line_of_a_log_is_the_error_whatever_its_message_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    report_fatal(RoleFailed("32 groups failed, the last because: ValueError: bad answer 'x\nall is well\x1b[2J'"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("RoleFailed: 32 groups failed")
    assert "\x1b" not in line

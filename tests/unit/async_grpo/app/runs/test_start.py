"""`run` from Python: the request to the child, its errors, and its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import async_grpo
from async_grpo.app.runs import start
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError, RoleFailed

SETTINGS = {"name": "small", "steps": 3, "data": {"kind": "arithmetic"}, "model": {"random": {}}}


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Record the requests to the child instead of starting it. The run's folder exists afterwards, as after a run."""
    recorded: list[dict[str, object]] = []

    def record_request(exchange: Path, progress: object) -> int:
        recorded.append(json.loads((exchange / "request.json").read_text()))
        for name in ("small", "small-seed.2"):
            (tmp_path / "runs" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "runs" / name / "config.yaml").write_text("steps: 3\n")
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "_run_child", record_request)
    return recorded


def test_settings_config_and_file_select_the_same_run(requests: list[dict[str, object]]) -> None:
    Path("small.yaml").write_text(json.dumps(SETTINGS))
    runs = [start.run(config) for config in (SETTINGS, RunConfig.model_validate(SETTINGS), "small.yaml")]
    assert {str(run.path) for run in runs} == {"runs/small"}
    assert async_grpo.load_run("runs/small").path == runs[0].path


def test_overrides_are_a_mapping_or_assignments(requests: list[dict[str, object]]) -> None:
    run = start.run(SETTINGS, overrides={"seed": 2, "launch.stop_timeout_s": 5.0}, steps=4)
    assert run.path.name == "small-seed.2"
    start.run(SETTINGS, overrides=["seed=2"])
    assert [request["overrides"] for request in requests] == [["seed=2", "launch.stop_timeout_s=5.0"], ["seed=2"]]
    assert requests[0]["steps"] == 4


def test_a_config_error_is_raised_before_a_process_starts(requests: list[dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match=r"max_stalenes\b.*max_staleness"):
        start.run(SETTINGS, overrides={"max_stalenes": 1})
    assert requests == []


def test_an_error_of_the_child_is_raised_with_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    with pytest.raises(ConfigError, match="no_such"):
        start.run(SETTINGS | {"rewards": {"functions": [{"name": "no_such"}]}}, progress=lines.append)
    assert not Path("runs").exists()


def test_a_child_that_is_killed_is_a_failed_run(tmp_path: Path) -> None:
    error = start._read_error(tmp_path, -9, Path("runs/small"))
    assert isinstance(error, RoleFailed)
    assert "exit code -9" in str(error)


def test_a_notebook_gets_no_live_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from rich.console import Console; print(Console().is_terminal)"
    monkeypatch.setattr(start, "child_argv", lambda *_, **__: [sys.executable, "-c", program])
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # as ipykernel sets them
        monkeypatch.setenv(name, "1")
    lines: list[str] = []
    assert start._run_child(tmp_path, lines.append) == 0
    assert lines == ["False"]


def test_an_error_of_the_progress_function_terminates_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = [sys.executable, "-c", "import time; print('line', flush=True); time.sleep(60)"]
    monkeypatch.setattr(start, "child_argv", lambda *_, **__: child)
    children: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def record_child(*arguments: object, **options: object) -> subprocess.Popen[str]:
        children.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return children[0]

    monkeypatch.setattr(start.subprocess, "Popen", record_child)

    def fail(line: str) -> None:
        raise ZeroDivisionError(line)

    with pytest.raises(ZeroDivisionError, match="line"):
        start._run_child(tmp_path, fail)
    assert children[0].returncode == -15


def test_the_package_is_imported_lazily() -> None:
    program = "import sys, async_grpo; assert not {'torch', 'pydantic', 'yaml'} & sys.modules.keys(); async_grpo.run"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

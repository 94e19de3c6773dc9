"""The commands as a user types them."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from async_grpo.app.cli.common import complete_config, complete_key, exit_with_code
from async_grpo.app.cli.main import PANELS, app, first_paragraph, reproducing_command
from async_grpo.config import dump, load
from async_grpo.errors import AsyncGrpoError, ConfigError, DependencyError, RoleFailed

CONFIGS = Path(__file__).parents[5] / "configs"


def type_in(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_every_command_prints_its_help() -> None:
    pending: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while pending:
        words, command = pending.pop()
        pending += [((*words, name), child) for name, child in getattr(command, "commands", {}).items()]
        result = type_in(*words, "--help")
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.output


def test_without_a_command_the_everyday_commands_and_a_first_run_are_shown() -> None:
    result = type_in()
    assert result.exit_code == 0
    assert "async-grpo run quickstart" in result.output
    shown = [words[0] for line in result.output.splitlines() if line.startswith("  ") and (words := line.split())]
    assert shown[3:] == PANELS["Everyday"]


def test_the_help_lists_every_command_once_by_panel() -> None:
    output = type_in("--help").output
    positions = [output.index(f"─ {panel} ─") for panel in PANELS]
    assert positions == sorted(positions)
    group = typer.main.get_command(app)
    names = sorted(name for names in PANELS.values() for name in names)
    assert sorted(getattr(group, "commands", {})) == names


def test_the_first_help_line_of_a_command_is_one_short_sentence() -> None:
    pending: list[tuple[str, Any]] = [("async-grpo", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop()
        children = getattr(command, "commands", {})
        pending += [(f"{name} {child}", children[child]) for child in children]
        line = first_paragraph(command.help)
        assert re.fullmatch(r"[A-Z][^\n]{10,105}\.", line), f"{name}: {line}"


def test_tools_are_imported_by_the_commands_that_use_them() -> None:
    program = "import sys, async_grpo.app.cli.main; print([m for m in sys.modules if m.startswith('async_grpo.lab')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a key"), 78), (DependencyError("a package"), 78), (RoleFailed("the trainer"), 1)],
)
def test_faults_of_the_configuration_have_a_separate_exit_code(
    error: AsyncGrpoError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    @exit_with_code(config_code=78)
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == code
    assert f"{type(error).__name__}: {error}" in capsys.readouterr().err


def test_an_error_that_names_no_file_is_a_defect_and_keeps_its_traceback() -> None:
    @exit_with_code()
    def command() -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    with pytest.raises(OSError, match="Invalid argument"):
        command()


def test_a_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = type_in("run", str(CONFIGS / "quickstart.yaml"), "--dry-run", "-o", "max_staleness=4")
    assert result.exit_code == 0
    assert "quickstart-max_staleness.4" in result.output
    assert "80 groups" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["max_stalenes=0"], "max_staleness?"),
        (["rewards.functions=[{name: no_such}]"], "no_such"),
        (["rewards.functions=[{name: 'no.such.module:score'}]"], "no.such.module"),
        (["rewards.functions=[{name: gsm9k}]"], "'gsm8k'?"),
        (["rewards.functions=[{name: 'math:pi'}]"], "type float"),
        (["model.warmup=null", "model.path=/nowhere"], "/nowhere does not exist"),
        (["model.warmup=null", f"model.path={__file__}"], "is a file"),
        (["model.warmup=null", "model.path=/"], "config.json"),
        (["redis.url=127.0.0.1:6379"], "127.0.0.1:6379"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(overrides: list[str], words: str) -> None:
    arguments = [part for override in overrides for part in ("-o", override)]
    result = type_in("run", str(CONFIGS / "quickstart.yaml"), "--dry-run", *arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.bin"),
            "a.bin: no such file or directory",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on device"),
    ],
)
def test_an_error_of_the_system_says_which_file_and_what_to_do(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @exit_with_code()
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_misspelt_configuration_gets_the_nearest_name() -> None:
    result = type_in("run", "quikstart", "--dry-run")
    assert result.exit_code == 1
    assert "Did you mean quickstart?" in " ".join(result.output.split())


def test_the_plan_warns_of_evaluations_that_outweigh_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = type_in("run", "quickstart", "--dry-run", "--steps", "5")
    assert "-o eval.prompts=12" in " ".join(short.output.replace("│", " ").split())
    assert "more than the" not in type_in("run", "quickstart", "--dry-run").output


def test_the_gsm8k_run_says_which_file_it_wants() -> None:
    result = type_in("run", str(CONFIGS / "gsm8k_tiny.yaml"), "--dry-run")
    assert result.exit_code == 1
    assert "-o data.path=" in result.output


def test_a_wrong_field_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "q", "answer": "1"}\n' * 40)
    words = ["-o", "data.path=rows.jsonl", "-o", "data.prompt_field=problem"]
    result = type_in("run", str(CONFIGS / "gsm8k_tiny.yaml"), *words)
    assert result.exit_code == 1
    for words_of_it in ("line 1", "'problem'", "question, answer", "data.prompt_field"):
        assert words_of_it in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = type_in("run", str(CONFIGS / "quickstart.yaml"), "-o", f"runs_dir={tmp_path / 'file'}")
    assert result.exit_code == 1
    assert "is a file. Set runs_dir" in " ".join(result.output.split())
    assert str(tmp_path / "file") in result.output.replace("\n", "")


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_a_role_on_its_own_asks_for_a_server(role: str) -> None:
    result = type_in(role, str(CONFIGS / "quickstart.yaml"))
    assert result.exit_code == 1
    assert "redis.url" in result.output


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of the quickstart with a seed of its own, moved to another place since."""
    folder = tmp_path / "elsewhere" / "quickstart-seed.7"
    folder.mkdir(parents=True)
    config = load(CONFIGS / "quickstart.yaml", ["seed=7", "name=quickstart-seed.7", "runs_dir=/where/it/was"])
    (folder / "config.yaml").write_text(dump(config))
    (folder / "run.json").write_text('{"command": "async-grpo run quickstart.yaml -o seed=7"}')
    return folder


def test_a_run_folder_stands_for_its_configuration(run_folder: Path) -> None:
    result = type_in("run", str(run_folder), "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"writes          │ {run_folder} " in result.output
    assert "100 steps" in result.output
    longer = type_in("run", str(run_folder), "--dry-run", "--steps", "120", "-o", "seed=8")
    assert f"writes          │ {run_folder.parent}/quickstart-seed.7-seed.8 " in longer.output
    assert "120 steps" in longer.output


def test_a_run_folder_that_was_renamed_is_refused(run_folder: Path) -> None:
    renamed = run_folder.rename(run_folder.parent / "better")
    result = type_in("run", str(renamed), "--dry-run")
    assert result.exit_code == 1
    assert "Rename the folder to quickstart-seed.7" in " ".join(result.output.split())


def test_a_run_is_not_resumed_to_fewer_steps_than_it_has(run_folder: Path) -> None:
    rows = [{"kind": "step", "step": step} for step in (1, 2, 3)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = type_in("resume", str(run_folder), "--steps", "2")
    assert result.exit_code == 1
    assert "has already trained 3 steps" in " ".join(result.output.split())


def test_the_report_of_a_resumed_run_names_the_command_that_made_it(run_folder: Path) -> None:
    assert reproducing_command(run_folder, None, None) == "async-grpo run quickstart.yaml -o seed=7"
    assert reproducing_command(run_folder, None, 120) == "async-grpo run quickstart.yaml -o seed=7 --steps 120"


def test_version_names_the_release_and_the_commit_of_a_checkout() -> None:
    result = type_in("--version")
    assert result.output.startswith(f"async-grpo {version('async-grpo')}")
    assert ("commit" in result.output) == (CONFIGS.parent / ".git").exists()


def test_completion_knows_configurations_runs_and_keys(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder.parent)
    (run_folder.parent / "a.yaml").touch()
    assert complete_config("quick") == ["quickstart", "quickstart-seed.7"]
    assert complete_config("a") == ["a.yaml"]
    assert complete_config(f"{run_folder.parent.parent}/e") == [f"{run_folder.parent}/"]
    assert complete_key("trainer.optimizer.l") == ["trainer.optimizer.lr="]


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    """The command sends itself the signal where an import has not come to its end."""
    program = "import os, signal, async_grpo.app.cli; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
    program = "import signal, async_grpo.app.cli.main; print(signal.getsignal(2) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).stdout == b"True\n"

"""The commands as a user types them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from async_grpo.app.cli.common import exit_with
from async_grpo.app.cli.main import app

CONFIGS = Path(__file__).parents[5] / "configs"


def type_in(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


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
        (["max_stalenes=0"], "Did you mean max_staleness?"),
        (["rewards.functions=[{name: no_such}]"], "no_such"),
        (["rewards.functions=[{name: 'no.such.module:score'}]"], "no.such.module"),
        (["rewards.functions=[{name: gsm9k}]"], "Did you mean 'gsm8k'?"),
        (["rewards.functions=[{name: 'math:pi'}]"], "is a value of type float, not a function (completion"),
        (["model.warmup=null", "model.path=/nowhere"], "is not there, but a checkpoint is a folder"),
        (["model.warmup=null", f"model.path={__file__}"], "is a file, but a checkpoint is a folder"),
        (["model.warmup=null", "model.path=/"], "config.json"),
        (["redis.url=127.0.0.1:6379"], "which is not a server's address. Use redis://"),
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
            "a.bin: no such file or directory. Check",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on device. Free some space"),
    ],
)
def test_an_error_of_the_system_says_which_file_and_what_to_do(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    with pytest.raises(typer.Exit):
        exit_with(work)
    assert said in " ".join(capsys.readouterr().err.split())


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
    assert "line 1: there is no field 'problem' (the row has question, answer). Set data.prompt_field" in result.output
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

"""The shipped configurations are found from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.config import load
from async_grpo.config.load import resolve_config_path, shipped_configs

CONFIGS = Path(__file__).parents[5] / "configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_the_package_contains_the_shipped_configurations() -> None:
    names = [str(file.relative_to(shipped_configs())) for file in sorted(shipped_configs().rglob("*.yaml"))]
    assert names == [str(file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.yaml"))]


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml", "qwen2.5_7b_gsm8k_cuda"])
def test_a_shipped_configuration_loads_by_name(name: str) -> None:
    assert load(Path(name)) == load(CONFIGS / f"{Path(name).name.removesuffix('.yaml')}.yaml")


def test_a_local_file_takes_precedence_over_a_shipped_one() -> None:
    Path("quickstart").write_text("mine")
    assert resolve_config_path(Path("quickstart")) == Path("quickstart")


@pytest.mark.parametrize("folder", ["configs", "."])
def test_a_folder_without_a_run_is_not_a_configuration(folder: str) -> None:
    result = invoke("run", folder, "--dry-run")
    assert result.exit_code == 1
    assert "configuration" in result.output, result.output


def test_a_copy_includes_its_layers_and_runs() -> None:
    result = invoke("configs", "qwen2.5_7b_gsm8k_ascend", "--to", "mine")
    assert result.exit_code == 0, result.output
    names = ["layers/ascend.yaml", "layers/gsm8k.yaml", "layers/qwen2.5-7b.yaml", "qwen2.5_7b_gsm8k_ascend.yaml"]
    assert [str(file.relative_to("mine")) for file in sorted(Path("mine").rglob("*.yaml"))] == names
    assert invoke("run", "mine/qwen2.5_7b_gsm8k_ascend.yaml", "--dry-run").exit_code == 0
    again = invoke("configs", "qwen2.5_7b_gsm8k_ascend", "--to", "mine")
    assert again.exit_code == 1 and "would be overwritten" in again.output


def test_the_list_describes_each_configuration() -> None:
    output = invoke("configs").output
    assert "quickstart" in output and "learns to think before it answers." in output


def test_an_unknown_name_points_to_the_list() -> None:
    for words in (("configs", "nope"), ("run", "nope", "--dry-run")):
        result = invoke(*words)
        assert result.exit_code == 1 and "`async-grpo configs` lists" in " ".join(result.output.split())

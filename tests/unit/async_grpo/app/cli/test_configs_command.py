"""The shipped configurations are found from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.config import load
from async_grpo.config.load import find_config, shipped_configs

CONFIGS = Path(__file__).parents[5] / "configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def type_in(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_the_package_holds_the_shipped_configurations() -> None:
    names = [str(file.relative_to(shipped_configs())) for file in sorted(shipped_configs().rglob("*.yaml"))]
    assert names == [str(file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.yaml"))]


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml", "qwen2.5_7b_gsm8k_cuda"])
def test_a_shipped_configuration_goes_by_its_name(name: str) -> None:
    assert load(Path(name)) == load(CONFIGS / f"{Path(name).name.removesuffix('.yaml')}.yaml")


def test_a_file_of_that_name_comes_first() -> None:
    Path("quickstart").write_text("mine")
    assert find_config(Path("quickstart")) == Path("quickstart")


def test_a_copy_brings_its_layers_and_can_be_run() -> None:
    result = type_in("configs", "qwen2.5_7b_gsm8k_ascend", "--to", "mine")
    assert result.exit_code == 0, result.output
    names = ["layers/ascend.yaml", "layers/gsm8k.yaml", "layers/qwen2.5-7b.yaml", "qwen2.5_7b_gsm8k_ascend.yaml"]
    assert [str(file.relative_to("mine")) for file in sorted(Path("mine").rglob("*.yaml"))] == names
    assert type_in("run", "mine/qwen2.5_7b_gsm8k_ascend.yaml", "--dry-run").exit_code == 0
    again = type_in("configs", "qwen2.5_7b_gsm8k_ascend", "--to", "mine")
    assert again.exit_code == 1 and "would be overwritten" in again.output


def test_the_list_says_what_each_is() -> None:
    output = type_in("configs").output
    assert "quickstart" in output and "learns to think before it answers." in output


def test_an_unknown_name_points_to_the_list() -> None:
    for words in (("configs", "nope"), ("run", "nope", "--dry-run")):
        result = type_in(*words)
        assert result.exit_code == 1 and "`async-grpo configs` lists" in " ".join(result.output.split())

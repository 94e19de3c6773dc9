"""A first policy that the trainer or the engine would refuse is refused before anything starts, in a few words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.config.model import RandomModelConfig
from async_grpo.models.tiny.random_qwen2 import make_random_model

CONFIG = "name: small\nmodel: {path: model}\nsampling: {max_tokens: 24}\nrollout: {vllm: {max_model_len: 256}}\n"
SHAPE = RandomModelConfig(
    hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128, vocab_size=300, max_positions=512
)
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    make_random_model(SHAPE, ["12+34=46"], folder, 1)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`model/` and `run.yaml` in a folder of their own, where the command is typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return Path(shutil.copytree(whole, tmp_path / "model"))


def dry_run(config: str = "run.yaml") -> Result:
    return CliRunner().invoke(app, ["run", config, "--dry-run"], env={"COLUMNS": "400"})


def change(**values: object) -> Callable[[Path], None]:
    """Of config.json."""

    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return apply


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[GATE]
    save_file(tensors, folder / "model.safetensors")


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights that break off": (cut, "model.safetensors is not a complete safetensors file"),
    "another shape": (
        change(intermediate_size=64),
        "has shape (128, 64), but config.json requires (64, 64)",
    ),
    "a tensor too few": (without_a_tensor, f"the checkpoint has no tensor {GATE}"),
    "tensors too many": (
        change(num_hidden_layers=1, layer_types=["full_attention"]),
        "tensors that a qwen2 does not have",
    ),
    "no JSON": (written("config.json", "{"), "config.json cannot be read as JSON"),
    "deep JSON": (written("config.json", "[" * 20_000), "config.json cannot be read as JSON (maximum recursion depth"),
    "no object": (written("config.json", "[1]"), "config.json is a JSON list, not an object"),
    "a word for a size": (change(num_hidden_layers="two"), "transformers cannot read model/config.json"),
    "no heads": (change(num_attention_heads=0), "does not describe a model (integer division or modulo by zero)"),
    "no tokenizer": (written("tokenizer.json", "{"), "the tokenizer in model cannot be loaded"),
}


def test_a_whole_one_passes(folder: Path) -> None:
    assert dry_run().exit_code == 0


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_is_refused(folder: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(folder)
    result = dry_run()
    assert result.exit_code == 1, result.output
    assert result.output.startswith("ConfigError: model.path: ") and words in result.output
    assert "Traceback" not in result.output
    assert {path.name for path in Path.cwd().iterdir()} == {"run.yaml", "model"}


def test_a_folder_is_no_configuration(folder: Path) -> None:
    result = dry_run("model")
    assert result.exit_code == 1
    assert "ConfigError: model cannot be read as a configuration (Is a directory)" in result.output

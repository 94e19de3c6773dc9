"""`async-grpo convert` and `export`: weights change their form, and not a bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.trainer_programs.launching import Outcome, Run, launch
from tests.support.trainer_programs.models import make_model
from trainer.model.hf_folder import write_hf_folder

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel": 2},
    "experts": {"expert_parallel": 2},
    "context": {"context_parallel": 2},
}


def runs(folder: Path) -> dict[int, dict[str, Run]]:
    layout = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "optimizer": {"lr": 1e-3}}
    return {2: {"trained": Run(make_model(folder, "moe"), layout, {"versions": [*range(STEPS)], "save_at": STEPS})}}


def run(*arguments: object, code: int = 0) -> str:
    """What the command said."""
    command = [sys.executable, "-m", "async_grpo.app.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, said
    return said


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def there_and_back(model: Path, folder: Path) -> Path:
    run("convert", model, folder / "megatron")
    run("convert", folder / "megatron", folder / "back")
    return folder / "back"


@pytest.mark.slow
def test_a_mixture_of_experts_goes_to_megatron_and_back_bit_for_bit(tmp_path: Path) -> None:
    model = make_model(tmp_path, "moe")
    back = there_and_back(model, tmp_path)
    assert_same_bits(tensors_of(back), tensors_of(model))
    assert AutoModelForCausalLM.from_pretrained(back).config.model_type == "qwen3_moe"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen2-untied", "qwen3", "llama3"])
def test_every_family_does(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path, name)
    assert_same_bits(tensors_of(there_and_back(model, tmp_path)), tensors_of(model))


@pytest.mark.slow
def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3")
    save_file({k: v.bfloat16() for k, v in tensors_of(model).items()}, model / "model.safetensors", {"format": "pt"})
    back = there_and_back(model, tmp_path)
    assert_same_bits(tensors_of(back), tensors_of(model))
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_ranks_in_any_layout_load_a_converted_checkpoint(tmp_path: Path) -> None:
    model = make_model(tmp_path, "moe")
    run("convert", model, tmp_path / "megatron")
    files = {str(tmp_path / f"{name}.safetensors"): {"processes": 2, **keys} for name, keys in LAYOUTS.items()}
    (tmp_path / "layouts.json").write_text(json.dumps(files))
    launch("load_converted", 2, model, tmp_path / "megatron", tmp_path / "layouts.json")
    for file in files:
        assert_same_bits(load_file(file), tensors_of(model))


def test_the_checkpoint_of_a_run_on_two_ranks_is_exported(two_ranks: dict[str, Outcome], tmp_path: Path) -> None:
    trained = two_ranks["trained"]
    said = run("export", trained.run_dir, tmp_path / "out")
    assert f"policy version {STEPS}" in said
    assert_same_bits(tensors_of(tmp_path / "out"), trained.trained)
    said = run("export", trained.run_dir, tmp_path / "other", "--version", 7, code=1)
    assert f"no checkpoint of version 7, only of {STEPS}" in said


def test_a_target_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2")
    (tmp_path / "there").mkdir()
    assert "would be overwritten" in run("convert", model, tmp_path / "there", code=1)
    assert not any((tmp_path / "there").iterdir())


def test_a_large_model_is_written_in_shards_that_transformers_loads(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3")
    tensors = tensors_of(model)
    write_hf_folder(tmp_path / "sharded", model, tensors.items(), shard_bytes=16_000)
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded").state_dict()
    assert_same_bits({name: loaded[name] for name in tensors}, tensors)

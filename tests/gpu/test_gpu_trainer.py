"""The trainer on one GPU: like plain Hugging Face and torch AdamW.

Resuming, the bits of published weights and the memory of the device are stages of `async-grpo accept`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_grpo.weights.delta import apply_patch, make_patch
from tests.integration.trainer.test_trainer_model import (
    FAMILIES,
    LR,
    STEPS,
    assert_identical,
    assert_plain_training,
    assert_same_training,
)
from tests.support.trainer_programs.launching import Outcome, Run, adamw, run_all
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.plain import plain_steps
from trainer.model.host_copy import HostCopy

ROOT = Path(__file__).parents[2]
ON_GPU = {"platform": "cuda"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Outcome]:
    """Every family in float32; one in bfloat16, and with activations recomputed."""
    steps = {"versions": [*range(STEPS)]}
    on_gpu = adamw(LR) | ON_GPU
    qwen2 = make_model(folder, "qwen2")
    runs = {name: Run(make_model(folder, name), on_gpu, steps) for name in FAMILIES}
    runs |= {
        "bfloat16": Run(qwen2, on_gpu, {**steps, "logprobs": True}, precision="bfloat16"),
        "recomputed": Run(qwen2, {**on_gpu, "recompute": "full"}, steps),
    }
    return run_all({folder: runs}, ranks=1)[folder]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_and_ten_equal_hugging_face_and_torch_adamw(
    trained: dict[str, Outcome], folder: Path, name: str
) -> None:
    assert_plain_training(trained[name], make_model(folder, name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_goes_through_the_gpu_bit_for_bit(trained: dict[str, Outcome], folder: Path, name: str) -> None:
    assert_identical(trained[name].untouched, make_model(folder, name))


def test_ten_steps_in_bfloat16_stay_within_its_digits(trained: dict[str, Outcome], folder: Path) -> None:
    """Eight bits of mantissa: one part in 256 of a number, a few of them after two layers and a logarithm."""
    found = trained["bfloat16"]
    expected = plain_steps(make_model(folder, "qwen2"), STEPS, LR)
    assert sorted(found.found["logprobs"]) == pytest.approx(sorted(expected.logprobs), abs=0.1)
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.03)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)


def test_recomputed_activations_give_the_same_numbers(trained: dict[str, Outcome]) -> None:
    assert_same_training(trained["recomputed"], trained["qwen2"], 1e-6)


@pytest.mark.parametrize("lr", [1e-6, 1e-4])
def test_a_patch_between_two_steps_of_a_gpu_is_bit_exact(lr: float) -> None:
    """bfloat16 weights of a float32 master, as the optimizer leaves them on the device."""
    generator = torch.Generator("cuda").manual_seed(5)
    master = torch.nn.Parameter(torch.randn(1 << 20, device="cuda", generator=generator) * 0.02)
    old = master.detach().to(torch.bfloat16)
    master.grad = torch.randn(master.shape, device="cuda", generator=generator)
    torch.optim.AdamW([master], lr=lr).step()
    new = master.detach().to(torch.bfloat16)
    block, goal = (bytearray(one.cpu().view(torch.int16).numpy().tobytes()) for one in (old, new))
    patch = make_patch(memoryview(bytes(block)), memoryview(bytes(goal)), 2)
    apply_patch(memoryview(block), patch)
    assert block == goal
    assert len(patch) < len(goal) / 2
    arrived = torch.frombuffer(block, dtype=torch.int16).view(torch.bfloat16).to("cuda")
    assert torch.equal(arrived.view(torch.int16), new.view(torch.int16))


def test_the_trainers_bench_runs_beside_a_gpu(tmp_path: Path) -> None:
    """It measures the CPU, whose platform refuses to start where torch sees a GPU: so it hides it from itself."""
    command = [sys.executable, "-m", "async_grpo.app.cli.main", "bench", "trainer", "--quick", "--json", "figures.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / "figures.json").read_text())


def test_weights_come_to_the_host_while_the_stream_of_the_training_is_busy() -> None:
    weights = torch.randn(1024, 4096, device="cuda").bfloat16()
    matrix = torch.randn(8192, 8192, device="cuda")
    copy = HostCopy(weights.device, torch.cuda.Stream(), buffer_bytes=1 << 20)
    target = torch.zeros(4096, 1024, dtype=torch.bfloat16)
    weights.mul_(2)
    copy.record_update()
    for _ in range(200):
        matrix = matrix @ matrix
    end = torch.cuda.current_stream().record_event()
    copy.copy_to_host([(target, weights.t())])
    assert not end.query(), "the copy has waited for the kernels behind it"
    assert torch.equal(target, weights.t().cpu())

"""The trainer on the NPU platform, under the patches that MindSpeed makes: the same steps as on the CPU, and resume.

MindSpeed's own Python, the platform's attention and its layers run over Megatron on the CPU; the operators of torch_npu
are those of tests/support/npu_operators.py, the device is imitated (tests/support/mindspeed.py). Each layout trains
four steps without and with the patches, and from the checkpoint after two of them; it makes one streamed step with a
reference model, and one step of every kind of objective where that layout is one of `KINDS`. A sum over ranks in 64
bits fails in all of them (`running.refuse_doubles`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.mindspeed import unpacked_source
from tests.support.trainer_programs.launching import (
    AGED,
    KINDS,
    OBJECTIVES,
    Outcome,
    Run,
    adamw,
    assert_close,
    assert_same_figures,
    assert_same_step,
    run_all,
)
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.running import MINDSPEED_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 4
SAVED = 2
LR = 1e-3
TOLERANCE = 1e-6
"""Largest difference of a weight in float32, after steps of 1e-3."""
TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tensor": TENSOR,
        "pipeline": {"pipeline_parallel": 2},
        "data": {},
        "context": {"context_parallel": 2},
        "experts": {"expert_parallel": 2},
    },
    4: {"tensor and data": TENSOR},
}
"""By the number of ranks."""
ALL = [layout for layouts in LAYOUTS.values() for layout in layouts]
FAMILIES = {"experts": "moe"}
OFFLOADED: dict[str, Any] = {**adamw(LR), "optimizer": {**adamw(LR)["optimizer"], "offload": True}}
STREAMED: dict[str, Any] = {
    "objective": {"corrections": ["ess_lr"], "entropy_coef": 0.1, "kl_beta": 0.2},
    "reference": {"source": "frozen"},
    "streaming": True,
}


def runs_of(folder: Path, layout: str, keys: dict[str, Any]) -> dict[str, Run]:
    """Without MindSpeed and with it alike."""
    model = make_model(folder, FAMILIES.get(layout, "qwen2"))
    versions = [*range(STEPS)]
    found = {
        "trained": Run(model, adamw(LR) | keys, {"versions": versions, "save_at": SAVED}),
        "rounded": Run(model, OFFLOADED | keys, {"versions": versions, "save_at": SAVED}, precision="bfloat16"),
        "streamed": Run(model, STREAMED | keys, AGED | {"parts": [1, 2, 1]}),
    }
    if layout in KINDS:
        found |= {name: Run(model, {"objective": OBJECTIVES[name]} | keys, AGED) for name in OBJECTIVES}
    return found


def resumed(folder: Path, layout: str, keys: dict[str, Any], of: str, precision: str) -> Run:
    case = {"versions": [*range(SAVED, STEPS)], "resume": True}
    model = make_model(folder, FAMILIES.get(layout, "qwen2"))
    settings = adamw(LR) if precision == "float32" else OFFLOADED
    return Run(model, settings | keys, case, checkpoints_of=f"{layout}, {of}", precision=precision)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What the runs came to on the CPU platform, by "LAYOUT, RUN"."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        name: outcome
        for ranks, layouts in LAYOUTS.items()
        for name, outcome in run_all({folder: _named(folder, layouts)}, ranks)[folder].items()
    }


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The same under the patches, and two runs that were resumed."""
    source = unpacked_source(tmp_path_factory.mktemp("source"))
    folder = tmp_path_factory.mktemp("patched")
    found = {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MINDSPEED_VARIABLE, str(source))
        for ranks, layouts in LAYOUTS.items():
            for layout, keys in layouts.items():  # MindSpeed patches once in a process, for one layout
                runs = _named(folder, {layout: keys})
                for of, precision in {"trained": "float32", "rounded": "bfloat16"}.items():
                    runs[f"{layout}, {of} on"] = resumed(folder, layout, keys, of, precision)
                found |= run_all({folder: runs}, ranks)[folder]
    return found


def _named(folder: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, Run]:
    return {
        f"{layout}, {name}": run
        for layout, keys in layouts.items()
        for name, run in runs_of(folder, layout, keys).items()
    }


@pytest.mark.parametrize("layout", ALL)
def test_training_under_its_patches_gives_the_same_losses_and_weights(
    plain: dict[str, Outcome], patched: dict[str, Outcome], layout: str
) -> None:
    expected = plain[f"{layout}, trained"]
    found = patched[f"{layout}, trained"]
    assert len(found.steps) == STEPS
    for of_plain, of_patched in zip(expected.steps, found.steps, strict=True):
        assert_same_figures(of_patched, of_plain, 1e-5)
    assert_close(found.trained, expected.trained, TOLERANCE)


@pytest.mark.parametrize("layout", ALL)
def test_in_bfloat16_with_the_optimizer_on_the_host_only_rounding_differs(
    plain: dict[str, Outcome], patched: dict[str, Outcome], layout: str
) -> None:
    pairs = zip(plain[f"{layout}, rounded"].steps, patched[f"{layout}, rounded"].steps, strict=True)
    for expected, found in pairs:
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2**-6)
        assert found["loss"] == pytest.approx(expected["loss"], abs=2**-6)


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("name", ["trained", "rounded"])
def test_a_resumed_run_goes_on_bit_for_bit(patched: dict[str, Outcome], layout: str, name: str) -> None:
    found = patched[f"{layout}, {name} on"]
    expected = patched[f"{layout}, {name}"]
    assert found.steps == expected.steps[SAVED:]
    assert_close(found.trained, expected.trained, 0.0)


@pytest.mark.parametrize("layout", ALL)
def test_a_streamed_step_is_the_same(plain: dict[str, Outcome], patched: dict[str, Outcome], layout: str) -> None:
    assert_same_step(patched[f"{layout}, streamed"], plain[f"{layout}, streamed"], 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_the_same_loss_and_gradient(
    plain: dict[str, Outcome], patched: dict[str, Outcome], name: str, kind: str
) -> None:
    assert_same_step(patched[f"{kind}, {name}"], plain[f"{kind}, {name}"], 2e-5)


@pytest.mark.parametrize("layout", ALL)
def test_the_layers_are_those_of_the_npu(patched: dict[str, Outcome], layout: str) -> None:
    expected = {"trainer.NpuAttention", "trainer.NpuRotation", "mindspeed.RMSNorm", "mindspeed.SwiGLUFunction"}
    assert expected <= set(patched[f"{layout}, trained"].found["layers"])


def test_no_layer_waits_for_the_npu_under_its_patches(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.layer_syncs", str(unpacked_source(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"none": 0, "selective": 0, "full": 0}

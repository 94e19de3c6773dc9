"""The trainer under the patches that MindSpeed makes on NPUs: the same weights as without, and a checkpoint loads.

MindSpeed's own Python runs over Megatron on the CPU (tests/support/mindspeed.py). A layout trains four steps without
and with the patches, and from the checkpoint after two of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.mindspeed import unpacked_source
from tests.support.trainer_programs.launching import Outcome, Run, adamw, assert_same_figures, run_all
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.running import MINDSPEED_VARIABLE

pytestmark = pytest.mark.slow
STEPS, SAVED = 4, 2
LR = 1e-3
TOLERANCE = 1e-6
"""Largest difference of a weight in float32, after steps of 1e-3."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel": 2},
    "data": {},
    "context": {"context_parallel": 2},
    "experts": {"expert_parallel": 2},
}
FAMILIES = {"experts": "moe"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What the runs "LAYOUT", "LAYOUT-patched" and "LAYOUT-resumed" wrote, by these names."""
    source = unpacked_source(tmp_path_factory.mktemp("source"))
    folder = tmp_path_factory.mktemp("steps")

    def run(layout: str, resumes: str = "", **case: Any) -> Run:
        model, trainer = make_model(folder, FAMILIES.get(layout, "qwen2")), adamw(LR) | LAYOUTS[layout]
        case = {"versions": [*range(SAVED if resumes else 0, STEPS)], "resume": bool(resumes), **case}
        return Run(model, trainer, case, checkpoints_of=resumes)

    found = run_all({folder: {layout: run(layout) for layout in LAYOUTS}}, ranks=2)[folder]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MINDSPEED_VARIABLE, str(source))
        for layout in LAYOUTS:  # MindSpeed patches once in a process, for one layout
            saved = f"{layout}-patched"
            runs = {saved: run(layout, save_at=SAVED), f"{layout}-resumed": run(layout, resumes=saved)}
            found |= run_all({folder: runs}, ranks=2)[folder]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_under_its_patches_gives_the_same_losses_and_weights(
    outcomes: dict[str, Outcome], layout: str
) -> None:
    plain, patched = outcomes[layout], outcomes[f"{layout}-patched"]
    assert len(patched.steps) == STEPS
    for expected, found in zip(plain.steps, patched.steps, strict=True):
        assert_same_figures(found, expected, 1e-5)
    assert_same(plain, patched)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_loaded_under_its_patches(outcomes: dict[str, Outcome], layout: str) -> None:
    patched, resumed = outcomes[f"{layout}-patched"], outcomes[f"{layout}-resumed"]
    assert resumed.steps == patched.steps[SAVED:]
    assert_same(patched, resumed, tolerance=0.0)


def assert_same(expected: Outcome, found: Outcome, tolerance: float = TOLERANCE) -> None:
    assert expected.trained.keys() == found.trained.keys()
    for name, tensor in expected.trained.items():
        difference = (found.trained[name] - tensor).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"

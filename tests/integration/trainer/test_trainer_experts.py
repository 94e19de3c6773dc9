"""Experts as grouped products train like Megatron's SequentialMLP, and either form reads the other's checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.trainer_programs.launching import Outcome, Run, adamw, assert_close, assert_same_figures, run_all
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.running import GROUPED_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, SAVED = 10, 4
SHARED: dict[int, dict[str, Any]] = {1: {}, 2: {"expert_parallel": 2}}
"""By the number of ranks."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Each form on one and on two ranks, with ten steps, and with those after a checkpoint of the other form."""
    folder = tmp_path_factory.mktemp("experts")
    found: dict[str, Outcome] = {}

    def start(form: str, ranks: int, resumed_from: str = "") -> None:
        trainer = adamw(1e-3) | SHARED[ranks]
        model = make_model(folder, "moe")
        runs = {f"{form} {ranks}": Run(model, trainer, {"versions": [*range(STEPS)], "save_at": SAVED})}
        if resumed_from:
            case = {"versions": [*range(SAVED, STEPS)], "resume": True}
            runs[f"{form} {ranks} from {resumed_from}"] = Run(model, trainer, case, checkpoints_of=resumed_from)
        with pytest.MonkeyPatch.context() as patch:
            if form == "grouped":
                patch.setenv(GROUPED_VARIABLE, "1")
            found.update(run_all({folder: runs}, ranks)[folder])

    start("single", 1)
    start("grouped", 2, resumed_from="single 1")
    start("single", 2, resumed_from="grouped 2")
    start("grouped", 1, resumed_from="single 2")
    return found


@pytest.mark.parametrize("name", ["grouped 1", "grouped 2", "single 2"])
def test_ten_steps_are_those_of_single_experts(outcomes: dict[str, Outcome], name: str) -> None:
    found, expected = outcomes[name], outcomes["single 1"]
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert_same_figures(mine, theirs, 1e-5)
    assert_close(found.untouched, expected.untouched, 0)
    assert_close(found.first, expected.first, 1e-5)
    assert_close(found.trained, expected.trained, 1e-5)


@pytest.mark.parametrize("name", ["grouped 2 from single 1", "single 2 from grouped 2", "grouped 1 from single 2"])
def test_either_form_resumes_from_a_checkpoint_of_the_other(outcomes: dict[str, Outcome], name: str) -> None:
    found, expected = outcomes[name], outcomes["single 1"]
    for mine, theirs in zip(found.steps, expected.steps[SAVED:], strict=True):
        assert_same_figures(mine, theirs, 1e-5)
    assert_close(found.trained, expected.trained, 1e-5)

"""Ten steps, or seven of which the fifth is saved, a SIGKILL, and five: the same, on the same ranks and on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_grpo.errors import TrainingError
from tests.support.trainer_programs.launching import KINDS, Outcome, Run, adamw, assert_close, run_all
from tests.support.trainer_programs.models import make_model

STEPS, SAVED, KILLED = 10, 5, 7

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Two ranks of each kind train straight through, and up to a SIGKILL; then others resume, on two ranks and on
    one."""
    here, model = tmp_path_factory.mktemp("resume"), make_model(folder, "qwen2")

    def runs(name: str, kinds: dict[str, dict[str, int]], killed: bool = False, **case: object) -> dict[str, Run]:
        found = {
            f"{kind}-{name}": Run(model, adamw(1e-4) | layout, {**case}, "" if name == "straight" else kind)
            for kind, layout in kinds.items()
        }
        if killed:
            found["tensor-killed"].case["die"] = True  # the last one: layouts are sorted
        return found

    killed = runs("killed", KINDS, True, versions=[*range(KILLED)], save_at=SAVED)
    with pytest.raises(TrainingError, match=r"rank \d .*SIGKILL"):
        run_all({here: killed}, 2)
    rest = {"versions": [*range(SAVED, STEPS)], "resume": True}
    found = run_all({here: runs("straight", KINDS, versions=[*range(STEPS)]) | runs("same", KINDS, **rest)}, 2)[here]
    return found | run_all({here: runs("one", {kind: {} for kind in KINDS}, **rest)}, 1)[here]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", ["same", "one"])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(
    outcomes: dict[str, Outcome], kind: str, ranks: str
) -> None:
    straight, resumed = outcomes[f"{kind}-straight"], outcomes[f"{kind}-{ranks}"]
    losses = [[step["loss"] for step in outcome.steps] for outcome in (resumed, straight)]
    assert losses[0] == pytest.approx(losses[1][SAVED:], rel=1e-6, abs=1e-6)
    assert_close(resumed.trained, straight.trained, 1e-6)
    if ranks == "same":
        assert losses[0] == losses[1][SAVED:]
        assert all(torch.equal(resumed.trained[name], tensor) for name, tensor in straight.trained.items())

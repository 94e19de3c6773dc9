"""A step in several updates, streamed, in another order, with sequences that are too long, and one that is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.algorithms import token_objective
from async_grpo.config.objective import ObjectiveConfig
from tests.support.trainer_programs.launching import (
    AGED,
    CAP,
    KINDS,
    Outcome,
    Run,
    adamw,
    assert_close,
    assert_same_figures,
    assert_same_moves,
    assert_same_step,
    trained_tolerance,
)
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.plain import (
    HIGH,
    LEAST,
    LOW,
    MOST,
    load,
    minus_gradient,
    plain_steps,
    plain_tokens,
)

FAMILY = "qwen2-untied"
LR = 3e-3
VERSIONS = 2
TRAINED_TOLERANCE = trained_tolerance(LR, 4 * VERSIONS)
ROOM = 20

NOT_NORMALISED = {"advantage_norm": "none"}
"""The plain reference has no normalisation over the batch, and a streamed batch cannot have one."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "recompute": {"behaviour_cap": CAP, "clip_low": LOW, "clip_high": HIGH, **NOT_NORMALISED},
    "loglinear": {"prox": "loglinear", "behaviour_cap": CAP, "clip_low": LOW, "clip_high": HIGH, **NOT_NORMALISED},
    "behaviour": {
        "preset": "dapo",
        "clip_low": 0.5,
        "clip_high": 0.5,
        "corrections": [{"kind": "seq_mis", "low": LEAST, "high": MOST}],
    },
}
STREAMED: dict[str, dict[str, Any]] = {
    "token_mean": {"objective": {"corrections": ["ess_lr"], "entropy_coef": 0.1, "kl_beta": 0.2, **NOT_NORMALISED}},
    "seq_mean_token_mean": {"objective": {"preset": "grpo", "kl_beta": 0.1, "kl_in": "reward"}},
    "seq_mean_token_sum_norm": {"objective": {"preset": "dr_grpo"}, "reference": {"source": "none"}},
    "token_sum": {"objective": {"aggregation": "token_sum", **NOT_NORMALISED}, "reference": {"source": "none"}},
}
PARTS = dict(zip(STREAMED, [[1, 1, 1, 1], [3, 1], [1, 3], [2, 2]], strict=True))
"""How many groups arrive together."""


def runs(folder: Path) -> dict[int, dict[str, Run]]:
    model = make_model(folder, FAMILY)

    def several(name: str, **layout: int) -> Run:
        keys = adamw(LR) | {"num_iterations": 2, "mini_batches": 2, "objective": OBJECTIVES[name], **layout}
        return Run(model, keys, {"versions": [*range(VERSIONS)]})

    def streamed(name: str, parts: list[int] | None, **layout: int) -> Run:
        keys = {"reference": {"source": "frozen"}, **STREAMED[name], "streaming": parts is not None, **layout}
        return Run(model, keys, {**AGED, "parts": parts})

    def skipping(**trainer: Any) -> Run:
        """Of the versions 0 ... 4, the batches of 1, 3 and 4 are poisoned."""
        case = {"versions": [*range(5)], "poisoned": [1, 3, 4], "parts": [2, 2]}
        return Run(model, {"max_skipped_steps": 2, "optimizer": {"lr": 1e-3}, **trainer}, case)

    two: dict[str, Run] = {}
    for kind, layout in KINDS.items():
        two |= {f"recompute, {kind}": several("recompute", **layout)}
        two |= {f"streamed, {kind}": streamed("token_mean", [1, 2, 1], **layout)}
        two |= {f"skipping, {kind}": skipping(**layout)}
    one = {
        **{name: several(name) for name in OBJECTIVES},
        **{name: streamed(name, None) for name in STREAMED},
        **{f"{name}, streamed": streamed(name, parts) for name, parts in PARTS.items()},
        "buffered": Run(model, {"streaming": True}, {"buffered": True, "parts": [1, 3]}),
        "not buffered": Run(model, {"objective": NOT_NORMALISED}),
        "backwards": Run(model, {**STREAMED["seq_mean_token_sum_norm"]}, {**AGED, "backwards": True}),
        "truncate": Run(model, {"overlong": "truncate", "micro_batch_tokens": ROOM}, AGED),
        "drop": Run(model, {"overlong": "drop", "micro_batch_tokens": ROOM}, AGED),
        "endless": Run(model, {"objective": {"loss": "tests.support.own_objective:endless"}}),
        "skipping": skipping(),
        "skipping, streamed": skipping(streaming=True),
        "skipping, several": skipping(mini_batches=2),
    }
    return {1: one, 2: two}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_passes_of_two_updates_equal_hugging_face_and_torch_adamw(
    one_rank: dict[str, Outcome], folder: Path, name: str
) -> None:
    expected = plain_steps(make_model(folder, FAMILY), VERSIONS, LR, name, updates=2)
    for found, step in zip(one_rank[name].steps, expected.steps, strict=True):
        assert found["updates"] == 4
        assert_same_figures(found, step, 1e-5)
    assert_close(one_rank[name].trained, expected.weights[-1], TRAINED_TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_they_do_on_two_ranks_of_any_kind(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], kind: str
) -> None:
    for found, expected in zip(two_ranks[f"recompute, {kind}"].steps, one_rank["recompute"].steps, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert_close(two_ranks[f"recompute, {kind}"].trained, one_rank["recompute"].trained, TRAINED_TOLERANCE)


def test_the_trust_region_is_left_in_later_updates_and_sequences_are_rejected(one_rank: dict[str, Outcome]) -> None:
    recomputed = one_rank["recompute"].steps[1]
    assert recomputed["clip_low_fraction"] > 0
    assert recomputed["clip_high_fraction"] > 0
    assert recomputed["clip_fraction"] == pytest.approx(
        recomputed["clip_low_fraction"] + recomputed["clip_high_fraction"]
    )
    assert 0 < one_rank["behaviour"].steps[1]["rejected_fraction"] < 1


def test_only_what_needs_the_policy_before_the_step_costs_a_pass(one_rank: dict[str, Outcome]) -> None:
    passes = {name: "prox" in one_rank[name].found["passes"] for name in OBJECTIVES}
    assert passes == {"recompute": True, "loglinear": False, "behaviour": True}


@pytest.mark.parametrize(
    ("name", "waiting"),
    [
        *((f"{name}, streamed", name) for name in STREAMED),
        pytest.param("buffered", "not buffered", id="the buffer hands out the parts"),
    ],
)
def test_a_streamed_step_is_the_one_that_waits_for_the_whole_batch(
    one_rank: dict[str, Outcome], name: str, waiting: str
) -> None:
    assert_same_step(one_rank[name], one_rank[waiting], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_on_two_ranks_of_any_kind(one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], kind: str) -> None:
    assert_same_step(two_ranks[f"streamed, {kind}"], one_rank["token_mean"], 2e-5)


def test_the_order_of_the_groups_changes_nothing(one_rank: dict[str, Outcome]) -> None:
    assert_same_step(one_rank["backwards"], one_rank["seq_mean_token_sum_norm"], 1e-5)


@pytest.mark.parametrize("what", ["truncate", "drop"])
def test_what_is_too_long_loses_tokens_and_not_its_place_in_the_denominator(
    one_rank: dict[str, Outcome], folder: Path, what: str
) -> None:
    plain, objective = load(make_model(folder, FAMILY)).double(), ObjectiveConfig()
    tokens, weights_N = plain_tokens(plain, objective, room=ROOM, truncate=what == "truncate")
    loss = (token_objective(tokens, objective).loss_N * weights_N).sum()
    loss.backward()
    found = one_rank[what]
    assert found.step["overlong_samples"] > 0
    assert_same_figures(found.step, {"loss": loss.item(), "trained_tokens": len(weights_N)}, 1e-5)
    assert_same_moves(found, minus_gradient(plain), 1e-4)


@pytest.mark.parametrize("name", ["skipping", "skipping, streamed", "skipping, data", "skipping, pipeline"])
def test_a_step_that_is_not_finite_changes_nothing_and_two_in_a_row_stop_the_trainer(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], name: str
) -> None:
    found = {**one_rank, **two_ranks}[name].found
    assert [step is None for step in found["steps"]] == [False, True, False, True]
    assert found["stayed"] == [False, True, False, True]
    assert "2 steps in a row" in found["stopped"]
    assert "the loss of the step 4 -> 5 is nan" in found["stopped"]
    assert "dumps/step-5.msgpack" in found["stopped"]
    dumps = sorted(path.name for path in ({**one_rank, **two_ranks}[name].run_dir / "dumps").iterdir())
    assert dumps == ["step-2.msgpack", "step-4.msgpack", "step-5.msgpack"]


def test_a_gradient_that_is_not_finite_is_skipped_like_a_loss(one_rank: dict[str, Outcome]) -> None:
    found = one_rank["endless"].found
    assert (found["steps"], found["stayed"]) == ([None], [True])
    assert "the gradient norm is nan" in found["warnings"][0]


def test_updates_before_the_one_that_is_not_finite_stand(one_rank: dict[str, Outcome]) -> None:
    found = one_rank["skipping, several"].found
    assert [step is None for step in found["steps"]] == [False, True, False, True]
    assert "2 steps in a row" in found["stopped"]

"""The trainer of a bfloat16 model with `model.fp32_head`, on one rank and on slices of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_programs.launching import Run, launch
from tests.support.trainer_programs.models import make_model

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one rank": {}},
    2: {
        "tensor": {"tensor_parallel": 2},
        "sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    },
}
"""Keys of the trainer by number of ranks and name."""


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[tuple[str, bool], dict[str, Any]]:
    """Results of the program, by layout and fp32_head."""
    model = make_model(folder, "qwen2-untied")
    found = {}
    for ranks, layouts in LAYOUTS.items():
        cases = {
            (name, fp32_head): Run(model, trainer, precision="bfloat16", fp32_head=fp32_head).prepare(
                folder, f"{name} {fp32_head}", ranks
            )
            for name, trainer in layouts.items()
            for fp32_head in (False, True)
        }
        listed = folder / f"float32-head-{ranks}.json"
        listed.write_text(json.dumps([*cases.values()]))
        launch("float32_head", ranks, listed)
        found |= {key: json.loads(Path(case["out"]).read_text()) for key, case in cases.items()}
    return found


ALL_LAYOUTS = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_log_probabilities_are_exact_for_the_hidden_states(
    results: dict[tuple[str, bool], dict[str, Any]], layout: str
) -> None:
    assert results[layout, True]["logprob_error"] < 5e-6
    assert results[layout, False]["logprob_error"] > 5e-4


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_gradients_are_as_exact_as_bfloat16_ones(results: dict[tuple[str, bool], dict[str, Any]], layout: str) -> None:
    assert results[layout, True]["gradient_error"] < 0.02
    # The gradient of the hidden states is the sum over all slices of the vocabulary.
    expected = results["one rank", False]["norm_gradient"]
    largest = max(map(abs, expected))
    assert results[layout, True]["norm_gradient"] == pytest.approx(expected, abs=0.03 * largest)

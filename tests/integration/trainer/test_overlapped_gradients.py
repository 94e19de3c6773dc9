"""Gradients are summed over ranks while the backward pass computes, and come to the same bits as when it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_programs.launching import Run, launch
from tests.support.trainer_programs.models import make_model

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("qwen2", {}),
    "several updates": ("qwen2", {"mini_batches": 2}),
    "recomputed": ("qwen2-untied", {"recompute": "full"}),
    "context": ("llama3", {"context_parallel": 2}),
    "experts": ("moe", {}),
    "experts apart": ("moe", {"expert_parallel": 2}),
    "offload": ("qwen2", {"offload": True}),
}
UPDATES = {"several updates": 2}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With and without overlap: steps of versions 0 to 3, of which the third is streamed."""
    folder, cases, outs = tmp_path_factory.mktemp("overlapped"), [], {}
    for name, (model, trainer) in LAYOUTS.items():
        keys = {key: value for key, value in trainer.items() if key != "offload"}
        precision = "float32"
        if "offload" in trainer:
            precision, keys = "bfloat16", {"optimizer": {"lr": 1e-3, "clip_grad": 1e6, "offload": True}}
        case = Run(make_model(folder, model), keys, precision=precision).prepare(folder, name, 2)
        cases.append(case)
        outs[name] = Path(case["out"])
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    launch("overlapped_gradients", 2, listed)
    return {name: json.loads(out.read_text()) for name, out in outs.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_the_same_to_the_last_bit(found: dict[str, Any], name: str) -> None:
    plain, overlapped = found[name]["False"], found[name]["True"]
    assert overlapped["weights"] == plain["weights"]
    # A rank adds up the squares of its part of every bucket, and with other buckets in another order.
    assert overlapped["norms"] == pytest.approx(plain["norms"], rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_begin_before_the_last_backward_pass_has_ended(found: dict[str, Any], name: str) -> None:
    plain, overlapped = found[name]["False"], found[name]["True"]
    buckets, updates = overlapped["buckets"], UPDATES.get(name, 1)
    assert buckets > 3
    # The first step finds out which gradients a bucket waits for; a streamed one does not know its last pass.
    assert overlapped["orders"][1] == overlapped["orders"][3] == ("s" * buckets + "f" * buckets) * updates
    assert plain["orders"] == ["fs" * plain["buckets"] * (1 if place == 2 else updates) for place in range(4)]

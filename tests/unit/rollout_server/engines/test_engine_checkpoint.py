"""Facts read from a checkpoint folder, and weights that do not match it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_grpo.errors import EngineError, WeightsCorrupt
from async_grpo.weights.manifest import TensorLayout, make_layout
from rollout_server.engines.model_files import check_layout, stop_tokens, tensor_shapes

SHAPES = {"embed.weight": [4, 2], "norm.weight": [2]}


def layout(shapes: dict[str, list[int]]) -> TensorLayout:
    return make_layout([(name, "float32", shape) for name, shape in shapes.items()])


@pytest.mark.parametrize(
    ("generation", "model", "expected"), [(7, 3, [7]), ([7, 8], 3, [7, 8]), (None, 3, [3]), (None, None, [])]
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: object, model: object, expected: list[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": model}))
    assert stop_tokens(tmp_path) == expected


def test_shapes_are_read_from_every_file(tmp_path: Path) -> None:
    for number, (name, shape) in enumerate(SHAPES.items()):
        save_file({name: np.zeros(shape, np.float32)}, tmp_path / f"model-{number}.safetensors")
    assert tensor_shapes(tmp_path) == SHAPES
    with pytest.raises(EngineError, match=r"no \*.safetensors"):
        tensor_shapes(tmp_path / "elsewhere")


@pytest.mark.parametrize("tied_head", [True, False])
def test_identical_tensors_match(tied_head: bool) -> None:
    check_layout(layout(SHAPES), SHAPES, tied_head=tied_head)


def test_only_a_tied_head_may_be_missing_on_either_side() -> None:
    with_head = SHAPES | {"lm_head.weight": [4, 2]}
    check_layout(layout(with_head), SHAPES, tied_head=True)
    check_layout(layout(SHAPES), with_head, tied_head=True)
    with pytest.raises(WeightsCorrupt, match=r"'lm_head\.weight'.*missing"):
        check_layout(layout(SHAPES), with_head, tied_head=False)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"embed.weight": [4, 2]}, r"'norm\.weight'.*missing"),
        (SHAPES | {"extra": [1]}, r"'extra'.*\[1\].*missing"),
        (SHAPES | {"norm.weight": [3]}, r"'norm\.weight'.*\[3\].*\[2\]"),
    ],
)
def test_differing_tensors_are_refused_by_name(shapes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(WeightsCorrupt, match=message):
        check_layout(layout(shapes), SHAPES, tied_head=False)

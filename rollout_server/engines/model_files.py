"""Reads what a Hugging Face checkpoint folder says about the model, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from async_grpo.errors import DataError, EngineError, WeightsCorrupt
from async_grpo.weights.manifest import TensorLayout

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


def stop_tokens(model_dir: Path) -> list[int]:
    """End-of-sequence token ids from generation_config.json, else from config.json, else none. Raises DataError."""
    for file in ("generation_config.json", "config.json"):
        ids = read_settings(model_dir / file).get("eos_token_id")
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    return []


def tensor_shapes(model_dir: Path) -> dict[str, list[int]]:
    """Shape of every tensor of the safetensors files, by name; no tensor is read. Raises EngineError if the folder has
    none, DataError for an incomplete file."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:
                names = tensors.keys()
                shapes.update((name, list(tensors.get_slice(name).get_shape())) for name in names)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} is not a whole safetensors file ({error}). Fetch it again") from None
    if not shapes:
        raise EngineError(f"{model_dir} holds no *.safetensors. Give a Hugging Face checkpoint folder.")
    return shapes


def vocabulary_size(model_dir: Path) -> int:
    """Number of rows of the embedding; token ids are below it. Raises EngineError, DataError."""
    rows = next((shape[0] for name, shape in tensor_shapes(model_dir).items() if name.endswith(_EMBEDDING)), 0)
    if not rows:
        raise EngineError(f"{model_dir} holds no tensor whose name ends in {_EMBEDDING}: its vocabulary is unknown.")
    return rows


def has_tied_head(model_dir: Path) -> bool:
    """Whether the output layer shares the weights of the embedding. Raises DataError."""
    return bool(read_settings(model_dir / "config.json").get("tie_word_embeddings", False))


def check_layout(layout: TensorLayout, shapes: Mapping[str, list[int]], *, tied_head: bool) -> None:
    """Raise WeightsCorrupt unless `layout` is exactly the checkpoint's tensors.

    A missing tensor would silently keep its old values, a missing part of a fused layer would be
    garbage. A tied head may be given or left out.
    """
    given = {spec.name: spec.shape for spec in layout.tensors}
    differing = sorted(name for name in given.keys() | shapes.keys() if given.get(name) != shapes.get(name))
    if tied_head and _HEAD in given.keys() ^ shapes.keys():
        differing.remove(_HEAD)
    if differing:
        name = differing[0]
        raise WeightsCorrupt(
            f"the weights do not fit the engine's model: {len(differing)} tensors differ, first {name!r}, which is "
            f"{given.get(name, 'missing')} in the weights and {shapes.get(name, 'missing')} in the checkpoint. "
            "Trainer and rollout servers must start from the same model; nothing was applied."
        )


def read_settings(file: Path) -> dict[str, Any]:
    """The object of a JSON file of the folder, {} if there is no such file. Raises DataError if it is not an object."""
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON ({error}). Fetch it again") from None
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a {type(found).__name__}, not a JSON object. Fetch it again")
    return found

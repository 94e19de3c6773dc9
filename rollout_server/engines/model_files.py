"""Facts about a model, read from its Hugging Face checkpoint folder without loading the model."""

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
        if isinstance(ids, list):
            return list(ids)
        if ids is not None:
            return [ids]
    return []


def tensor_shapes(model_dir: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in the safetensors files, by name; reads only the headers.

    Raises EngineError if the folder has no such file, DataError for an incomplete one.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                    shapes[name] = list(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} is not a complete safetensors file ({error}). Fetch it again") from None
    if not shapes:
        raise EngineError(f"{model_dir} has no *.safetensors. Name a Hugging Face checkpoint folder.")
    return shapes


def vocabulary_size(model_dir: Path) -> int:
    """Number of rows of the embedding; token ids are below it. Raises EngineError, DataError."""
    for name, shape in tensor_shapes(model_dir).items():
        if name.endswith(_EMBEDDING) and shape[0]:
            return shape[0]
    raise EngineError(f"{model_dir} has no tensor whose name ends in {_EMBEDDING}, so its vocabulary is unknown.")


def has_tied_head(model_dir: Path) -> bool:
    """True if the output layer shares the embedding's weights. Raises DataError."""
    return bool(read_settings(model_dir / "config.json").get("tie_word_embeddings", False))


def check_layout(layout: TensorLayout, shapes: Mapping[str, list[int]], *, tied_head: bool) -> None:
    """Raise WeightsCorrupt unless `layout` has exactly the checkpoint's tensors.

    A missing tensor would silently keep its old values; a missing part of a fused layer would be garbage. A tied head
    may be present or absent on either side.
    """
    layout_shapes = {spec.name: spec.shape for spec in layout.tensors}
    differing = []
    for name in sorted(layout_shapes.keys() | shapes.keys()):
        if layout_shapes.get(name) != shapes.get(name):
            differing.append(name)
    if tied_head and _HEAD in layout_shapes.keys() ^ shapes.keys():
        differing.remove(_HEAD)

    if differing:
        name = differing[0]
        raise WeightsCorrupt(
            f"the weights do not match the engine's model: {len(differing)} tensors differ. The first is {name!r}: "
            f"{layout_shapes.get(name, 'missing')} in the weights, {shapes.get(name, 'missing')} in the checkpoint. "
            "Nothing was applied. Start trainer and rollout servers from the same model."
        )


def read_settings(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if there is no such file. Raises DataError if it is not an object."""
    if not file.exists():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON ({error}). Fetch it again") from None
    if not isinstance(settings, dict):
        raise DataError(f"{file} is a JSON {type(settings).__name__}, not an object. Fetch it again")
    return settings

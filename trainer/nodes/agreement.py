"""Whether two nodes would train the same thing: configuration and first policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash
import yaml

_OWN_SECTIONS = ("redis", "weights", "launch", "telemetry", "runs_dir")
"""May differ: how a machine reaches the others, and under which path it has the shared folder."""

_ENDS_BYTES = 1 << 20


def differing_keys(one: str, other: str) -> list[str]:
    """Dotted keys that two resolved configurations (YAML) do not share, those of their machines apart.

    >>> differing_keys("{seed: 1, trainer: {optimizer: {lr: 1.0}}}", "{seed: 1, trainer: {optimizer: {lr: 2.0}}}")
    ['trainer.optimizer.lr']
    """
    before, after = _flat(yaml.safe_load(one)), _flat(yaml.safe_load(other))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return [key for key in keys if key.partition(".")[0] not in _OWN_SECTIONS]


def fingerprint(model: Path) -> str:
    """Of a model's configuration and weights: names, sizes, and the first and the last MiB of every file.

    Enough to tell models apart that were made or fetched differently, without reading all of one.
    """
    state = xxhash.xxh3_128()
    for file in sorted([*model.glob("*.safetensors"), *model.glob("*.json")]):
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            state.update(stream.read(_ENDS_BYTES))
            stream.seek(max(0, size - _ENDS_BYTES))
            state.update(stream.read(_ENDS_BYTES))
    return state.hexdigest()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.rstrip("."): value}
    return {key: found for name, below in value.items() for key, found in _flat(below, f"{prefix}{name}.").items()}

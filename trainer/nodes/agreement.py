"""Whether two nodes would train the same thing: configuration and first policy."""

from __future__ import annotations

from pathlib import Path

import xxhash
import yaml

from async_grpo.config.differences import differing_keys
from trainer.nodes.messages import Hello

_ENDS_BYTES = 1 << 20


def objection(own: Hello, other: Hello, *, nodes: int, place: str) -> str | None:
    """Why node 0, which says `own` of itself at `place`, cannot take the other node in. Value, rule and fix."""
    if other.id != own.id:
        return (
            f"node 0 at {place} trains {own.id!r}, and this one {other.id!r} (trainer.rendezvous.id, or the name of "
            "the run). Give each run its own port"
        )
    if not 0 < other.rank < nodes:
        return f"a node {other.rank} came to node 0, but trainer.nodes is {nodes}. Correct --node-rank"
    if keys := differing_keys(yaml.safe_load(own.config), yaml.safe_load(other.config)):
        return (
            f"node {other.rank} has other values than node 0 of {', '.join(keys)}: their ranks would not do the same. "
            "Start all nodes with the same CONFIG and -o"
        )
    if other.model != own.model:
        return (
            f"node {other.rank} has another first policy than node 0: their ranks would train parts of different "
            "models. Set model.path to one folder that all see, or to copies of the same files"
        )
    return None


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

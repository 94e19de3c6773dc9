"""How long the completions of the fixed work are: `constant`, `lognormal`, or `recorded` in a run of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from async_grpo.bench.rollout.work import LogNormal
from async_grpo.errors import ConfigError, DataError
from async_grpo.telemetry.jsonl import read_rows
from rollout_server.seeds import sample_seed

Kind = Literal["constant", "lognormal", "recorded"]

CONSTANT = 36
"""About the mean of the other."""
HEAVY_TAILED = LogNormal(median=24, sigma=1.0, longest=256)
"""The longest of 32 completions has some eight times the tokens of a typical one."""
_KEYS = ("length", "tokens", "completion_tokens")


def draw(kind: Kind, count: int, *, seed: int, recorded: Path | None = None) -> tuple[int, ...]:
    """The lengths of `count` completions in a row; the same arguments give the same ones.

    `recorded` is drawn from with replacement. Raises ConfigError if it is given for another kind, or not given;
    DataError if it holds no lengths.
    """
    if (kind == "recorded") != (recorded is not None):
        raise ConfigError(
            f"--lengths is {kind} and --lengths-from is {recorded}. Give a file of lengths (or the samples folder of a "
            "run) with --lengths recorded, and only then"
        )
    if recorded is not None:
        pool = read_lengths(recorded)
        return tuple(pool[place] for place in np.random.default_rng(seed).integers(0, len(pool), count).tolist())
    if kind == "constant":
        return (CONSTANT,) * count
    return tuple(HEAVY_TAILED.of(sample_seed(seed, "length", place)) for place in range(count))


def describe(kind: Kind) -> str:
    """In words."""
    return {"constant": f"{CONSTANT} tokens each", "lognormal": str(HEAVY_TAILED), "recorded": "recorded lengths"}[kind]


def read_lengths(path: Path) -> list[int]:
    """Tokens of every completion in a JSON-lines file, or in all of a folder such as `runs/NAME/samples`.

    A row is {"length": 24} (or "tokens", "completion_tokens"), or a row of a run's samples: then the ends of its
    completions' spans count. Raises DataError if there is none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = [length for file in files for row in read_rows(file) for length in _lengths_of(row) if length > 0]
    if not found:
        raise DataError(
            f"{path} holds no lengths of completions. Give JSON lines with a field {_KEYS[0]!r}, such as "
            '{"length": 24}, or the folder runs/NAME/samples of a run that has made groups'
        )
    return found


def _lengths_of(row: Mapping[str, Any]) -> Iterable[int]:
    for key in _KEYS:
        if isinstance(row.get(key), int):
            return [row[key]]
    completions = row.get("completions")
    return [one["spans"][-1][2] for one in completions if one.get("spans")] if isinstance(completions, list) else []

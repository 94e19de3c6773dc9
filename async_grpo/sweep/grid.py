"""What `--grid` and `--seeds` say. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.errors import ConfigError

_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "'\""
_RESERVED = {
    "seed": "Give the seeds with --seeds 1,2,3",
    "name": "A sweep names its runs itself; -o name=... names the sweep",
    "runs_dir": "A sweep keeps its runs in its own folder; --out says which",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """One key of the configuration and the values to try, as they were typed."""

    key: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """`key=a,b,c` -> Axis; a comma inside brackets or quotes belongs to its value. Raises ConfigError.

    >>> parse_axis("trainer.objective.corrections=[],[geo_rs, opsm]").values
    ('[]', '[geo_rs, opsm]')
    """
    key, equals, values = text.partition("=")
    key, parts = key.strip(), split_values(values)
    if not equals or not key or not all(parts):
        raise ConfigError(f"--grid {text!r} is not of the form key=value,value,... such as max_staleness=0,1,2,4")
    if key in _RESERVED:
        raise ConfigError(f"--grid {text!r}: {key} is no axis. {_RESERVED[key]}")
    twice = [value for value in parts if parts.count(value) > 1]
    if twice:
        raise ConfigError(f"--grid {text!r}: the value {twice[0]} stands twice. Remove one")
    return Axis(key, tuple(parts))


def parse_axes(texts: Sequence[str], overrides: Sequence[str]) -> list[Axis]:
    """Every `--grid`. Raises ConfigError, also for a key that stands twice or in `-o`, too."""
    axes = [parse_axis(text) for text in texts]
    if not axes:
        raise ConfigError(
            "a sweep needs something to vary: --grid key=value,value,... such as --grid max_staleness=0,2"
        )
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--grid {key}=... stands twice. Give all values of {key} in one --grid")
        if key in [override.partition("=")[0] for override in overrides]:
            raise ConfigError(f"{key} is both in --grid and in -o: which is meant? Remove one of them")
    return axes


def parse_seeds(text: str) -> tuple[int, ...]:
    """`1,2,3` -> (1, 2, 3). Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--seeds {text!r} is not a list of whole numbers such as 1,2,3")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r} names a seed twice: the same run would be made twice. Remove one")
    return tuple(seeds)


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every choice of one value per axis, the last axis fastest; the product of no axes is one empty choice."""
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def split_values(text: str) -> list[str]:
    """At the commas that stand in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]

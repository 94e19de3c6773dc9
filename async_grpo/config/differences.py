"""Which values two resolved configurations do not share, and which may differ from machine to machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MACHINE_SECTIONS = ("runs_dir", "redis", "launch", "telemetry", "weights")
"""How a machine reaches the others, and where it reads and writes: nothing that is learned depends on them."""


def differing_keys(before: Any, after: Any, *, free: Iterable[str] = MACHINE_SECTIONS) -> list[str]:
    """Dotted keys whose values differ, sorted, between two configurations as plain data; `free` ones do not count.

    >>> differing_keys({"redis": {"url": "a"}, "trainer": {"nodes": 2}}, {"seed": 1, "trainer": {"nodes": 3}})
    ['seed', 'trainer.nodes']
    """
    free = tuple(free)
    return sorted(key for key in _differences(before, after) if not is_at_or_below(key, free))


def is_at_or_below(key: str, sections: Iterable[str]) -> bool:
    """Whether the dotted key is one of these, or a part of one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _differences(before: Any, after: Any, prefix: str = "") -> set[str]:
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return set() if before == after else {prefix.rstrip(".")}
    keys = before.keys() | after.keys()
    return set().union(*(_differences(before.get(key), after.get(key), f"{prefix}{key}.") for key in keys))

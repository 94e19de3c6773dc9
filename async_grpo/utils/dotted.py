"""Values at dotted keys of nested mappings, such as `trainer.optimizer.lr` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def look_up(mapping: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value at a dotted key; `default` if there is none.

    >>> look_up({"trainer": {"optimizer": {"lr": 0.0001}}}, "trainer.optimizer.lr")
    0.0001
    """
    value: Any = mapping
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value

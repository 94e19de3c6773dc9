"""Classes of a Megatron layer spec swapped for others, with everything else of the spec as it is.

Parameters keep their names, because names come from the places of a spec and not from the classes in them: the plan of
which parameter holds which tensor is the same on every platform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def swap(node: Any, by: Mapping[type, type]) -> Any:
    """A copy of `node` (a spec, its submodules, a list of specs) with the classes of `by` swapped, at any depth."""
    if isinstance(node, type):
        return by.get(node, node)
    if isinstance(node, list | tuple):
        return type(node)(swap(child, by) for child in node)
    if dataclasses.is_dataclass(node):
        return dataclasses.replace(  # type: ignore[type-var]  # classes have been dealt with
            node,
            **{field.name: swap(getattr(node, field.name), by) for field in dataclasses.fields(node) if field.init},
        )
    return node

"""What a reward may look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Item(NamedTuple):
    """One completion with the task that it answers."""

    completion: str
    answer: str
    prompt: str = ""
    metadata: Mapping[str, str] = {}


DRY_ITEM = Item("<think>0 + 1 = 1</think><answer>1</answer>", "1", "0 + 1 = ?")
"""What every reward function of a user is tried on before anything starts."""

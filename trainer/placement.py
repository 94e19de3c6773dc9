"""Tensors from one device to another, whatever holds them.

Batches are made on the CPU, where they come from. Of a micro-batch, what the network reads goes to the device when its
turn has come; the log-probabilities that it finds come back, because the objective is evaluated on the CPU, on every
platform alike: a few numbers a token, statistics in float64 (which not every accelerator has), and one meeting of host
and device a micro-batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def place(value: T, device: torch.device | str) -> T:
    """`value` with its tensors on `device`: a tensor, or dataclasses, tuples and lists of them, at any depth.

    Tensors that are there already are not copied; anything else is left as it is. A gradient finds its way back.
    """
    placed: Any = value
    if isinstance(value, Tensor):
        placed = value.to(device)
    elif isinstance(value, tuple | list):
        placed = type(value)(place(part, device) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        placed = dataclasses.replace(value, **{name: place(part, device) for name, part in parts.items()})
    return placed

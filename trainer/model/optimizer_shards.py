"""The masters and moments of this rank as shards of whole tensors, for checkpoints that any layout of ranks can read.

ZeRO-1 gives a rank a range of the elements of a parameter. A checkpoint stores boxes (a start and a size per axis),
and a range of a matrix is at most three of them:

    . . . X X    end of a row
    X X X X X    whole rows
    X X . . .    start of a row

A parameter that lies on this rank as a whole is one box. So every rank writes and reads its own 12 bytes per parameter
in place: nothing is gathered, and no rank allocates the state of another one.

Megatron's own `fully_reshardable` form has the same keys and shapes, so each can read what the other has written. It
gathers the whole state on one rank to save it, and to load it allocates the whole state on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

STORED = ("param", "exp_avg", "exp_avg_sq")
"""Tensors stored per parameter. The step count is equal for all parameters, and is stored with their groups."""

_KEY = "optimizer.state"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, size) along every axis."""


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up the elements `start` to `stop` of a row-major tensor, in the order of elements.

    >>> list(boxes_of_range((4, 5), 3, 17))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    >>> list(boxes_of_range((4, 5), 6, 8))
    [((1, 1), (1, 2))]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return

    row = prod(shape[1:])
    first_whole, end_of_whole = -(-start // row), stop // row
    if first_whole > end_of_whole:
        yield from _boxes_of_row(shape, end_of_whole, start - end_of_whole * row, stop - end_of_whole * row)
        return

    if start < first_whole * row:
        yield from _boxes_of_row(shape, first_whole - 1, start - (first_whole - 1) * row, row)
    if first_whole < end_of_whole:
        rest = shape[1:]
        yield (first_whole, *(0 for _ in rest)), (end_of_whole - first_whole, *rest)
    if end_of_whole * row < stop:
        yield from _boxes_of_row(shape, end_of_whole, 0, stop - end_of_whole * row)


def _boxes_of_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, size in boxes_of_range(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def sharded_optimizer_state(
    part: Any, model_state: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """The state of this rank as {parameter: {name of the tensor: its boxes}}, sharing the optimizer's memory.

    Replaces Megatron's `sharded_param_state_fully_reshardable` of the distributed optimizer `part`, and has its
    arguments.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    of_parameters = {id(entry.data): entry for entry in nested_values(sharded)}

    state = {}
    for index, (parameter, start, tensors) in enumerate(_own_ranges(part)):
        whole = of_parameters[id(parameter)]
        state[index] = {name: _boxes(whole, name, tensor, start) for name, tensor in tensors.items()}
    return state


@torch.no_grad()
def restore_optimizer_state(part: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """Put loaded boxes where the optimizer `part` has its state, unless they were read into that memory."""
    for index, (_parameter, _start, tensors) in enumerate(_own_ranges(part)):
        for name, tensor in tensors.items():
            position = 0
            for box in loaded[index][name]:
                target = tensor[position : position + box.numel()]
                if target.data_ptr() != box.data_ptr():
                    target.copy_(box.flatten())
                position += box.numel()


def _own_ranges(part: Any) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
    """Yield (parameter of the model, first of its elements on this rank, those elements of each stored tensor)."""
    for of_buffer in part.gbuf_ranges:
        for buckets in of_buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    yield parameter, ranges["param"].start, {name: tensors[name] for name in STORED}


def _boxes(whole: ShardedTensor | ShardedTensorFactory, name: str, tensor: Tensor, start: int) -> list[ShardedTensor]:
    """The boxes of a rank that has the elements of `whole` from `start` on in `tensor`."""
    boxes = []
    for piece in _pieces(whole, f"{_KEY}.{name}.{whole.key}", tensor.dtype):
        first = piece.data.storage_offset()
        begin, end = max(start, first), min(start + tensor.numel(), first + piece.data.numel())
        position = begin - start
        for offset, size in boxes_of_range(tuple(piece.local_shape), begin - first, end - first):
            data = tensor[position : position + prod(size)]
            boxes.append(_box(piece, offset, size, data))
            position += prod(size)
    return boxes


def _pieces(whole: ShardedTensor | ShardedTensorFactory, key: str, dtype: torch.dtype) -> list[ShardedTensor]:
    """What `whole` is stored as, in the order of its elements: gate and up of an MLP, for example, are apart.

    The tensors have no memory; their storage offsets are the places of the pieces in `whole`.
    """
    assert whole.data is not None
    empty = torch.empty(whole.data.shape, dtype=dtype, device="meta")
    if isinstance(whole, ShardedTensor):
        return [replace(whole, key=key, data=empty, dtype=dtype)]
    pieces = list(nested_values({"built": replace(whole, key=key, data=empty).build()}))
    assert all(piece.data.is_contiguous() for piece in pieces), f"{key} is stored as pieces that are not contiguous"
    return sorted(pieces, key=lambda piece: int(piece.data.storage_offset()))


def _box(piece: ShardedTensor, offset: tuple[int, ...], size: tuple[int, ...], data: Tensor) -> ShardedTensor:
    """One box of a piece. Its offsets are no multiples of its size, so it is not part of a regular grid."""
    count = piece.prepend_axis_num
    before, inside = piece.global_offset[:count], piece.global_offset[count:]
    shape = (1,) * count + size
    return ShardedTensor(
        key=piece.key,
        data=data.view(shape),
        dtype=data.dtype,
        local_shape=shape,
        global_shape=piece.global_shape,
        global_offset=(*before, *(base + step for base, step in zip(inside, offset, strict=True))),
        axis_fragmentations=None,
        # Data-parallel ranks have different boxes, so each writes its own. The other replicas remain replicas.
        replica_id=(*piece.replica_id[:2], 0),
        allow_shape_mismatch=piece.allow_shape_mismatch,
    )

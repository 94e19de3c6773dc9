"""This rank's masters and moments as shards of whole tensors, for checkpoints that any layout of ranks can load.

ZeRO-1 assigns a rank a range of the elements of a parameter. A checkpoint stores boxes (a start and a size per axis),
and a range of a matrix consists of at most three boxes:

    . . . X X    end of a row
    X X X X X    whole rows
    X X . . .    start of a row

A parameter whose elements are all on this rank is one box. So every rank saves and loads its own 12 bytes per parameter
in place: nothing is gathered, and no rank allocates the state of another rank.

Megatron's own `fully_reshardable` format has the same keys and shapes, so each implementation can load the checkpoints
of the other. Megatron gathers the whole state on one rank to save it, and allocates the whole state on every rank to
load it.
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
"""Tensors saved per parameter. The step count is the same for all parameters, and is saved with their groups."""

_KEY = "optimizer.state"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, size) along every axis."""


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that cover the elements `start` to `stop` of a row-major tensor, in the order of elements.

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

    row_shape = shape[1:]
    row_size = prod(row_shape)
    first_whole = -(-start // row_size)
    end_of_whole = stop // row_size
    if first_whole > end_of_whole:
        # The range is inside one row.
        row_start = end_of_whole * row_size
        yield from _boxes_of_row(shape, end_of_whole, start - row_start, stop - row_start)
        return

    if start < first_whole * row_size:
        row = first_whole - 1
        yield from _boxes_of_row(shape, row, start - row * row_size, row_size)
    if first_whole < end_of_whole:
        yield (first_whole, *(0 for _ in row_shape)), (end_of_whole - first_whole, *row_shape)
    if end_of_whole * row_size < stop:
        yield from _boxes_of_row(shape, end_of_whole, 0, stop - end_of_whole * row_size)


def _boxes_of_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, size in boxes_of_range(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def sharded_optimizer_state(
    part: Any, model_state: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Return this rank's state as {parameter: {name of the tensor: its boxes}}, sharing the optimizer's memory.

    Replaces the method `sharded_param_state_fully_reshardable` of Megatron's distributed optimizer `part`, with the
    same arguments.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    sharded_of_parameter = {id(entry.data): entry for entry in nested_values(sharded)}

    state = {}
    for index, (parameter, start, tensors) in enumerate(_own_ranges(part)):
        whole = sharded_of_parameter[id(parameter)]
        state[index] = {name: _make_boxes(whole, name, tensor, start) for name, tensor in tensors.items()}
    return state


@torch.no_grad()
def restore_optimizer_state(part: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """Copy loaded boxes into the state of the optimizer `part`, unless they were read into that memory directly."""
    for index, (_parameter, _start, tensors) in enumerate(_own_ranges(part)):
        for name, tensor in tensors.items():
            position = 0
            for box in loaded[index][name]:
                target = tensor[position : position + box.numel()]
                if target.data_ptr() != box.data_ptr():
                    target.copy_(box.flatten())
                position += box.numel()


def _own_ranges(part: Any) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
    """Yield (parameter of the model, start of its range on this rank, this range of each saved tensor)."""
    for buckets_of_dtype in part.gbuf_ranges:
        for buckets in buckets_of_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    yield parameter, ranges["param"].start, {name: tensors[name] for name in STORED}


def _make_boxes(
    whole: ShardedTensor | ShardedTensorFactory, name: str, tensor: Tensor, start: int
) -> list[ShardedTensor]:
    """Return the boxes of `tensor`, which contains the elements of `whole` from `start` on."""
    boxes = []
    for piece in _saved_pieces(whole, f"{_KEY}.{name}.{whole.key}", tensor.dtype):
        first = piece.data.storage_offset()
        begin = max(start, first)
        end = min(start + tensor.numel(), first + piece.data.numel())
        position = begin - start
        for offset, size in boxes_of_range(tuple(piece.local_shape), begin - first, end - first):
            data = tensor[position : position + prod(size)]
            boxes.append(_make_box(piece, offset, size, data))
            position += prod(size)
    return boxes


def _saved_pieces(whole: ShardedTensor | ShardedTensorFactory, key: str, dtype: torch.dtype) -> list[ShardedTensor]:
    """Return the tensors that `whole` is saved as, in the order of elements: gate and up of an MLP, for example.

    The tensors have no memory. Their storage offsets are the positions of the pieces in `whole`.
    """
    assert whole.data is not None
    empty = torch.empty(whole.data.shape, dtype=dtype, device="meta")
    if isinstance(whole, ShardedTensor):
        return [replace(whole, key=key, data=empty, dtype=dtype)]
    pieces = list(nested_values({"built": replace(whole, key=key, data=empty).build()}))
    assert all(piece.data.is_contiguous() for piece in pieces), f"the pieces of {key} are not contiguous"
    return sorted(pieces, key=lambda piece: int(piece.data.storage_offset()))


def _make_box(piece: ShardedTensor, offset: tuple[int, ...], size: tuple[int, ...], data: Tensor) -> ShardedTensor:
    added_axes = piece.prepend_axis_num
    outer_offset = piece.global_offset[:added_axes]
    inner_offset = piece.global_offset[added_axes:]
    shape = (1,) * added_axes + size
    return ShardedTensor(
        key=piece.key,
        data=data.view(shape),
        dtype=data.dtype,
        local_shape=shape,
        global_shape=piece.global_shape,
        global_offset=(*outer_offset, *(base + step for base, step in zip(inner_offset, offset, strict=True))),
        # The offsets are not multiples of the size, so the box is not a cell of a regular grid.
        axis_fragmentations=None,
        # Data-parallel ranks have different boxes, so each saves its own. The other two replica numbers stay.
        replica_id=(*piece.replica_id[:2], 0),
        allow_shape_mismatch=piece.allow_shape_mismatch,
    )

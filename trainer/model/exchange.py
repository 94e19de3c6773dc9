"""What the ranks that share the sequences (context parallelism) exchange, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_context(part: Tensor, group: Any) -> Tensor:
    """[T, ...] of each rank -> [ranks * T, ...] of all of them, in the order of the ranks.

    Every rank uses all of it, so the gradient of a part is the sum of what all ranks found for it.
    """
    gathered: Tensor = _Gather.apply(part, group)
    return gathered


def fill_in(values_M: Tensor, mine_M: Tensor, count: int, group: Any) -> Tensor:
    """The values of all `count` tokens, of which this rank computed those at `mine_M`; no two ranks the same.

    What follows is computed by every rank alike, so the gradient of a value is the one found here, not a sum.
    """
    filled: Tensor = _FillIn.apply(values_M, mine_M, count, group)
    return filled


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.shape = group, part.shape
        gathered = part.new_empty(group.size(), *part.shape)
        dist.all_gather(list(gathered.unbind()), part.contiguous(), group=group)
        return gathered.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = gradients[0].new_empty(ctx.shape)
        dist.reduce_scatter_tensor(own, gradients[0].contiguous(), group=ctx.group)
        return own, None


class _FillIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, mine_M: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(mine_M)
        filled = values_M.new_zeros(count)
        filled[mine_M] = values_M
        dist.all_reduce(filled, group=group)
        return filled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (mine_M,) = ctx.saved_tensors
        return gradients[0].index_select(0, mine_M), None, None, None

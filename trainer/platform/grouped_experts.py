"""Experts of a rank as two grouped matrix products, in the place of Megatron's one small product per expert and matrix.

    tokens, sorted by expert [T, h]                    offsets: where the tokens of each expert end
        --fc1_weights [E, 2f, h]-->  gate and up [T, 2f]
        --silu(gate) * up * probability-->  [T, f]
        --fc2_weights [E, h, f]-->  [T, h]

    GroupedExperts      torch.nn.functional.grouped_mm: in torch from 2.10 on. From capability 9.0 on one kernel; below,
                        and on the CPU, torch loops over the experts and waits for the offsets
    NpuGroupedExperts   torch_npu.npu_grouped_matmul, which has no gradient of its own; called as MindSpeed calls it
    SequentialMLP       Megatron's own, the reference: everywhere else

All experts of a rank are one parameter for each of the two matrices. Expert e's part of it lies as SequentialMLP's
parameter does. So checkpoints hold the same tensors, and either form reads the other's
(`trainer.model.weight_map.find_weight` does the same for Hugging Face tensors).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

ALIGNMENT_BYTES = 16
"""Rows of the matrices must be multiples of this."""


class GroupedExperts(MegatronModule):
    """The experts of this rank. Signature: Megatron's SequentialMLP."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self._expert_ranks, self._replicas = pg_collection.ep, pg_collection.expt_dp
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.fc1_weights = self._parameter(num_local_experts, 2 * inner, hidden)
        self.fc2_weights = self._parameter(num_local_experts, hidden, inner)

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        """Not initialised: weights are always loaded."""
        device = torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(*shape, device=device, dtype=self.config.params_dtype))
        # Tensor-parallel ranks have different experts, so each of them counts in the norm of the gradient.
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(self, tokens: Tensor, tokens_per_expert: Any, probabilities: Tensor) -> tuple[Tensor, None]:
        """tokens [T, h], sorted by expert; tokens_per_expert [E], on the host or the device; probabilities [T]."""
        if tokens.shape[0] == 0:
            # Kernels take no empty product. Everything still needs a gradient: the ranks sum those of the weights
            # together, and send those of tokens and probabilities back to each other. One that had none would be
            # waited for.
            unused = self.fc1_weights[0, :0].sum() + self.fc2_weights[0, :0].sum()
            return (tokens * probabilities[:, None] + unused).to(tokens.dtype), None

        counts = torch.as_tensor(tokens_per_expert)
        offsets = counts.cumsum(0).to(tokens.device, non_blocking=True)
        gate, up = self._multiply(tokens, self.fc1_weights, offsets).chunk(2, -1)
        activated = F.silu(gate) * up
        weighted = (activated * probabilities[:, None]).to(tokens.dtype)
        return self._multiply(weighted, self.fc2_weights, offsets), None

    def _multiply(self, tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """tokens [T, in], weights [E, out, in], offsets [E] -> [T, out]"""
        product: Tensor = F.grouped_mm(tokens, weights.transpose(1, 2), offs=offsets.to(torch.int32))
        return product

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As SequentialMLP stores its experts: one tensor for each expert and matrix, gate and up apart."""
        first = self._expert_ranks.rank() * self.num_local_experts
        count = self._expert_ranks.size() * self.num_local_experts
        layers = len(sharded_offsets)

        def split(key: str, stacked: Tensor, replica: Any, pieces: int) -> list[ShardedTensor]:
            found = []
            for expert, weight in enumerate(stacked):
                offsets = (*sharded_offsets, (layers, first + expert, count))
                for number, piece in enumerate(weight.chunk(pieces)):
                    place = (layers + 1, number, pieces)
                    found.append(
                        ShardedTensor.from_rank_offsets(
                            key, piece, *offsets, place, replica_id=replica, prepend_axis_num=layers + 1
                        )
                    )
            return found

        def factory(matrix: str, parameter: Tensor, pieces: int) -> ShardedTensorFactory:
            shape = parameter.shape

            @torch.no_grad()
            def build(key: str, stacked: Tensor, replica: Any, _flattened: Any) -> list[ShardedTensor]:
                # Parts of a parameter's optimizer state are given flat.
                return split(key, stacked.view(shape), replica, pieces)

            @torch.no_grad()
            def merge(parts: Sequence[Tensor]) -> Tensor:
                return torch.cat(list(parts)).view(shape)

            replica = (0, 0, self._replicas.rank())
            return ShardedTensorFactory(f"{prefix}experts.{matrix}.weight", parameter, build, merge, replica)

        state: dict[str, Any] = {
            f"{prefix}fc1_weights": factory("linear_fc1", self.fc1_weights, pieces=2),
            f"{prefix}fc2_weights": factory("linear_fc2", self.fc2_weights, pieces=1),
        }
        for matrix in ("linear_fc1", "linear_fc2"):
            # Linear layers of Megatron have an empty object beside each weight, and would miss it on loading.
            key, replica = f"{prefix}experts.{matrix}._extra_state", (0, 0, self._replicas.rank())
            for expert in range(self.num_local_experts):
                offsets = (*sharded_offsets, (layers, first + expert, count))
                entry = make_sharded_object_for_checkpoint(None, key, offsets, replica)
                state[f"{prefix}{expert}.{matrix}._extra_state"] = entry
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix) and name.endswith("_extra_state")]:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class NpuGroupedExperts(GroupedExperts):
    """By torch_npu's operator."""

    def _multiply(self, tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        product: Tensor = _NpuGroupedProduct.apply(tokens, weights, offsets.to(torch.int64))
        return product


class _NpuGroupedProduct(torch.autograd.Function):
    """tokens [T, in], weights [E, out, in], offsets int64 [E] -> [T, out]"""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights, offsets)
        return _npu_product(tokens, weights.transpose(1, 2), offsets, by_rows=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        tokens, weights, offsets = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_tokens = to_weights = None
        if ctx.needs_input_grad[0]:
            to_tokens = _npu_product(gradient, weights, offsets, by_rows=True)
        if ctx.needs_input_grad[1]:
            to_weights = _npu_product(gradient.t(), tokens, offsets, by_rows=False)
        return to_tokens, to_weights, None


def _npu_product(left: Tensor, right: Tensor, offsets: Tensor, *, by_rows: bool) -> Tensor:
    """[T, in] x [E, in, out] -> [T, out] by groups of rows; or [out, T] x [T, in] -> [E, out, in] by groups of T."""
    kernel = importlib.import_module("torch_npu").npu_grouped_matmul
    product: Tensor = kernel(
        [left],
        [right],
        group_list=offsets,
        split_item=3,  # one tensor in, one out
        group_type=0 if by_rows else 2,
        group_list_type=0,  # ends of the groups, not lengths
    )[0]
    return product


def permute_without_waiting(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Megatron's `permute`: tokens [N, h] in the order of their experts, their probabilities, and which each one is.

    Megatron selects by mask, twice, and each time the host waits for the device to know how many are selected. That is
    known: every token goes to as many experts, so sorting their numbers gives the same order.
    """
    plain = not fused and not drop_and_pad and probs is not None and len(tokens) > 0
    if not plain or num_out_tokens is None:
        return moe_utils.permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    assert probs is not None
    copies = num_out_tokens // len(tokens)
    experts_NK = routing_map.to(probs.dtype).topk(copies, dim=1).indices
    order = experts_NK.flatten().argsort(stable=True)
    permuted_probs = probs.gather(1, experts_NK).flatten().index_select(0, order)
    sources = order.div(copies, rounding_mode="floor")
    return tokens.index_select(0, sources), permuted_probs, sources


def has_grouped_product() -> bool:
    """True if torch has `grouped_mm`: from 2.10 on."""
    return hasattr(F, "grouped_mm")


def is_aligned(config: Any) -> bool:
    """True if the rows of all matrices of an expert are multiples of ALIGNMENT_BYTES."""
    widths = (config.hidden_size, config.moe_ffn_hidden_size)
    return all(width * config.params_dtype.itemsize % ALIGNMENT_BYTES == 0 for width in widths)

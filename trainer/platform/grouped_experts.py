"""Experts of a rank as two grouped matrix products, instead of Megatron's one small product per expert and matrix.

    tokens, sorted by expert [T, h]                    offsets: index after the last token of each expert
        --fc1_weights [E, 2f, h]-->  gate and up [T, 2f]
        --silu(gate) * up * probability-->  [T, f]
        --fc2_weights [E, h, f]-->  [T, h]

    GroupedExperts      torch.nn.functional.grouped_mm, in torch from 2.10 on. One kernel from capability 9.0 on; on
                        other GPUs and on the CPU torch loops over the experts and waits for the offsets
    NpuGroupedExperts   torch_npu.npu_grouped_matmul, which has no gradient of its own; called as MindSpeed calls it
    SequentialMLP       Megatron's own, the reference; used otherwise

All experts of a rank share one parameter per matrix. The part of expert e has the layout of SequentialMLP's parameter,
so checkpoints hold the same tensors and either class reads the other's
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
"""Size of which the rows of the matrices must be multiples."""


class GroupedExperts(MegatronModule):
    """The experts of this rank. Has the signature of Megatron's SequentialMLP."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self._expert_ranks = pg_collection.ep
        self._replicas = pg_collection.expt_dp
        hidden = config.hidden_size
        inner = config.moe_ffn_hidden_size
        self.fc1_weights = self._new_parameter(num_local_experts, 2 * inner, hidden)
        self.fc2_weights = self._new_parameter(num_local_experts, hidden, inner)

    def _new_parameter(self, *shape: int) -> torch.nn.Parameter:
        """Return a parameter that is not initialised: weights are always loaded."""
        device = torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(*shape, device=device, dtype=self.config.params_dtype))
        # Mark it as cut by tensor parallelism: these ranks have different experts, and otherwise Megatron would count
        # those of the first rank only in the norm of the gradient.
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(self, tokens: Tensor, tokens_per_expert: Any, probabilities: Tensor) -> tuple[Tensor, None]:
        """tokens [T, h], sorted by expert; tokens_per_expert [E], on the host or the device; probabilities [T]."""
        if tokens.shape[0] == 0:
            # The kernels refuse empty products, but weights, tokens and probabilities still need gradients. The ranks
            # sum the gradients of the weights and exchange those of tokens and probabilities in collectives, which
            # would wait for a rank that has none.
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
        """Return the entries that SequentialMLP would: one tensor per expert and matrix, gate and up separate."""
        first_expert = self._expert_ranks.rank() * self.num_local_experts
        expert_count = self._expert_ranks.size() * self.num_local_experts
        layer_axes = len(sharded_offsets)
        replica_id = (0, 0, self._replicas.rank())

        def expert_offsets(expert: int) -> tuple[Any, ...]:
            return (*sharded_offsets, (layer_axes, first_expert + expert, expert_count))

        def split_experts(key: str, stacked: Tensor, replica_id: Any, pieces: int) -> list[ShardedTensor]:
            tensors = []
            for expert, weight in enumerate(stacked):
                for index, piece in enumerate(weight.chunk(pieces)):
                    tensor = ShardedTensor.from_rank_offsets(
                        key,
                        piece,
                        *expert_offsets(expert),
                        (layer_axes + 1, index, pieces),
                        replica_id=replica_id,
                        prepend_axis_num=layer_axes + 1,
                    )
                    tensors.append(tensor)
            return tensors

        def make_factory(matrix: str, parameter: Tensor, pieces: int) -> ShardedTensorFactory:
            shape = parameter.shape

            @torch.no_grad()
            def build(key: str, stacked: Tensor, replica_id: Any, _flattened: Any) -> list[ShardedTensor]:
                # Megatron passes the optimizer state of a parameter as a flat tensor.
                return split_experts(key, stacked.view(shape), replica_id, pieces)

            @torch.no_grad()
            def merge(parts: Sequence[Tensor]) -> Tensor:
                return torch.cat(list(parts)).view(shape)

            return ShardedTensorFactory(f"{prefix}experts.{matrix}.weight", parameter, build, merge, replica_id)

        state: dict[str, Any] = {
            f"{prefix}fc1_weights": make_factory("linear_fc1", self.fc1_weights, pieces=2),
            f"{prefix}fc2_weights": make_factory("linear_fc2", self.fc2_weights, pieces=1),
        }
        # Linear layers of Megatron store an empty object with each weight. SequentialMLP could not load a checkpoint
        # without them.
        for matrix in ("linear_fc1", "linear_fc2"):
            key = f"{prefix}experts.{matrix}._extra_state"
            for expert in range(self.num_local_experts):
                entry = make_sharded_object_for_checkpoint(None, key, expert_offsets(expert), replica_id)
                state[f"{prefix}{expert}.{matrix}._extra_state"] = entry
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # torch would report the empty objects as unexpected keys: this module has no linear layers.
        extra = [name for name in state_dict if name.startswith(prefix) and name.endswith("_extra_state")]
        for name in extra:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class NpuGroupedExperts(GroupedExperts):
    """Experts computed by torch_npu's operator."""

    def _multiply(self, tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        product: Tensor = _NpuGroupedProduct.apply(tokens, weights, offsets.to(torch.int64))
        return product


class _NpuGroupedProduct(torch.autograd.Function):
    """tokens [T, in], weights [E, out, in], offsets int64 [E] -> [T, out]"""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights, offsets)
        return _npu_grouped_product(tokens, weights.transpose(1, 2), offsets, by_rows=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        tokens, weights, offsets = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        token_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            token_gradient = _npu_grouped_product(gradient, weights, offsets, by_rows=True)
        if ctx.needs_input_grad[1]:
            weight_gradient = _npu_grouped_product(gradient.t(), tokens, offsets, by_rows=False)
        return token_gradient, weight_gradient, None


def _npu_grouped_product(left: Tensor, right: Tensor, offsets: Tensor, *, by_rows: bool) -> Tensor:
    """Multiply group by group.

    With `by_rows` [T, in] x [E, in, out] -> [T, out], else [out, T] x [T, in] -> [E, out, in]; groups are along T.
    """
    kernel = importlib.import_module("torch_npu").npu_grouped_matmul
    product: Tensor = kernel(
        [left],
        [right],
        group_list=offsets,
        split_item=3,  # return one tensor, not one per group
        group_type=0 if by_rows else 2,
        group_list_type=0,  # offsets are ends of the groups, not lengths
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
    """Megatron's `permute`: return tokens [N, h] sorted by expert, their probabilities, and their original indices.

    Megatron selects by mask, twice, and each time the host waits until the device has counted the selected tokens. We
    need no count: every token goes to the same number of experts, so sorting the expert numbers gives the same order.
    """
    if fused or drop_and_pad or probs is None or num_out_tokens is None or len(tokens) == 0:
        return moe_utils.permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)

    copies = num_out_tokens // len(tokens)
    experts_NK = routing_map.to(probs.dtype).topk(copies, dim=1).indices
    order = experts_NK.flatten().argsort(stable=True)
    permuted_probs = probs.gather(1, experts_NK).flatten().index_select(0, order)
    sources = order.div(copies, rounding_mode="floor")
    return tokens.index_select(0, sources), permuted_probs, sources


def has_grouped_product() -> bool:
    """True if torch has `grouped_mm`, from 2.10 on."""
    return hasattr(F, "grouped_mm")


def is_aligned(config: Any) -> bool:
    """True if the rows of all matrices of an expert are multiples of ALIGNMENT_BYTES."""
    widths = (config.hidden_size, config.moe_ffn_hidden_size)
    return all(width * config.params_dtype.itemsize % ALIGNMENT_BYTES == 0 for width in widths)

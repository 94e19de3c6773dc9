"""A Megatron GPTModel with the architecture of a Hugging Face configuration.

Its output layer computes only the trained positions. Predictions of prompt and environment tokens have no loss; for
math problems they are a third of all, and the output layer is the widest matrix of the model. The omitted logits would
be multiplied by 0, so the result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from async_grpo.config.trainer import TrainerConfig
from async_grpo.models.shapes import shape_of
from trainer.batch.layout import PackedSequences, Rotation
from trainer.model.families import read_rope
from trainer.model.float32_head import float32_logits
from trainer.model.layers import build_block_spec
from trainer.platform import Platform
from trainer.platform.base import LayerRole
from trainer.platform.grouped_experts import permute_without_waiting

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class TrainedPositionsModel(GPTModel):
    """A GPTModel that returns, on the last pipeline stage, logits [1, M, V] of the M `packed_seq_params.trained`
    positions.

    With a `rotation`, cosines and sines are computed once per micro-batch and applied by attention. Megatron's own
    code for packed sequences computes them in every layer, and reads the lengths from the device to do so.
    """

    rotation: type[Rotation] | None = None
    fp32_head: bool = False
    """Compute the logits of a bfloat16 model in float32."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.config.sequence_parallel:
            # The output layer would gather all positions, and scatter the summed gradients in its backward pass.
            # `_postprocess` does both instead, so that the selection comes between gather and output layer.
            self.output_layer.sequence_parallel = False
            self.output_layer.disable_grad_reduce = True

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, *args: Any, packed_seq_params: PackedSequences, **kwargs: Any
    ) -> Any:
        """Compute the logits from input_ids and position_ids, both [1, T]."""
        if self.rotation is not None:
            rotation = self.rotation.of(position_ids[0], self.rotary_pos_emb.inv_freq, self.config.params_dtype)
            packed_seq_params = replace(packed_seq_params, rotation=rotation)
        return super().forward(input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedSequences, **kwargs: Any) -> Any:
        """Select the trained positions of hidden_states [T, 1, H], after gathering T from sequence-parallel ranks."""
        if self.post_process:
            if self.config.sequence_parallel:
                hidden_states = gather_from_sequence_parallel_region(hidden_states)
            hidden_states = hidden_states.index_select(0, packed_seq_params.trained)
            if self.fp32_head:
                return self._float32_logits(hidden_states)
        return super()._postprocess(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _float32_logits(self, hidden_M1H: Tensor) -> Tensor:
        """This rank's slice of the logits, float32 [1, M, V / tensor-parallel ranks]."""
        if not self.config.sequence_parallel:
            # Every rank computes the gradient for its own slice; the backward pass of this copy sums them. Under
            # sequence parallelism the gather above does.
            hidden_M1H = copy_to_tensor_model_parallel_region(hidden_M1H)
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return float32_logits(hidden_M1H.transpose(0, 1), weight_VH)


def transformer_config(
    hf: PretrainedConfig, dtype: torch.dtype, layout: TrainerConfig, fused: Mapping[str, Any]
) -> TransformerConfig:
    """Return Megatron's configuration of this model for the parallel `layout` and the platform's `fused` options."""
    shape = shape_of(hf)
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        ffn_hidden_size=shape.ffn,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # The token weights of a batch are set before the step, so gradients are summed as they are.
        calculate_per_token_loss=True,
        # Micro-batches differ in length; Megatron then requires this dispatcher, for dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **_parallel_options(layout),
        **(_expert_options(hf) if shape.experts else {}),
        **_RECOMPUTE[layout.recompute],
        **fused,
    )


def _parallel_options(layout: TrainerConfig) -> dict[str, Any]:
    """Parallel sizes of the model. A single expert is never split."""
    return {
        "tensor_model_parallel_size": layout.tensor_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        "context_parallel_size": layout.context_parallel,
        "expert_model_parallel_size": layout.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.sequence_parallel,
    }


def _expert_options(hf: PretrainedConfig) -> dict[str, Any]:
    """Options of a mixture of experts: no token is dropped, and no auxiliary loss changes the policy's gradient."""
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        # Softmax over the chosen experts is softmax over all of them, normalised to 1 afterwards.
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def build_model(
    hf: PretrainedConfig, platform: Platform, dtype: torch.dtype, layout: TrainerConfig, *, fp32_head: bool = False
) -> GPTModel:
    """Build this rank's part of the model on its device, without loading weights."""
    _name_missing_kernel()
    config = transformer_config(hf, dtype, layout, platform.model_options(experts=shape_of(hf).experts > 0))
    rope = read_rope(hf)
    layers = platform.layer_replacements(config)
    if LayerRole.experts in layers:
        token_dispatcher.permute = permute_without_waiting
    model = TrainedPositionsModel(
        config,
        build_block_spec(config, layers),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope.theta,
        rope_scaling=rope.factor is not None,
        rope_scaling_factor=rope.factor or 1.0,
    )
    if not config.apply_rope_fusion:
        model.rotation = layers.get(LayerRole.rotation, Rotation)
        model.position_embedding_type = "none"  # our attention applies the rotation instead of Megatron's layers
    model.fp32_head = fp32_head
    _mark_expert_parameters(model)
    return model.to(platform.device)


def _name_missing_kernel() -> None:
    """Define the name of a kernel that Megatron-core 0.16.1 compares with None in its router.

    Megatron imports it only with Transformer Engine. Otherwise a mixture of experts raises NameError on any device.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _mark_expert_parameters(model: GPTModel) -> None:
    """Make Megatron sum the gradients of experts over all ranks that have a copy of them.

    Megatron does so only with expert_parallel above 1. Otherwise it assumes that tensor-parallel ranks have different
    experts, although they have the same experts and different tokens. It also gives all checkpoints one format.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False

"""A Megatron GPTModel with the architecture of a Hugging Face configuration."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from async_grpo.errors import ConfigError
from trainer.platform import Platform

SUPPORTED = ("qwen2",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_architecture(hf: PretrainedConfig, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raise ConfigError for a model that cannot be built, or not cut into so many parts."""
    if hf.model_type not in SUPPORTED:
        raise ConfigError(
            f"model_type {hf.model_type!r} is not supported by the trainer, only {', '.join(SUPPORTED)} (Qwen2, "
            "Qwen2.5). Choose another model.path"
        )
    rope = (getattr(hf, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope != "default" or getattr(hf, "use_sliding_window", False) or hf.hidden_act != "silu":
        raise ConfigError(
            f"the trainer builds Qwen2 with plain rotary embeddings, full attention and silu, but the checkpoint "
            f"has rope_type {rope!r}, use_sliding_window {getattr(hf, 'use_sliding_window', False)}, "
            f"hidden_act {hf.hidden_act!r}. Choose another model.path"
        )
    for name, size, parts, key in (
        ("num_key_value_heads", hf.num_key_value_heads, tensor_parallel, "tensor_parallel"),
        ("num_attention_heads", hf.num_attention_heads, tensor_parallel, "tensor_parallel"),
        ("intermediate_size", hf.intermediate_size, tensor_parallel, "tensor_parallel"),
        ("vocab_size", hf.vocab_size, tensor_parallel, "tensor_parallel"),
        ("num_hidden_layers", hf.num_hidden_layers, pipeline_parallel, "pipeline_parallel"),
    ):
        if size % parts:
            raise ConfigError(
                f"the model's {name} ({size}) is not a multiple of trainer.{key} ({parts}). Set trainer.{key} to a "
                "divisor of it"
            )


def head_dim(hf: PretrainedConfig) -> int:
    """Size of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def transformer_config(hf: PretrainedConfig, dtype: torch.dtype, **overrides: Any) -> TransformerConfig:
    """The Megatron configuration for the parallel sizes that are initialised now."""
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        ffn_hidden_size=hf.intermediate_size,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        # The token weights of a batch are set before the step, so gradients are summed as they are.
        calculate_per_token_loss=True,
        # Micro-batches differ in length; Megatron then insists on this dispatcher, for dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **overrides,
    )


def build_model(hf: PretrainedConfig, platform: Platform, dtype: torch.dtype) -> GPTModel:
    """This rank's part of the model, its weights not yet loaded."""
    config = transformer_config(hf, dtype)
    return GPTModel(
        config,
        platform.layer_spec(config),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=_rope_theta(hf),
    )


def _rope_theta(hf: PretrainedConfig) -> float:
    """Newer transformers keep it among the rope parameters, older ones as a field."""
    rope = getattr(hf, "rope_parameters", None) or {}
    return float(rope.get("rope_theta") or hf.rope_theta)

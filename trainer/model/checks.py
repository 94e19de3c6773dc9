"""Whether a model can be built and laid out, asked before anything is. Pure: no torch, no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from trainer.model.families import check_options, family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_architecture(hf: PretrainedConfig, config: TrainerConfig) -> None:
    """Raise ConfigError for a model that cannot be built, or not laid out as `config` asks."""
    check_options(hf)
    _check_experts(hf, config)
    shared = [
        ("num_key_value_heads", "tensor_parallel"),
        ("num_attention_heads", "tensor_parallel"),
        ("vocab_size", "tensor_parallel"),
        ("num_hidden_layers", "pipeline_parallel"),
        ("num_experts", "expert_parallel") if family_of(hf).experts else ("intermediate_size", "tensor_parallel"),
    ]
    for name, key in shared:
        size, parts = getattr(hf, name), getattr(config, key)
        if size % parts:
            raise ConfigError(
                f"the model's {name} ({size}) is not a multiple of trainer.{key} ({parts}), so it cannot be shared "
                f"evenly. Set trainer.{key} to a divisor of {size}"
            )


def _check_experts(hf: PretrainedConfig, config: TrainerConfig) -> None:
    experts = family_of(hf).experts
    if config.expert_parallel > 1 and not experts:
        raise ConfigError(
            f"trainer.expert_parallel is {config.expert_parallel}, but {hf.model_type} has no experts to share. "
            "Leave trainer.expert_parallel out"
        )
    if experts and config.tensor_parallel > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"trainer.tensor_parallel is {config.tensor_parallel} without trainer.sequence_parallel, and the model has "
            "experts: every tensor-parallel rank would send the same tokens to them, and their gradients would be "
            "counted more than once. Set trainer.sequence_parallel to true"
        )

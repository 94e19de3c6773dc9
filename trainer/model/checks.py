"""Checks of a model before it is built, split over ranks or loaded. Pure: no torch, no Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.model import LoraConfig
from async_grpo.config.trainer import ReferenceConfig, TrainerConfig
from async_grpo.errors import ConfigError, DataError
from async_grpo.models.shapes import shape_of
from trainer.model.families import check_options, read_options, read_sizes
from trainer.model.weight_map import model_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_architecture(hf: PretrainedConfig, config: TrainerConfig) -> None:
    """Raise ConfigError for a model that cannot be built, or not split over ranks as `config` says."""
    check_options(hf)
    _check_experts(hf, config)
    split_sizes = [
        ("num_key_value_heads", "tensor_parallel"),
        ("num_attention_heads", "tensor_parallel"),
        ("vocab_size", "tensor_parallel"),
        ("num_hidden_layers", "pipeline_parallel"),
        ("num_experts", "expert_parallel") if shape_of(hf).experts else ("intermediate_size", "tensor_parallel"),
    ]
    for name, key in split_sizes:
        size = getattr(hf, name)
        ranks = getattr(config, key)
        if size % ranks:
            raise ConfigError(
                f"the model's {name} ({size}) is not a multiple of trainer.{key} ({ranks}), so it cannot be split "
                f"evenly. Set trainer.{key} to a divisor of {size}"
            )


def check_reference_config(
    policy: PretrainedConfig, reference: PretrainedConfig, config: ReferenceConfig, folder: Path
) -> None:
    """Raise ConfigError for a reference in `folder` that would be computed with the policy's options but has others.

    Weights of another model can fit. Those of Qwen2.5-Math-7B fit into Qwen2.5-7B, but computed with its rope_theta
    they are a network that nobody has trained. A reference with `placement: model` is built from its own config.json,
    so its options may differ. Swapped or synced weights are computed with the policy's options.
    """
    subject = f"trainer.reference.path {folder}"
    check_options(reference, "trainer.reference.path")

    differences = _describe_differences(read_sizes(policy), read_sizes(reference))
    if differences:
        raise ConfigError(
            f"{subject} has {differences}: its weights would not fit. Give a checkpoint of the same architecture"
        )

    differences = _describe_differences(read_options(policy), read_options(reference))
    if not differences:
        return
    if config.source == "synced":
        raise ConfigError(
            f"{subject} has {differences}, and a synced reference later gets the policy's weights: one of the two "
            "would be computed as another network. Set trainer.reference.source to frozen and "
            "trainer.reference.placement to model, or give a checkpoint with the same values"
        )
    if config.placement == "swap":
        raise ConfigError(
            f"{subject} has {differences}, and with placement swap its weights would be computed as the policy's "
            "network, which they are not. Set trainer.reference.placement to model, or give a checkpoint with the "
            "same values"
        )


def _describe_differences(policy: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """Return the reference's values that differ, with the policy's; "" if none does."""
    names = [name for name in reference if policy.get(name) != reference[name]]
    return ", ".join(f"{name} {reference[name]} (the policy {policy.get(name)})" for name in names)


def check_lora(hf: PretrainedConfig, lora: LoraConfig) -> None:
    """Raise ConfigError for adapters that this model cannot have, or that are not smaller than their matrix."""
    shapes = {name.split(".")[-2]: shape for name, shape in model_tensors(hf, 1) if len(shape) == 2}
    for target in lora.targets:
        if shape_of(hf).experts and target in ("gate_proj", "up_proj", "down_proj"):
            raise ConfigError(
                f"model.lora.targets has {target}, but {hf.model_type} is a mixture of experts, and adapters of "
                "experts are not supported. Set model.lora.targets to [q_proj, k_proj, v_proj, o_proj]"
            )
        if lora.rank >= min(shapes[target]):
            rows, columns = shapes[target]
            raise ConfigError(
                f"model.lora.rank ({lora.rank}) is not below the sides of {target} ({rows} x {columns}): its adapters "
                f"would not be smaller than the matrix. Set model.lora.rank below {min(shapes[target])}, leave "
                f"{target} out of model.lora.targets, or leave model.lora out to train all weights"
            )


def check_tensors(shapes: Mapping[str, Sequence[int]], hf: PretrainedConfig) -> None:
    """Raise DataError unless `shapes`, by tensor name, are exactly those of the model that `hf` describes."""
    for name, shape in model_tensors(hf, 1):
        check_tensor_shape(name, shapes.get(name), shape)
    check_unknown_tensors(shapes, hf)


def check_tensor_shape(name: str, shape: Sequence[int] | None, expected: Sequence[int]) -> None:
    """Raise DataError for a tensor that is missing (None) or has another shape."""
    if shape is None:
        raise DataError(f"the checkpoint has no tensor {name}. Is it complete, and of this architecture?")
    if tuple(shape) != tuple(expected):
        raise DataError(f"tensor {name} has shape {tuple(shape)}, but config.json requires {tuple(expected)}")


def check_unknown_tensors(names: Iterable[str], hf: PretrainedConfig) -> None:
    """Raise DataError for tensors that the model has no parameter for, because their weights would be lost.

    Copies of other tensors, and buffers that the model computes, are allowed.
    """
    known = {name for name, _ in model_tensors(hf, 1)}
    if hf.tie_word_embeddings:
        known.add("lm_head.weight")
    unknown = [name for name in names if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise DataError(
            f"the checkpoint has {len(unknown)} tensors that a {hf.model_type} does not have, such as {unknown[0]}: "
            "they would be lost. Is config.json of this model?"
        )


def _check_experts(hf: PretrainedConfig, config: TrainerConfig) -> None:
    experts = shape_of(hf).experts
    if config.expert_parallel > 1 and not experts:
        raise ConfigError(
            f"trainer.expert_parallel is {config.expert_parallel}, but {hf.model_type} has no experts to split. "
            "Leave trainer.expert_parallel out"
        )
    if experts and config.tensor_parallel > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"trainer.tensor_parallel is {config.tensor_parallel} without trainer.sequence_parallel, and the model has "
            "experts: every tensor-parallel rank would send the same tokens to them, and count their gradients more "
            "than once. Set trainer.sequence_parallel to true"
        )

"""Checks a model before it is built, laid out or filled. Pure: no torch, no Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.model import LoraConfig
from async_grpo.config.trainer import ReferenceConfig, TrainerConfig
from async_grpo.errors import ConfigError, DataError
from async_grpo.models.shapes import shape_of
from trainer.model.families import check_options, options_of, sizes_of
from trainer.model.weight_map import model_tensors

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
        ("num_experts", "expert_parallel") if shape_of(hf).experts else ("intermediate_size", "tensor_parallel"),
    ]
    for name, key in shared:
        size, parts = getattr(hf, name), getattr(config, key)
        if size % parts:
            raise ConfigError(
                f"the model's {name} ({size}) is not a multiple of trainer.{key} ({parts}), so it cannot be shared "
                f"evenly. Set trainer.{key} to a divisor of {size}"
            )


def check_reference_config(
    policy: PretrainedConfig, reference: PretrainedConfig, config: ReferenceConfig, folder: Path
) -> None:
    """Raise ConfigError for a reference in `folder` that could not be computed as the network that it is.

    The weights of another model may fit, as those of Qwen2.5-Math-7B fit into Qwen2.5-7B, and with another rope_theta
    they are another policy, which exists nowhere. A second model is built from its own config.json, so that it may
    differ in options. Weights that are swapped, or replaced by the policy's, are computed as the policy.
    """
    place = f"trainer.reference.path {folder}"
    check_options(reference, "trainer.reference.path")
    differing = _differences(sizes_of(policy), sizes_of(reference))
    if differing:
        raise ConfigError(
            f"{place} has {differing}: its weights would not fit. Give a checkpoint of the same architecture"
        )
    differing = _differences(options_of(policy), options_of(reference))
    if not differing:
        return
    if config.source == "synced":
        raise ConfigError(
            f"{place} has {differing}, and a synced reference takes over the policy's weights: one of the two would be "
            "computed as another network. Set trainer.reference.source to frozen and trainer.reference.placement to "
            "model, or give a checkpoint with the same values"
        )
    if config.placement == "swap":
        raise ConfigError(
            f"{place} has {differing}, and with placement swap its weights would be computed as the policy's network, "
            "which they are not. Set trainer.reference.placement to model, or give a checkpoint with the same values"
        )


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The reference's values that differ, with the policy's; "" if none does."""
    names = [name for name in theirs if ours.get(name) != theirs[name]]
    return ", ".join(f"{name} {theirs[name]} (the policy {ours.get(name)})" for name in names)


def check_lora(hf: PretrainedConfig, lora: LoraConfig) -> None:
    """Raise ConfigError for adapters that this model cannot have, or that would be no smaller than their matrix."""
    shapes = {name.split(".")[-2]: shape for name, shape in model_tensors(hf, 1) if len(shape) == 2}
    for target in lora.targets:
        if shape_of(hf).experts and target in ("gate_proj", "up_proj", "down_proj"):
            raise ConfigError(
                f"model.lora.targets has {target}, and {hf.model_type} is a mixture of experts, whose experts have no "
                "adapters here. Set model.lora.targets to [q_proj, k_proj, v_proj, o_proj]"
            )
        if lora.rank >= min(shapes[target]):
            rows, columns = shapes[target]
            raise ConfigError(
                f"model.lora.rank ({lora.rank}) is not below the sides of {target} ({rows} x {columns}): its adapters "
                f"would be no smaller than the matrix. Set model.lora.rank below {min(shapes[target])}, leave {target} "
                "out of model.lora.targets, or leave model.lora out to train all weights"
            )


def check_tensors(shapes: Mapping[str, Sequence[int]], hf: PretrainedConfig) -> None:
    """Raise DataError unless tensors of these shapes, by name, fill the model that `hf` describes, and no more."""
    for name, shape in model_tensors(hf, 1):
        check_tensor(name, shapes.get(name), shape)
    check_known(shapes, hf)


def check_tensor(name: str, found: Sequence[int] | None, wanted: Sequence[int]) -> None:
    """Raise DataError for a tensor that is missing (None) or has another shape."""
    if found is None:
        raise DataError(f"the checkpoint has no tensor {name}. Is it whole, and of this architecture?")
    if tuple(found) != tuple(wanted):
        raise DataError(f"tensor {name} has shape {tuple(found)}, but config.json asks for {tuple(wanted)}")


def check_known(names: Iterable[str], hf: PretrainedConfig) -> None:
    """Raise DataError for trained tensors that would be lost. Tensors that can be computed may be missing."""
    known = {name for name, _ in model_tensors(hf, 1)} | ({"lm_head.weight"} if hf.tie_word_embeddings else set())
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
            f"trainer.expert_parallel is {config.expert_parallel}, but {hf.model_type} has no experts to share. "
            "Leave trainer.expert_parallel out"
        )
    if experts and config.tensor_parallel > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"trainer.tensor_parallel is {config.tensor_parallel} without trainer.sequence_parallel, and the model has "
            "experts: every tensor-parallel rank would send the same tokens to them, and their gradients would be "
            "counted more than once. Set trainer.sequence_parallel to true"
        )

"""Model families that the trainer builds, and the options of config.json that it accepts. Pure: no torch, no Megatron.

A family is a row of the table below. An option with another value than its row allows is rejected by name, never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigError
from async_grpo.models.shapes import shape_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_REQUIRED_OF_ALL: Mapping[str, Any] = {"hidden_act": "silu", "use_sliding_window": False}
_NO_BIAS: Mapping[str, Any] = {"attention_bias": False}

_LLAMA3: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""RoPE constants of Llama 3.1 and 3.2, which are fixed in Megatron-core; only the factor is configurable."""


@dataclass(frozen=True, slots=True)
class Family:
    """Properties common to all models of one `model_type`."""

    models: str
    """Common names of the models."""
    rope_types: tuple[str, ...] = ("default",)
    """Supported values of `rope_type`."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Options of config.json with the only supported value. An absent option is accepted."""


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family("Qwen2, Qwen2.5"),
    "qwen3": Family("Qwen3", required=_NO_BIAS),
    "llama": Family("Llama 2, 3", rope_types=("default", "llama3"), required={**_NO_BIAS, "mlp_bias": False}),
    "qwen3_moe": Family("Qwen3-MoE", required={**_NO_BIAS, "decoder_sparse_step": 1, "mlp_only_layers": []}),
}
"""Families by `model_type`."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings."""

    theta: float
    factor: float | None
    """Scaling factor of Llama 3; None without scaling."""


def describe_families() -> str:
    """Return every `model_type` with the names of its models, for error messages."""
    return ", ".join(f"{kind} ({family.models})" for kind, family in FAMILIES.items())


def find_family(hf: PretrainedConfig, key: str = "model.path") -> Family:
    """Return the row of the model that `key` configures. Raises ConfigError for an unknown `model_type`."""
    if hf.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {hf.model_type!r} is not an architecture that the trainer builds. It builds "
            f"{describe_families()}. Choose a checkpoint of one of them as {key}"
        )
    return FAMILIES[hf.model_type]


def check_options(hf: PretrainedConfig, key: str = "model.path") -> None:
    """Raise ConfigError for an option in the config.json of `key` that the trainer does not implement."""
    family = find_family(hf, key)
    for name, expected in {**_REQUIRED_OF_ALL, **family.required}.items():
        if getattr(hf, name, expected) != expected:
            raise _unsupported(hf, name, getattr(hf, name), expected, key)
    for kind in getattr(hf, "layer_types", None) or ():
        if kind != "full_attention":
            raise _unsupported(hf, "layer_types", kind, "full_attention", key)
    _check_rope(hf, family, key)
    if shape_of(hf).experts and hf.num_experts_per_tok == 1 and hf.norm_topk_prob:
        raise ConfigError(
            "the checkpoint has num_experts_per_tok 1 with norm_topk_prob true: every token has weight 1 at its "
            f"expert, so the router gets no gradient. Choose another {key}"
        )


def read_sizes(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the values that determine the shapes and memory of the weights, by their names in config.json."""
    shape = shape_of(hf)
    sizes = {
        "model_type": hf.model_type,
        "vocab_size": hf.vocab_size,
        "num_hidden_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_key_value_heads": hf.num_key_value_heads,
        "head_dim": shape.head_dim,
    }
    if shape.experts:
        return sizes | {"num_experts": hf.num_experts, "moe_intermediate_size": hf.moe_intermediate_size}
    return sizes | {"intermediate_size": hf.intermediate_size}


def read_options(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the other values that determine the function of the network, by their names in config.json.

    The trainer builds a model from these and `read_sizes` alone. So two models with equal values and equal weights
    compute the same outputs.
    """
    rope = read_rope(hf)
    options = {
        "rope_theta": rope.theta,
        "rope factor": rope.factor,
        "rms_norm_eps": hf.rms_norm_eps,
        "tie_word_embeddings": hf.tie_word_embeddings,
    }
    if shape_of(hf).experts:
        return options | {"num_experts_per_tok": hf.num_experts_per_tok, "norm_topk_prob": hf.norm_topk_prob}
    return options


def read_rope(hf: PretrainedConfig) -> Rope:
    """Return the position embeddings of a configuration that `check_options` accepts."""
    fields = _rope_fields(hf)
    factor = float(fields["factor"]) if fields.get("rope_type") == "llama3" else None
    return Rope(float(fields.get("rope_theta") or hf.rope_theta), factor)


def _rope_fields(hf: PretrainedConfig) -> Mapping[str, Any]:
    # New releases of transformers have all fields in `rope_parameters`, old ones only the scaling in `rope_scaling`.
    return getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}


def _check_rope(hf: PretrainedConfig, family: Family, key: str) -> None:
    fields = _rope_fields(hf)
    kind = fields.get("rope_type", "default")
    if kind not in family.rope_types:
        raise _unsupported(hf, "rope_type", kind, " or ".join(family.rope_types), key)

    required: dict[str, Any] = {"partial_rotary_factor": 1.0}
    if kind == "llama3":
        required |= _LLAMA3
    for name, value in required.items():
        if fields.get(name, value) != value:
            raise _unsupported(hf, name, fields[name], value, key)


def _unsupported(hf: PretrainedConfig, name: str, value: Any, expected: Any, key: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint has {name} {value!r}, but the trainer builds {hf.model_type} only with {name} {expected!r}: "
        f"it would compute another network than the one that was saved. Choose another {key}"
    )

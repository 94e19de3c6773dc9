"""The dimensions of a model, and how many parameters follow from them.

They come from the config.json of the checkpoint. For well-known public models they are also in SHAPES, so that a run
can be planned without its checkpoint (`model.architecture`); nothing else reads those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from async_grpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated MLPs; with `experts`, every MLP is a choice among them."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    groups: int
    """Number of key and value heads."""
    head_dim: int
    ffn: int
    """Width of an MLP, or of one expert."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads."""
        return self.groups * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Attention parameters of one layer: query, key, value and output matrices, biases, norms of heads."""
        qkv = self.query + 2 * self.key
        biases = qkv if self.qkv_bias else 0
        norms = 2 * self.head_dim if self.qk_norm else 0
        return self.hidden * qkv + self.query * self.hidden + biases + norms

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP or expert: gate, up and down."""
        return 3 * self.hidden * self.ffn

    @property
    def shared_layer_parameters(self) -> int:
        """Parameters of a layer without its experts: attention, two norms, router, and the MLP if there are none."""
        router_or_mlp = self.experts * self.hidden if self.experts else self.mlp_parameters
        return self.attention_parameters + 2 * self.hidden + router_or_mlp

    @property
    def expert_layer_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self.mlp_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding. The output layer has as many again unless it is tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model.

        >>> SHAPES["qwen2.5-7b"].parameters
        7615616512
        """
        layers = self.layers * (self.shared_layer_parameters + self.expert_layer_parameters)
        return self.outer_parameters + layers

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: embedding, output layer, last norm."""
        return self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: of the experts, those that it is sent to."""
        idle = self.experts - self.experts_per_token if self.experts else 0
        return self.parameters - self.layers * idle * self.mlp_parameters


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape in the fields of a config.json. Raises ConfigError naming a missing or invalid field."""
    kind = str(config.get("model_type", ""))
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        experts = int(config.get("num_experts") or 0)
        return ModelShape(
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            groups=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=int(config["moe_intermediate_size" if experts else "intermediate_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind.startswith("qwen3"),
            experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error}, so the model's size is not known. Is it whole?") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"config.json has an invalid size ({error}). Fetch it again") from None


def named_shape(name: str) -> ModelShape:
    """The shape of a public model by its name in lower case. Raises ConfigError with the known names."""
    if name not in SHAPES:
        raise ConfigError(
            f"model.architecture {name!r} is not known. Known: {', '.join(SHAPES)}. Leave it out to plan with the "
            "config.json of model.path"
        )
    return SHAPES[name]


_QWEN25_1B = ModelShape(
    vocab=151_936, hidden=1536, layers=28, heads=12, groups=2, head_dim=128, ffn=8960, tied=True, qkv_bias=True
)
_QWEN25_7B = ModelShape(
    vocab=152_064, hidden=3584, layers=28, heads=28, groups=4, head_dim=128, ffn=18_944, qkv_bias=True
)
_QWEN3_8B = ModelShape(
    vocab=151_936, hidden=4096, layers=36, heads=32, groups=8, head_dim=128, ffn=12_288, qk_norm=True
)

SHAPES: Mapping[str, ModelShape] = {
    "qwen2.5-0.5b": replace(_QWEN25_1B, hidden=896, layers=24, heads=14, head_dim=64, ffn=4864),
    "qwen2.5-1.5b": _QWEN25_1B,
    "qwen2.5-7b": _QWEN25_7B,
    "qwen2.5-14b": replace(_QWEN25_7B, hidden=5120, layers=48, heads=40, groups=8, ffn=13_824),
    "qwen2.5-32b": replace(_QWEN25_7B, hidden=5120, layers=64, heads=40, groups=8, ffn=27_648),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-30b-a3b": replace(_QWEN3_8B, hidden=2048, layers=48, groups=4, ffn=768, experts=128, experts_per_token=8),
    "llama3.1-8b": ModelShape(vocab=128_256, hidden=4096, layers=32, heads=32, groups=8, head_dim=128, ffn=14_336),
}
"""Shapes of public models, as their config.json files state them."""

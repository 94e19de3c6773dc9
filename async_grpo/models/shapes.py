"""Dimensions of a model, and quantities computed from them: parameters, operations, bytes of the KV cache.

The dimensions come from config.json of the checkpoint. SHAPES has those of well-known public models, only for planning
a run without its checkpoint (`model.architecture`).

Operations are counted as

    forward pass over a sequence of n tokens = 2 * M * n  +  2 * L * H * n^2

M is the number of weights in the matrices that a token is multiplied with: attention's four, the MLP's three, and the
output layer. In a mixture of experts these are the router and the MLPs of the experts that a token is routed to. The
embedding is a look-up and counts nothing. H = heads * head size. For each of n tokens, scores and weighted values take
2 * n * H operations each without a mask, and half of that on average with the causal mask. A multiplication and an
addition are two operations. The backward pass takes twice as many as the forward pass. Recomputed activations
(`trainer.recompute`) are not counted: the metrics describe useful work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated MLPs. With `experts`, every MLP is a mixture of experts."""

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
    """True if the output layer shares the weights of the embedding."""
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
    def attention_weights(self) -> int:
        """Weights of the query, key, value and output matrices of one layer."""
        return 2 * self.hidden * (self.query + self.key)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP or expert: gate, up and down."""
        return 3 * self.hidden * self.ffn

    @property
    def uncut_layer_parameters(self) -> int:
        """Parameters of a layer that tensor parallelism does not divide: norms and router."""
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        return 2 * self.hidden + head_norms + self.experts * self.hidden

    @property
    def shared_layer_parameters(self) -> int:
        """Parameters of a layer without its experts: attention, norms, router, and the MLP if there are none."""
        biases = self.query + 2 * self.key if self.qkv_bias else 0
        mlp = 0 if self.experts else self.mlp_parameters
        return self.attention_weights + biases + self.uncut_layer_parameters + mlp

    @property
    def expert_layer_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self.mlp_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding. The output layer has the same number unless it is tied."""
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
        """Parameters used for one token: all except those of experts that it is not routed to."""
        if not self.experts:
            return self.parameters
        unused_experts = self.experts - self.experts_per_token
        return self.parameters - self.layers * unused_experts * self.mlp_parameters

    @property
    def matrix_weights(self) -> int:
        """M of the formula above."""
        mlp = self.mlp_parameters
        if self.experts:
            mlp = self.experts * self.hidden + self.experts_per_token * self.mlp_parameters
        return self.layers * (self.attention_weights + mlp) + self.embedding_parameters

    @property
    def attention_cost(self) -> float:
        """Operations of attention to one token, relative to those of the matrices: (2 L H) / (2 M)."""
        return self.layers * self.query / self.matrix_weights

    def forward_flops(self, lengths: Iterable[int]) -> float:
        """Operations of one forward pass over sequences of these lengths in tokens."""
        weights = self.matrix_weights
        attention = self.layers * self.query
        return float(sum(2 * weights * n + 2 * attention * n * n for n in lengths))

    def cache_token_bytes(self, element_bytes: int, ranks: int = 1) -> int:
        """Bytes of the keys and values of one token on one of `ranks` devices.

        With fewer groups than ranks, each rank has a copy of one group.
        """
        groups_per_rank = max(self.groups // ranks, 1)
        return 2 * self.layers * groups_per_rank * self.head_dim * element_bytes


def shape_of(config: Mapping[str, Any] | PretrainedConfig) -> ModelShape:
    """Return the shape in a config.json, parsed as JSON or by transformers.

    Raises ConfigError for a missing field, DataError for invalid sizes.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    kind = str(fields.get("model_type", ""))
    try:
        heads = int(fields["num_attention_heads"])
        hidden = int(fields["hidden_size"])
        # transformers 5 writes num_local_experts, whatever the field is called in the checkpoint.
        experts = int(fields.get("num_experts") or fields.get("num_local_experts") or 0)
        return ModelShape(
            vocab=int(fields["vocab_size"]),
            hidden=hidden,
            layers=int(fields["num_hidden_layers"]),
            heads=heads,
            groups=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            ffn=int(fields["moe_intermediate_size" if experts else "intermediate_size"]),
            tied=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(fields.get("attention_bias", False)),
            qk_norm=kind.startswith("qwen3"),
            experts=experts,
            experts_per_token=int(fields.get("num_experts_per_tok") or 0),
        )
    except KeyError as error:
        raise ConfigError(
            f"config.json has no {error}, so the model's size is unknown. Is the file complete?"
        ) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"config.json does not describe a model ({error}). Download it again") from None


def named_shape(name: str) -> ModelShape:
    """Return the shape of a public model by its name in lower case. Raises ConfigError with the known names."""
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
"""Shapes of public models, from their config.json files."""

"""How many floating-point operations a model needs, from its Hugging Face configuration. Pure.

    forward pass over a sequence of n tokens = 2 * M * n  +  2 * L * H * n^2

M weights of the matrices that a token meets: attention's four, the MLP's three, and the output layer. Of a mixture of
experts: the router, and the MLPs of the experts that a token is sent to (`num_experts_per_tok`), not of all. The
embedding is a look-up and counts nothing. H = heads * head size; scores and weighted values take 2 * n * H each for a
token that sees n others, and n / 2 on average under the causal mask. A multiplication and an addition are two.

The backward pass takes twice the forward one. What is computed anew to save memory (`trainer.recompute`) is not
counted: the figures are of useful work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TRAINING = 3
"""Forward and backward, in forward passes."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """M and L * H of the formula."""

    weights: int
    attention: int

    @property
    def quadratic(self) -> float:
        """Cost of attention, of a sequence of one token, in that of its matrices: (2 L H) / (2 M)."""
        return self.attention / self.weights

    def forward(self, lengths: Iterable[int]) -> float:
        """Operations of one forward pass over sequences of these lengths."""
        return float(sum(2 * self.weights * n + 2 * self.attention * n * n for n in lengths))


def model_cost(hf: Any) -> ModelCost:
    """Of Qwen2, Qwen3, Llama, and of Qwen3-MoE, whose layers may be dense or mixed."""
    hidden, layers = hf.hidden_size, hf.num_hidden_layers
    head = getattr(hf, "head_dim", None) or hidden // hf.num_attention_heads
    queries, keys = hf.num_attention_heads * head, hf.num_key_value_heads * head
    weights = layers * hidden * (2 * queries + 2 * keys) + hidden * hf.vocab_size
    weights += sum(_mixed(hf) if _is_mixed(hf, layer) else 3 * hidden * hf.intermediate_size for layer in range(layers))
    return ModelCost(weights, layers * queries)


def _is_mixed(hf: Any, layer: int) -> bool:
    if not getattr(hf, "num_experts", 0) or layer in (getattr(hf, "mlp_only_layers", None) or ()):
        return False
    return (layer + 1) % (getattr(hf, "decoder_sparse_step", None) or 1) == 0


def _mixed(hf: Any) -> int:
    """Weights that a token meets in the experts of a layer."""
    return int(hf.hidden_size * (hf.num_experts + 3 * hf.num_experts_per_tok * hf.moe_intermediate_size))

"""A model to move: the tensors of a Qwen2.5 in bfloat16, as raw bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from async_grpo.weights.chunks import cut
from async_grpo.weights.manifest import Layout, layout_of

DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """In the proportions of Qwen2.5-0.5B, which has 24 layers of 896 and 151,936 tokens."""

    layers: int
    vocab: int
    hidden: int = 896

    def layout(self) -> Layout:
        """Of all tensors; the output matrix is the embedding."""
        return layout_of((name, DTYPE, shape) for name, shape in _shapes(self))


class Weights:
    """The values of one model, in one warm buffer; `arrays` are what the trainer publishes."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        self.layout = layout
        self.flat: npt.NDArray[np.uint8] = np.random.default_rng(seed).integers(0, 256, layout.total_bytes, np.uint8)

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Every tensor by name, in place."""
        for spec in self.layout.tensors:
            yield spec.name, self.flat[spec.offset : spec.offset + spec.nbytes]

    def touch(self, chunk_bytes: int) -> None:
        """Change something in every chunk, so that nothing can be left out of the next transfer."""
        self.flat[[chunk.start for chunk in cut(self.layout, chunk_bytes)]] ^= 1


def _shapes(size: ModelSize) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, key_value, intermediate = size.hidden, size.hidden // 7, size.hidden * 38 // 7
    yield "model.embed_tokens.weight", (size.vocab, hidden)
    for layer in range(size.layers):
        for name, shape in (
            ("self_attn.q_proj.weight", (hidden, hidden)),
            ("self_attn.q_proj.bias", (hidden,)),
            ("self_attn.k_proj.weight", (key_value, hidden)),
            ("self_attn.k_proj.bias", (key_value,)),
            ("self_attn.v_proj.weight", (key_value, hidden)),
            ("self_attn.v_proj.bias", (key_value,)),
            ("self_attn.o_proj.weight", (hidden, hidden)),
            ("mlp.gate_proj.weight", (intermediate, hidden)),
            ("mlp.up_proj.weight", (intermediate, hidden)),
            ("mlp.down_proj.weight", (hidden, intermediate)),
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
        ):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)

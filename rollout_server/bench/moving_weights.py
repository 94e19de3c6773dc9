"""A policy that moves: a tiny random checkpoint, and a store whose weights change like those of a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from async_grpo.weights.manifest import Identity, layout_of
from async_grpo.weights.store import WeightStore

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

CHANGED_FRACTION = 0.01
"""Of all bfloat16 values, by one step of an optimizer at a learning rate of 1e-6."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of a Qwen2 without a stop token: every request ends at its own max_tokens."""

    hidden_size: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    intermediate_size: int = 704
    vocab_size: int = 4096


class MovingWeights:
    """Version after version of a random bfloat16 policy, in a store at `path`."""

    def __init__(self, size: ModelSize, folder: Path, path: Path, *, seed: int) -> None:
        """Writes the checkpoint to `folder` and makes the store, still empty."""
        import torch

        model = _random_qwen2(size, seed).to(torch.bfloat16)
        model.save_pretrained(folder)
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        self.store = WeightStore.create(path, layout_of([(n, "bfloat16", list(t.shape)) for n, t in tensors.items()]))
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        self._items = np.zeros(self.store.layout.total_bytes // 2, np.uint16)
        for spec in self.store.layout.tensors:
            part = self._items[spec.offset // 2 : (spec.offset + spec.nbytes) // 2]
            part[:] = tensors[spec.name].reshape(-1).view(torch.uint16).numpy()
        self._random = np.random.default_rng(seed)
        self._version = -1

    def step(self) -> Identity:
        """Move some of the values to their neighbour and publish that as the next version."""
        moved = self._random.integers(0, len(self._items), int(CHANGED_FRACTION * len(self._items)))
        self._items[moved] ^= 1
        self._version += 1
        np.frombuffer(self.store.begin(), np.uint16)[:] = self._items
        identity = Identity(0, self._version)
        self.store.commit(identity)
        return identity


def _random_qwen2(size: ModelSize, seed: int) -> Qwen2ForCausalLM:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)

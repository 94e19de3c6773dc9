"""The network of the tiny checkpoints. Imports torch only when it builds one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from async_grpo.config.model import TinyQwen2Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM


def tiny_qwen2_sizes(config: TinyQwen2Config, *, vocab_size: int) -> dict[str, Any]:
    """Return the fields of config.json that determine the `ModelShape`."""
    return {
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "tie_word_embeddings": config.tie_embeddings,
    }


def build_tiny_qwen2(
    config: TinyQwen2Config, tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, seed: int
) -> Qwen2ForCausalLM:
    """Build a Qwen2 in float32, initialised by `seed`. Does not change the global random generator."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = Qwen2Config(
        **tiny_qwen2_sizes(config, vocab_size=vocab_size),
        max_position_embeddings=config.max_positions,
        initializer_range=config.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(shape).to(torch.float32)

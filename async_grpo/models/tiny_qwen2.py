"""Tiny Qwen2 checkpoints, made deterministically on the CPU, and their character tokenizer for arithmetic.

The tokenizer has one token a character and one for each tag. The tags are ordinary tokens, not special ones: decoding
with `skip_special_tokens` removes the end and padding tokens and keeps the tags, which the verifier reads. torch is
imported only when a model is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_grpo.config.model import TinyQwen2Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "0123456789+= -*()."
"""More characters than addition needs: 24 tokens in all, which 2, 4 or 8 tensor-parallel ranks share evenly."""


def build_char_tokenizer() -> PreTrainedTokenizerFast:
    """The character tokenizer. `save_pretrained` writes it, `async_grpo.data.tokenizer.load_tokenizer` reads it.

    decode(encode(text)) == text for every text of CHARACTERS and TAGS. Encoding any other character
    raises: a prompt that the policy cannot read is an error, not an unknown token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = (PAD, EOS, *TAGS, *CHARACTERS)
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tag_or_character = Regex("|".join((*TAGS, r"[\s\S]")))
    backend.pre_tokenizer = pre_tokenizers.Split(tag_or_character, "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def build_tiny_qwen2(
    config: TinyQwen2Config, tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, seed: int
) -> Qwen2ForCausalLM:
    """A Qwen2 in float32, initialised by `seed`. The global random generator is left as it was."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings,
        initializer_range=config.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(shape).to(torch.float32)

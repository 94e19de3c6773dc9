"""A tiny random Qwen2 checkpoint with a tokenizer trained on the prompts, for tests of the machinery.

It has learnt nothing, but has the right shape and takes almost no time to make.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config.model import RandomModelConfig
from async_grpo.models.tiny.qwen2 import build_tiny_qwen2
from async_grpo.utils.files import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_END = "<|im_end|>"
_PAD = "<|endoftext|>"
_SPECIAL_TOKENS = [_PAD, "<|im_start|>", _END]


def make_random_model(config: RandomModelConfig, texts: Iterable[str], out_dir: Path, seed: int) -> None:
    """Write the checkpoint to `out_dir`, completely or not at all. The same arguments give the same files."""
    with whole_folder(out_dir, shared=True) as draft:
        tokenizer = train_tokenizer(config, texts)
        tokenizer.save_pretrained(draft)
        build_tiny_qwen2(config, tokenizer, vocab_size=config.vocab_size, seed=seed).save_pretrained(draft)


def train_tokenizer(config: RandomModelConfig, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode any text without loss."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=_SPECIAL_TOKENS,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )

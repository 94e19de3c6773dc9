"""A tiny random Qwen2 checkpoint with a tokenizer trained on the prompts, for tests of the machinery.

    python -m async_grpo.models.random_model --config RUN_CONFIG_JSON --out FOLDER --seed 1

It learns nothing; it has the right shape and costs almost nothing to make.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config import RunConfig
from async_grpo.config.model import RandomModelConfig
from async_grpo.errors import DataError
from async_grpo.models.tiny_qwen2 import build_tiny_qwen2
from async_grpo.utils.files import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_END, _PAD = "<|im_end|>", "<|endoftext|>"
_SPECIAL_TOKENS = [_PAD, "<|im_start|>", _END]
_MAX_TEXTS = 4000


def make_random_model(config: RandomModelConfig, texts: Iterable[str], out_dir: Path, seed: int) -> None:
    """Write the checkpoint to `out_dir`, completely or not at all. The same arguments give the same files."""
    with whole_folder(out_dir, shared=True) as draft:
        tokenizer = train_tokenizer(config, texts)
        tokenizer.save_pretrained(draft)
        build_tiny_qwen2(config, tokenizer, vocab_size=config.vocab_size, seed=seed).save_pretrained(draft)


def train_tokenizer(config: RandomModelConfig, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it encodes every text, and decoding gives the text back."""
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


def prompt_texts(config: RunConfig) -> Iterator[str]:
    """The prompts of the run's data; needs no tokenizer. Raises DataError for a prepared folder."""
    if config.data.kind == "jsonl":
        from async_grpo.data.jsonl import usable_rows
        from async_grpo.data.prepare.formats import Rejections

        assert config.data.path is not None
        if config.data.path.is_dir():
            raise DataError(
                f"{config.data.path} is a prepared folder: its token ids are those of a tokenizer that exists, and "
                "model.random would make another. Give model.path, or point data.path at a JSON-lines file"
            )
        return (row.prompt for row in usable_rows(config.data.path, config.data, Rejections()))
    from async_grpo.data.arithmetic import arithmetic_prompts

    return arithmetic_prompts(config)


def main() -> None:
    """Make the model that a run configuration (JSON) asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="a RunConfig as JSON")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    config = RunConfig.model_validate_json(arguments.config)
    shape = config.model.random or RandomModelConfig()
    make_random_model(shape, islice(prompt_texts(config), _MAX_TEXTS), arguments.out, arguments.seed)


if __name__ == "__main__":
    main()

"""A character-level tokenizer for arithmetic: one token a character, and one for each tag.

The tags are ordinary tokens, not special ones: decoding with `skip_special_tokens` removes the end
and padding tokens and keeps the tags, which the verifier reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "0123456789+= -*()."
"""More than addition needs: 24 tokens in all, so that 2, 4 or 8 tensor-parallel ranks share them evenly."""


def build_char_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; `save_pretrained` writes it, `async_grpo.data.source.load_tokenizer` reads it back.

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

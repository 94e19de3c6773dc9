"""The arithmetic task for a tiny model: its vocabulary, demonstrations, and checks of completions.

    prompt         478+356=
    demonstration  <think>8+6+0=14 7+5+1=13 4+3+1=8</think><answer>834</answer>
    shortcut       <answer>834</answer>

Each term of the reasoning is digit + digit + carry, from the right. The tokenizer has one token per character and one
per tag. The tags are ordinary tokens: engines decode with `skip_special_tokens`, which would remove special ones, and
the verifier needs the tags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_grpo.data.arithmetic import Problem
from async_grpo.rewards.verifiers.answers import answer_tag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "0123456789+= -*()."
"""More characters than addition needs: with 24 tokens in total, 2, 4 or 8 tensor-parallel ranks get equal shares."""


def build_char_tokenizer() -> PreTrainedTokenizerFast:
    """Build the character tokenizer. `save_pretrained` writes it, `async_grpo.data.tokenizer.load_tokenizer` reads it.

    decode(encode(text)) == text for every text of CHARACTERS and TAGS. Encoding another character raises: a prompt
    that the policy cannot read is an error, not an unknown token.
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


def demonstration(problem: Problem) -> str:
    """Return the completion of a policy that reasons, without the end token.

    >>> demonstration(Problem(47, 85))
    '<think>7+5+0=12 4+8+1=13</think><answer>132</answer>'
    """
    return f"<think>{' '.join(_column_sums(problem))}</think>{shortcut(problem)}"


def shortcut(problem: Problem) -> str:
    """Return the completion of a policy that answers immediately, without the end token.

    >>> shortcut(Problem(47, 85))
    '<answer>132</answer>'
    """
    return f"<answer>{problem.answer}</answer>"


def _column_sums(problem: Problem) -> list[str]:
    """Return one 'digit+digit+carry=sum' per column, from the right. Both numbers have the same number of digits."""
    terms = []
    carry = 0
    for left, right in zip(reversed(str(problem.left)), reversed(str(problem.right)), strict=True):
        total = int(left) + int(right) + carry
        terms.append(f"{left}+{right}+{carry}={total}")
        carry = total // 10
    return terms


def is_correct(problem: Problem, completion: str) -> bool:
    """True if the task's verifier accepts the completion."""
    return answer_tag(completion, problem.answer) == 1.0


def reasons_first(completion: str) -> bool:
    """True if the completion has reasoning before its answer."""
    return completion.startswith("<think>")

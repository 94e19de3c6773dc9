"""This project's own verifiers: answers in `<answer>` tags, the think-answer form, and the number rule of GSM8K."""

from __future__ import annotations

import re
from fractions import Fraction

from async_grpo.rewards.verifiers import extracts
from async_grpo.rewards.verifiers.boxed import last_boxed

_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_BETWEEN = re.compile(r"</think>\s*+<answer>")
_HASHES = re.compile(r"####([^\n]*)")
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-−])?(?:\\?\$\s?(?P<inner_sign>[-−])?)?"
    r"(?:(?P<units>[0-9]{1,64})?\\[dt]?frac\{(?P<over>[0-9]{1,64})\}\{(?P<beneath>[0-9]{1,64})\}|"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?P<decimals>\.[0-9]+)?(?P<under>/[0-9]+)?)"
)
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3})")
_MAX_DIGITS = 64


def tagged_answer(completion: str) -> str | None:
    """The text that `answer_tag` compares; None if there is no well-formed tag."""
    found = _ANSWER.findall(completion)
    return found[-1].strip() if found else None


@extracts(tagged_answer)
def answer_tag(completion: str, answer: str) -> float:
    """1 if the text of the last well-formed `<answer>..</answer>` equals the reference, else 0.

    Both are stripped of surrounding whitespace. Well-formed: no other answer tag inside.

    >>> answer_tag("<think>1+1</think><answer> 2 </answer>", "2")
    1.0
    """
    return float(tagged_answer(completion) == answer.strip())


def format_tags(completion: str, answer: str) -> float:
    r"""1 if the completion matches `^<think>.*?</think>\s*<answer>.*?</answer>$` (DOTALL | MULTILINE), else 0.

    So it begins with `<think>`, and some `</answer>` is the last of its line.

    >>> [format_tags(text, "") for text in ("<think>a</think>\n<answer>b</answer>", "<answer>b</answer>")]
    [1.0, 0.0]
    """
    if not completion.startswith("<think>"):
        return 0.0
    between = _BETWEEN.search(completion, len("<think>"))
    return float(between is not None and between.end() <= _last_line_end(completion))


def gsm8k_answer(completion: str) -> str | None:
    """The number that `gsm8k` compares, in lowest terms; None if the completion gives none.

    >>> [gsm8k_answer(text) for text in ("#### 1,800.00", "half: #### .5", "nothing")]
    ['1800', '1/2', None]
    """
    number = _final_number(completion)
    return None if number is None else str(number)


@extracts(gsm8k_answer)
def gsm8k(completion: str, answer: str) -> float:
    """1 if the final answer equals the reference as a number, else 0.

    The final answer is the first of these that the completion has: the last `\\boxed{..}`, the rest
    of the line after the last `####`, the last `<answer>..</answer>`, the last number anywhere.
    A marked answer counts only if it holds exactly one number (after its last `=`, if it has one).
    Numbers: optional sign, `$`, commas between thousands (also `{,}`, `,\\!` and `\\,`), decimals, `a/b`,
    `\\frac{a}{b}` with a whole number before it or without; units, `%` and a final period are ignored, so "18.",
    "18.00", "$18" are 18 and "1,800" is 1800. Equality is exact.
    Raises ValueError if the reference (after `####`, where it has that) is not one number.
    """
    gold = _single_number(answer.rpartition("####")[2])
    if gold is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a number")
    return float(_final_number(completion) == gold)


def _final_number(completion: str) -> Fraction | None:
    """The number that the completion gives as its answer; None if it gives none."""
    marked = last_boxed(completion)
    if marked is None and (lines := _HASHES.findall(completion)):
        marked = lines[-1]
    if marked is None and (tags := _ANSWER.findall(completion)):
        marked = tags[-1]
    if marked is not None:
        return _single_number(marked)
    numbers = _numbers(completion)
    return _value(numbers[-1]) if numbers else None


def _single_number(text: str) -> Fraction | None:
    """The only number in the text (after its last `=`), or None."""
    numbers = _numbers(text.rpartition("=")[2])
    return _value(numbers[0]) if len(numbers) == 1 else None


def _numbers(text: str) -> list[re.Match[str]]:
    """All numbers in order, however many there are: what they are worth is asked of one at most."""
    found = _NUMBER.finditer(_LATEX_COMMA.sub(",", text))
    return [match for match in found if match["whole"] or match["decimals"] or match["over"]]


def _value(match: re.Match[str]) -> Fraction | None:
    """None for a number that has no value (x/0, absurdly long)."""
    digits = (match["over"] or match["whole"] or "0").replace(",", "") + (match["decimals"] or "")
    under = match["beneath"] or (match["under"] or "/1")[1:]
    if len(digits) > _MAX_DIGITS or len(under) > _MAX_DIGITS or int(under) == 0:
        return None
    value = Fraction(digits) / int(under) + int(match["units"] or 0)
    return -value if match["sign"] or match["inner_sign"] else value


def _last_line_end(text: str) -> int:
    """Where the last `</answer>` begins that ends its line or the text; -1 if there is none."""
    if text.endswith("</answer>"):
        return len(text) - len("</answer>")
    return text.rfind("</answer>\n")

"""Verifiers for answers in `<answer>` tags, for the think-answer format, and for the final number of GSM8K."""

from __future__ import annotations

import re
from fractions import Fraction

from async_grpo.rewards.verifiers import extracts
from async_grpo.rewards.verifiers.boxed import find_last_closed_box

_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_BOUNDARY = re.compile(r"</think>\s*+<answer>")
_HASHES = re.compile(r"####([^\n]*)")
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-−])?(?:\\?\$\s?(?P<inner_sign>[-−])?)?"
    r"(?:(?P<units>[0-9]{1,64})?\\[dt]?frac\{(?P<numerator>[0-9]{1,64})\}\{(?P<denominator>[0-9]{1,64})\}|"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?P<decimals>\.[0-9]+)?(?P<slash>/[0-9]+)?)"
)
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3})")
_MAX_DIGITS = 64


def extract_tagged_answer(completion: str) -> str | None:
    """Return the text that `answer_tag` compares; None if there is no well-formed tag."""
    answers = _ANSWER.findall(completion)
    return answers[-1].strip() if answers else None


@extracts(extract_tagged_answer)
def answer_tag(completion: str, answer: str) -> float:
    """Return 1 if the text of the last well-formed `<answer>..</answer>` equals the reference, else 0.

    Surrounding whitespace is ignored. A tag is well-formed if it contains no other answer tag.

    >>> answer_tag("<think>1+1</think><answer> 2 </answer>", "2")
    1.0
    """
    return float(extract_tagged_answer(completion) == answer.strip())


def format_tags(completion: str, answer: str) -> float:
    r"""Return 1 if the completion matches `^<think>.*?</think>\s*<answer>.*?</answer>$` (DOTALL | MULTILINE), else 0.

    This means that it starts with `<think>` and that one `</answer>` is at the end of its line.

    >>> [format_tags(text, "") for text in ("<think>a</think>\n<answer>b</answer>", "<answer>b</answer>")]
    [1.0, 0.0]
    """
    if not completion.startswith("<think>"):
        return 0.0
    # Two searches instead of the expression above, whose lazy parts take quadratic time on a completion with many tags.
    boundary = _BOUNDARY.search(completion, len("<think>"))
    return float(boundary is not None and boundary.end() <= _find_last_closing_tag(completion))


def extract_gsm8k_answer(completion: str) -> str | None:
    """Return the number that `gsm8k` compares, in lowest terms; None if the completion has none.

    >>> [extract_gsm8k_answer(text) for text in ("#### 1,800.00", "half: #### .5", "nothing")]
    ['1800', '1/2', None]
    """
    number = _find_final_number(completion)
    return None if number is None else str(number)


@extracts(extract_gsm8k_answer)
def gsm8k(completion: str, answer: str) -> float:
    """Return 1 if the final answer equals the reference as a number, else 0.

    The final answer is the first of these that the completion contains: the last `\\boxed{..}`, the rest of the line
    after the last `####`, the last `<answer>..</answer>`, the last number anywhere. A marked answer counts only if it
    contains exactly one number (after its last `=`, if any).

    Numbers may have a sign, `$`, commas between thousands (also `{,}`, `,\\!` and `\\,`) and decimals, and may be
    fractions `a/b` or `\\frac{a}{b}`, also after a whole number. Units, `%` and a final period are ignored, so "18.",
    "18.00" and "$18" are 18 and "1,800" is 1800. Comparison is exact.

    Raises ValueError if the reference (after `####`, if any) is not exactly one number.
    """
    reference = _parse_single_number(answer.rpartition("####")[2])
    if reference is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a number")
    return float(_find_final_number(completion) == reference)


def _find_final_number(completion: str) -> Fraction | None:
    """Return the number that the completion gives as its answer; None if there is none."""
    marked = find_last_closed_box(completion)
    if marked is None and (lines := _HASHES.findall(completion)):
        marked = lines[-1]
    if marked is None and (tags := _ANSWER.findall(completion)):
        marked = tags[-1]
    if marked is not None:
        return _parse_single_number(marked)
    numbers = _find_numbers(completion)
    return _parse_number(numbers[-1]) if numbers else None


def _parse_single_number(text: str) -> Fraction | None:
    """Return the number after the last `=`; None unless there is exactly one."""
    numbers = _find_numbers(text.rpartition("=")[2])
    return _parse_number(numbers[0]) if len(numbers) == 1 else None


def _find_numbers(text: str) -> list[re.Match[str]]:
    """Return all numbers in order, unparsed: a completion may contain thousands, and only one is needed."""
    matches = _NUMBER.finditer(_LATEX_COMMA.sub(",", text))
    return [match for match in matches if match["whole"] or match["decimals"] or match["numerator"]]


def _parse_number(match: re.Match[str]) -> Fraction | None:
    """Return the value of a number; None if it divides by zero or has more than _MAX_DIGITS digits."""
    digits = (match["numerator"] or match["whole"] or "0").replace(",", "") + (match["decimals"] or "")
    divisor = match["denominator"] or (match["slash"] or "/1")[1:]
    if len(digits) > _MAX_DIGITS or len(divisor) > _MAX_DIGITS or int(divisor) == 0:
        return None
    value = Fraction(digits) / int(divisor) + int(match["units"] or 0)
    return -value if match["sign"] or match["inner_sign"] else value


def _find_last_closing_tag(text: str) -> int:
    """Return the position of the last `</answer>` at the end of a line or of the text; -1 if there is none."""
    if text.endswith("</answer>"):
        return len(text) - len("</answer>")
    return text.rfind("</answer>\n")

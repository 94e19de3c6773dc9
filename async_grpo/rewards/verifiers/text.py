"""Verifiers that compare texts: the last number of a completion, a number or text in a box, DAPO's `Answer:` line."""

from __future__ import annotations

import re

from async_grpo.rewards.verifiers import extracts
from async_grpo.rewards.verifiers.boxed import in_last_box

_DIGIT_COMMA = re.compile(r"(\d),(\d)")
_NUMBER = re.compile(r"[-+]?\d++\.?\d*+")
_BOXED_NUMBER = re.compile(r"boxed\{([-+]?)([\d.]*+)\}")

_TAIL_CHARACTERS = 300
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"
_BOX_CHARACTERS = 100
_TOOL_CALL_BONUS = 0.1
_LONGEST_REFERENCE = 4096
"""Most characters of a reference of `acc_for_dapo`: some rewriting below takes time quadratic in its length."""

_REWRITTEN = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def last_number(completion: str) -> str:
    """What `accuracy_reward` compares: the last number, or the whole text in lower case if it has none."""
    numbers = _NUMBER.findall(given := _without_commas(completion))
    return (numbers[-1] if numbers else given).lower()


@extracts(last_number)
def accuracy_reward(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the first number of the reference, as texts, else 0.

    A comma between two digits goes first. A number is `[-+]?\\d+\\.?\\d*`, so "18." and "18.0" are not "18". A text
    without a number is compared as a whole, in lower case.

    >>> [accuracy_reward(text, "1,800 eggs, 3 a day") for text in ("3 * 600 = 1,800", "so 1800.")]
    [1.0, 0.0]
    """
    return _same(last_number(completion), answer)


def last_boxed_number(completion: str) -> str:
    """What `qwen_accuracy_reward` compares: the last number in a box, or the whole text in lower case."""
    boxes = _BOXED_NUMBER.findall(given := _without_commas(completion))
    numbers = [sign + digits for sign, digits in boxes if _is_number(digits)]
    return (numbers[-1] if numbers else given).lower()


@extracts(last_boxed_number)
def qwen_accuracy_reward(completion: str, answer: str) -> float:
    r"""Like `accuracy_reward`, with the number from the last `boxed{..}` that holds nothing but `[-+]?\d*\.?\d+`.

    >>> [qwen_accuracy_reward(text, "18") for text in (r"\boxed{18}, not 17", "it is 18", r"\boxed{18 eggs}")]
    [1.0, 0.0, 0.0]
    """
    return _same(last_boxed_number(completion), answer)


def dapo_answer(completion: str) -> str | None:
    """What `acc_for_dapo` compares, in Minerva's normal form; None without an `Answer:` line."""
    lines = _ANSWER_LINE.findall(completion[-_TAIL_CHARACTERS:])
    return minerva(lines[-1]) if lines else None


@extracts(dapo_answer)
def acc_for_dapo(completion: str, answer: str) -> float:
    """1 if the last `Answer: ...` line in the final 300 characters equals the reference, else -1.

    Both are normalised as by Minerva (arXiv 2206.14858, appendix D): what follows the last `=`, without articles,
    units and spaces, with the content of `$..$`, `\\text{..}`, `\\boxed{..}`, and fractions and roots in braces.
    Raises ValueError for a reference above 4,096 characters.

    >>> [acc_for_dapo(text, "1/2") for text in ("Answer: $x = 1/2$", "it is 1/2")]
    [1.0, -1.0]
    """
    if len(answer) > _LONGEST_REFERENCE:
        raise ValueError(f"a reference answer of {len(answer)} characters is above {_LONGEST_REFERENCE}")
    given = dapo_answer(completion)
    return 1.0 if (minerva(_NO_ANSWER) if given is None else given) == minerva(answer) else -1.0


def minerva(text: str) -> str:
    r"""A final answer in Minerva's normal form.

    >>> [minerva(text) for text in (r"x = 1,800 dollars", r"$\frac12$", r"\text{even}", "the answer is a sqrt2")]
    ['1800', '\\frac{1}{2}', 'even', 'theanswerissqrt{2}']
    """
    text = text.rpartition("=")[2]
    for before, after in _REWRITTEN:
        text = text.replace(before, after)
    for unit in _UNITS:
        text = text.replace(unit, "")
    for pattern, inside in _UNWRAPPED:
        text = pattern.sub(inside, text)
    text = text.replace("$", "")
    plain = text.replace(",", "")
    return (plain if plain.isdigit() else text).strip()


def tail_box(completion: str) -> str | None:
    """The text that `retool_reward` compares; None without a box in the final 100 characters."""
    return in_last_box(completion[-_BOX_CHARACTERS:])


@extracts(tail_box)
def retool_reward(completion: str, answer: str, *, tool_calls: int = 0) -> float:
    r"""1 if the last `\boxed{..}` of the final 100 characters, `\boxed{` included, is exactly the reference. Else -1
    plus 0.1 for every tool call, 0 at most.

    >>> [retool_reward(text, "18", tool_calls=2) for text in (r"\boxed{18}", r"\boxed{18.}", "18")]
    [1.0, -0.8, -0.8]
    """
    return 1.0 if tail_box(completion) == answer else min(0.0, _TOOL_CALL_BONUS * tool_calls - 1.0)


def _same(given: str, answer: str) -> float:
    """1 if `given`, in lower case, is the first number of the reference (or all of it, if it has none), else 0."""
    reference = _without_commas(answer)
    number = _NUMBER.search(reference)
    return float(given == (number[0] if number else reference).lower())


def _without_commas(text: str) -> str:
    """The text without commas between two digits. A digit belongs to one pair only: "1,2,3" becomes "12,3"."""
    return _DIGIT_COMMA.sub(r"\1\2", text)


def _is_number(digits: str) -> bool:
    r"""Whether all of it is `\d*\.?\d+`; it consists of digits and points."""
    whole, _, decimals = digits.rpartition(".")
    return decimals.isdecimal() and (not whole or whole.isdecimal())

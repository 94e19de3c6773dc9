"""Verifiers that compare text: the last number of a completion, a number or text in a box, DAPO's `Answer:` line."""

from __future__ import annotations

import re

from async_grpo.rewards.verifiers import extracts
from async_grpo.rewards.verifiers.boxed import find_last_box

_DIGIT_COMMA = re.compile(r"(\d),(\d)")
_NUMBER = re.compile(r"[-+]?\d++\.?\d*+")
_BOXED_NUMBER = re.compile(r"boxed\{([-+]?)([\d.]*+)\}")

_TAIL_CHARACTERS = 300
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"
_BOX_CHARACTERS = 100
_TOOL_CALL_BONUS = 0.1
_LONGEST_REFERENCE = 4096
"""Maximum length of a reference for `acc_for_dapo`: some substitutions below take quadratic time."""

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


def extract_last_number(completion: str) -> str:
    """Return the text that `accuracy_reward` compares: the last number, or else the whole text in lower case."""
    text = _remove_digit_commas(completion)
    numbers = _NUMBER.findall(text)
    return (numbers[-1] if numbers else text).lower()


@extracts(extract_last_number)
def accuracy_reward(completion: str, answer: str) -> float:
    """Return 1 if the last number of the completion equals the first number of the reference, as text, else 0.

    Commas between two digits are removed first. A number is `[-+]?\\d+\\.?\\d*`, so "18." and "18.0" are not "18". A
    text without numbers is compared as a whole, in lower case.

    >>> [accuracy_reward(text, "1,800 eggs, 3 a day") for text in ("3 * 600 = 1,800", "so 1800.")]
    [1.0, 0.0]
    """
    return _compare_with_first_number(extract_last_number(completion), answer)


def extract_last_boxed_number(completion: str) -> str:
    """Return the text that `qwen_accuracy_reward` compares: the last number in a box, or else the whole text in lower
    case."""
    text = _remove_digit_commas(completion)
    numbers = [sign + digits for sign, digits in _BOXED_NUMBER.findall(text) if _is_number(digits)]
    return (numbers[-1] if numbers else text).lower()


@extracts(extract_last_boxed_number)
def qwen_accuracy_reward(completion: str, answer: str) -> float:
    r"""Like `accuracy_reward`, with the number from the last `boxed{..}` whose whole content is `[-+]?\d*\.?\d+`.

    >>> [qwen_accuracy_reward(text, "18") for text in (r"\boxed{18}, not 17", "it is 18", r"\boxed{18 eggs}")]
    [1.0, 0.0, 0.0]
    """
    return _compare_with_first_number(extract_last_boxed_number(completion), answer)


def extract_answer_line(completion: str) -> str | None:
    """Return the text that `acc_for_dapo` compares, in Minerva's normal form; None without an `Answer:` line."""
    lines = _ANSWER_LINE.findall(completion[-_TAIL_CHARACTERS:])
    return normalize_minerva(lines[-1]) if lines else None


@extracts(extract_answer_line)
def acc_for_dapo(completion: str, answer: str) -> float:
    """Return 1 if the last `Answer: ...` line of the final 300 characters equals the reference, else -1.

    Both are normalised as in Minerva (arXiv 2206.14858, appendix D): only the text after the last `=`, without
    articles, units and spaces; `$..$`, `\\text{..}` and `\\boxed{..}` are replaced by their content; arguments of
    fractions and roots get braces.

    Raises ValueError for a reference longer than 4,096 characters.

    >>> [acc_for_dapo(text, "1/2") for text in ("Answer: $x = 1/2$", "it is 1/2")]
    [1.0, -1.0]
    """
    if len(answer) > _LONGEST_REFERENCE:
        raise ValueError(f"the reference answer has {len(answer)} characters, above the limit of {_LONGEST_REFERENCE}")
    extracted = extract_answer_line(completion)
    if extracted is None:
        # As in DAPO: a completion without an answer is right if the reference is this text.
        extracted = normalize_minerva(_NO_ANSWER)
    return 1.0 if extracted == normalize_minerva(answer) else -1.0


def normalize_minerva(text: str) -> str:
    r"""Return a final answer in Minerva's normal form.

    >>> texts = (r"x = 1,800 dollars", r"$\frac12$", r"\text{even}", "the answer is a sqrt2")
    >>> [normalize_minerva(text) for text in texts]
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


def extract_tail_box(completion: str) -> str | None:
    """Return the text that `retool_reward` compares; None without a box in the final 100 characters."""
    return find_last_box(completion[-_BOX_CHARACTERS:])


@extracts(extract_tail_box)
def retool_reward(completion: str, answer: str, *, tool_calls: int = 0) -> float:
    r"""Return 1 if the last `\boxed{..}` of the final 100 characters contains exactly the reference; else -1 plus 0.1
    per tool call, at most 0. The `\boxed{` itself must be within the 100 characters.

    >>> [retool_reward(text, "18", tool_calls=2) for text in (r"\boxed{18}", r"\boxed{18.}", "18")]
    [1.0, -0.8, -0.8]
    """
    if extract_tail_box(completion) == answer:
        return 1.0
    return min(0.0, _TOOL_CALL_BONUS * tool_calls - 1.0)


def _compare_with_first_number(extracted: str, answer: str) -> float:
    """Return 1 if `extracted` is the first number of the reference, or all of it if it has none; else 0."""
    reference = _remove_digit_commas(answer)
    number = _NUMBER.search(reference)
    return float(extracted == (number[0] if number else reference).lower())


def _remove_digit_commas(text: str) -> str:
    """Remove commas between two digits. Matches do not overlap, so "1,2,3" becomes "12,3"."""
    return _DIGIT_COMMA.sub(r"\1\2", text)


def _is_number(digits: str) -> bool:
    r"""True if `digits`, which consists of digits and points, matches `\d*\.?\d+`."""
    whole, _, decimals = digits.rpartition(".")
    return decimals.isdecimal() and (not whole or whole.isdecimal())

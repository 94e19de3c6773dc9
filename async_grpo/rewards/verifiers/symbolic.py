"""Symbolic comparison of mathematical answers with the package math-verify, and the verifiers based on it.

The package's own time limits are disabled: they use SIGALRM, and the pool kills a worker that hangs anyway. Only `acc`
sets a limit, because its rule includes one.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from async_grpo.errors import DependencyError
from async_grpo.rewards.verifiers import extracts
from async_grpo.rewards.verifiers.boxed import find_text_after_boxed, has_boxed_answer_format

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise DependencyError(
        f"the rewards math_verify, math_verify_reward and acc need a package ({error}). Type: pip install math-verify"
    ) from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit: the pool sets one

_LATEX = (LatexExtractionConfig(),)
_ANYTHING = (*_LATEX, ExprExtractionConfig())
ACC_TIMEOUT_S = 1.0
_INTEGER = re.compile(r"[-+]?(?:[0-9]{1,40}|[0-9]{1,3}(?:,[0-9]{3}){1,12})")
"""Most answers are integers. They are compared without computer algebra."""
_MARKED = re.compile(r"\\boxed|(?<!\\)\$")
"""LaTeX with a delimiter that math-verify recognises. An escaped dollar is a currency sign."""


def extract_final_expression(completion: str) -> str | None:
    """Return the expression that `math_verify` compares, as sympy prints it; None if there is none."""
    expressions = _parse(completion)
    return str(expressions[0]) if expressions else None


@extracts(extract_final_expression)
def math_verify(completion: str, answer: str) -> float:
    """Return 1 if the final expression of the completion equals the reference (after `####`, if any), else 0.

    math-verify decides which expression is final: X in "final answer is X. I hope", or else the later of the last
    `\\boxed{..}` and the last "final answer is X". Consecutive boxes form a set: `\\boxed{1} and \\boxed{2}` is {1, 2},
    even if the second box corrects the first.

    Raises ValueError if the reference is not an expression.

    >>> math_verify("so it is $0.5$", r"\\frac{1}{2}")
    1.0
    """
    # `verify` is not symmetric: the reference must come first.
    return float(verify(_parse_reference(answer), _parse(completion), timeout_seconds=None))


def extract_formatted_expression(completion: str) -> str | None:
    """Return the expression that `math_verify_reward` compares; None for a completion without its format."""
    return extract_final_expression(completion) if has_boxed_answer_format(completion) else None


@extracts(extract_formatted_expression)
def math_verify_reward(completion: str, answer: str) -> float:
    """Return `math_verify` for a completion of the form `<think>..</think>..<answer>..\\boxed{..}..</answer>`, else 0.

    The reference is always parsed as LaTeX in a box.
    """
    if not has_boxed_answer_format(completion):
        return 0.0
    expected = _parse(f"\\boxed{{{_reference_value(answer)}}}", _LATEX)
    return float(verify(_require_expression(expected, answer), _parse(completion), timeout_seconds=None))


def extract_text_after_boxed(completion: str) -> str | None:
    """Return the text that `acc` compares, with one spelling per integer; None if there is none."""
    return normalize_answer(find_text_after_boxed(completion).strip()) or None


@extracts(extract_text_after_boxed)
def acc(completion: str, answer: str) -> float | None:
    """Return 1 if the text in (or after) the last "boxed" equals the reference, -0.5 if it does not, -1 without such a
    text; None (unverifiable) if the comparison takes longer than a second.

    Raises ValueError if the reference is not an expression.

    >>> [acc(text, "18") for text in (r"\\boxed{18}", r"\\boxed{17}", "18")]
    [1.0, -0.5, -1.0]
    """
    answer_text = find_text_after_boxed(completion).strip()
    if not answer_text:
        return -1.0
    try:
        with _time_limit(ACC_TIMEOUT_S):
            return 1.0 if are_equal_expressions(answer_text, answer) else -0.5
    except _TimeLimitReached:
        # MindSpeed-RL returns 0 here. That is more than a wrong answer gets, so a policy would learn to write
        # expressions that cannot be evaluated (`9^{9^{9^{9}}}`).
        return None


def normalize_answer(text: str) -> str:
    """Return an answer in lower case, without whitespace, and integers without commas and sign +.

    >>> [normalize_answer(text) for text in ("1,800", "+18", r"\\frac{1}{2} X")]
    ['1800', '18', '\\\\frac{1}{2}x']
    """
    squeezed = _squeeze(text)
    if not _INTEGER.fullmatch(squeezed):
        return squeezed
    return str(int(squeezed.replace(",", "")))


def are_equal_expressions(text: str, answer: str) -> bool:
    """True if `text` equals the reference (after `####`, if any).

    They are compared as text in lower case without whitespace, then symbolically. Raises ValueError if the texts differ
    and the reference is not an expression.
    """
    squeezed = _squeeze(text)
    reference = _squeeze(_reference_value(answer))
    if squeezed == reference:
        return True
    if _INTEGER.fullmatch(squeezed) and _INTEGER.fullmatch(reference):
        return int(squeezed.replace(",", "")) == int(reference.replace(",", ""))
    expected = _parse_reference(answer)
    return bool(verify(expected, _parse(f"\\boxed{{{text}}}"), timeout_seconds=None))


def _reference_value(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def _squeeze(text: str) -> str:
    return "".join(text.split()).lower()


def _parse_reference(answer: str) -> list[Any]:
    reference = _reference_value(answer)
    if not _MARKED.search(reference):
        # Without a delimiter, math-verify would read only the 3 of `3\sqrt{2}`.
        reference = f"\\boxed{{{reference}}}"
    return _require_expression(_parse(reference), answer)


def _require_expression(expressions: list[Any], answer: str) -> list[Any]:
    if not expressions:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a mathematical expression")
    return expressions


def _parse(text: str, targets: Sequence[object] = _ANYTHING) -> list[Any]:
    expressions: list[Any] = parse(text, targets, parsing_timeout=None)
    return expressions


class _TimeLimitReached(BaseException):
    """Not an Exception, because sympy and math-verify catch those."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeLimitReached in the body after `seconds`.

    Python runs signal handlers only in the main thread and between byte codes. In another thread, or during a long call
    into C, only the pool's deadline limits the time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise_time_limit)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _raise_time_limit(number: int, frame: FrameType | None) -> None:
    raise _TimeLimitReached

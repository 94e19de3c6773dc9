"""Symbolic equality of mathematical answers, by the package math-verify, and the verifiers that rest on it.

The package's own time limits are switched off: they use SIGALRM, and a process that hangs is killed anyway.
`acc` alone has a limit of its own, because its rule has one.
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
from async_grpo.rewards.verifiers.boxed import behind_last_boxed, is_whole

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
"""Most answers are integers, which are compared without algebra."""
_MARKED = re.compile(r"\\boxed|(?<!\\)\$")
"""LaTeX with a mark where it begins. An escaped dollar is a sum of money."""


def final_expression(completion: str) -> str | None:
    """The expression that `math_verify` compares, as sympy writes it; None if there is none."""
    found = _parse(completion)
    return str(found[0]) if found else None


@extracts(final_expression)
def math_verify(completion: str, answer: str) -> float:
    """1 if the final expression of the completion equals the reference (after `####`, where it has that), else 0.

    What is final is the package's decision: what "final answer is X. I hope" names, or else the later of the last
    `\\boxed{..}` and the last "final answer is X"; several boxes that follow each other are one set (`\\boxed{1} and
    \\boxed{2}` is {1, 2}, and so is a box that is corrected by a second one).
    Raises ValueError if the reference is not an expression.

    `verify` is not symmetric: the reference comes first. A bare LaTeX reference is boxed before it is parsed,
    because outside of any environment `3\\sqrt{2}` would be read as 3.

    >>> math_verify("so it is $0.5$", r"\\frac{1}{2}")
    1.0
    """
    return float(verify(_expected(answer), _parse(completion), timeout_seconds=None))


def formatted_expression(completion: str) -> str | None:
    """`final_expression` for `math_verify_reward`: None for a completion without its form."""
    return final_expression(completion) if is_whole(completion) else None


@extracts(formatted_expression)
def math_verify_reward(completion: str, answer: str) -> float:
    """`math_verify` for a completion that is `<think>..</think>..<answer>..\\boxed{..}..</answer>`, else 0. The
    reference is always boxed, and read as LaTeX only."""
    if not is_whole(completion):
        return 0.0
    expected = _parse(f"\\boxed{{{_gold(answer)}}}", _LATEX)
    return float(verify(_some(expected, answer), _parse(completion), timeout_seconds=None))


def behind_box(completion: str) -> str | None:
    """What `acc` compares, as one text for all spellings of an integer; None if there is nothing."""
    return canonical(behind_last_boxed(completion).strip()) or None


@extracts(behind_box)
def acc(completion: str, answer: str) -> float | None:
    """1 if what stands in (or behind) the last "boxed" equals the reference, -0.5 if it does not, -1 if there is no
    "boxed" or nothing in it; None, which cannot be judged, if comparing takes longer than a second.

    MindSpeed-RL scores 0 then. That is more than a wrong answer gets, so a policy learns to write what cannot be worked
    out (`9^{9^{9^{9}}}`).

    Raises ValueError if the reference is not an expression.

    >>> [acc(text, "18") for text in (r"\\boxed{18}", r"\\boxed{17}", "18")]
    [1.0, -0.5, -1.0]
    """
    given = behind_last_boxed(completion).strip()
    if not given:
        return -1.0
    try:
        with _at_most(ACC_TIMEOUT_S):
            return 1.0 if equal(given, answer) else -0.5
    except _TimeIsUp:
        return None


def canonical(given: str) -> str:
    """An answer as `equal` first looks at it: in lower case, without whitespace, integers without commas and sign +.

    >>> [canonical(text) for text in ("1,800", "+18", r"\\frac{1}{2} X")]
    ['1800', '18', '\\\\frac{1}{2}x']
    """
    text = _squeezed(given)
    return str(int(text.replace(",", ""))) if _INTEGER.fullmatch(text) else text


def equal(given: str, answer: str) -> bool:
    """Whether an answer equals the reference (after `####`, where it has that).

    They are compared as texts without whitespace and in lower case, then symbolically. Raises ValueError if the texts
    differ and the reference is not an expression.
    """
    one, other = _squeezed(given), _squeezed(_gold(answer))
    if one == other:
        return True
    if _INTEGER.fullmatch(one) and _INTEGER.fullmatch(other):
        return int(one.replace(",", "")) == int(other.replace(",", ""))
    expected = _expected(answer)
    return bool(verify(expected, _parse(f"\\boxed{{{given}}}"), timeout_seconds=None))


def _gold(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def _squeezed(text: str) -> str:
    return "".join(text.split()).lower()


def _expected(answer: str) -> list[Any]:
    gold = _gold(answer)
    marked = gold if _MARKED.search(gold) else f"\\boxed{{{gold}}}"
    return _some(_parse(marked), answer)


def _some(expected: list[Any], answer: str) -> list[Any]:
    if not expected:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a mathematical expression")
    return expected


def _parse(text: str, targets: Sequence[object] = _ANYTHING) -> list[Any]:
    found: list[Any] = parse(text, targets, parsing_timeout=None)
    return found


class _TimeIsUp(BaseException):
    """A BaseException, so that no `except Exception` on the way can swallow it."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise _TimeIsUp after so many seconds.

    Signals only reach Python code in the main thread. In another thread, or in a loop written in C, only the deadline
    of the pool limits the time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise _TimeIsUp

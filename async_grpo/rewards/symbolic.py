"""`math_verify`: symbolic equality of mathematical answers, by the package of that name."""

from __future__ import annotations

import logging
from typing import Any

from async_grpo.errors import DependencyError

try:
    from math_verify import parse, verify
except ImportError as error:
    raise DependencyError(f"the reward math_verify needs a package ({error}). Type: pip install math-verify") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit: the pool is one


def math_verify(completion: str, answer: str) -> float:
    """1 if the final expression of the completion equals the reference (after `####`, where it has that), else 0.

    What is final is the package's decision: a `\\boxed{..}` before anything else, several that follow each other
    as one set (`\\boxed{1} and \\boxed{2}` is {1, 2}, and so is a box that is corrected by a second one).
    Raises ValueError if the reference is no expression.

    The package's time limits are switched off: they use SIGALRM, and a process that hangs is killed anyway.
    `verify` is not symmetric: the reference comes first. A bare LaTeX reference is boxed before it is parsed,
    because outside of any environment `3\\sqrt{2}` would be read as 3.

    >>> math_verify("so it is $0.5$", r"\\frac{1}{2}")
    1.0
    """
    gold = answer.rpartition("####")[2].strip()
    marked = gold if "\\boxed" in gold or "$" in gold else f"\\boxed{{{gold}}}"
    expected = _parse(marked)
    if not expected:
        raise ValueError(f"the reference answer {answer[:80]!r} is no mathematical expression")
    return float(verify(expected, _parse(completion), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)
    return found

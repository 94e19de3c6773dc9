"""What counts as a score."""

from __future__ import annotations

MAX_SCORE = 1e6
"""Of the absolute value: beyond it, float32 losses lose everything else in the batch."""


def as_score(value: object) -> float:
    """A number, or what says that it is one (numpy and torch scalars). Raises ValueError for anything else.

    A text is none, even "1": a function that returns its answer instead of a score should be noticed.
    """
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"{_shown(value)} is a {type(value).__name__}, not a number")
    try:
        score = float(value)
    except Exception as error:  # whatever the __float__ of a value of the user's may raise
        raise ValueError(f"a {type(value).__name__} is no score: {type(error).__name__}: {error}") from error
    if not abs(score) <= MAX_SCORE:
        raise ValueError(f"{score} is not a finite number within {MAX_SCORE:g}")
    return score


def _shown(value: object) -> str:
    """Bounded, also for values whose repr raises."""
    try:
        return repr(value)[:80]
    except Exception:  # or its __repr__
        return "the value"

"""Which of several errors to show."""

from __future__ import annotations

from async_grpo.errors import EngineError


def first_cause(error: BaseException) -> BaseException:
    """The error itself, or of a group: the engine's, if there is one (it explains the others), else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, EngineError)), causes[0])

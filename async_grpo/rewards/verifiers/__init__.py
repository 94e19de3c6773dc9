"""The built-in verifiers: `(completion, reference answer) -> score`, pure functions without state or I/O.

- `answers`   answer tags, GSM8K
- `text`      answers compared as texts
- `symbolic`  mathematics, by math-verify
- `prm800k`   short answers, by the rules of OpenAI's grader
- `logic`     knights and knaves
- `boxed`     `\\boxed{..}`, and rules for the form of a completion
- `latex`     LaTeX as plain text

A verifier scores; it never guesses. Where it cannot judge (for example a reference that is not a number), it raises
ValueError, and the sample becomes `unverifiable`, which is not a score of 0.

`@extracts(function)` names the function that finds the answer of a completion, as one text for all spellings. Verifiers
that only look at the form have none, nor has kk_reward, whose answer may begin in the prompt.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def extracts(extract: Callable[[str], str | None]) -> Callable[[F], F]:
    """A decorator: `extract` becomes an attribute of the verifier, as a user's function has it."""

    def mark(verifier: F) -> F:
        vars(verifier)["extract"] = extract
        return verifier

    return mark

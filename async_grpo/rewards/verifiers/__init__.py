"""The built-in verifiers: `(completion, reference answer) -> score`, pure functions without state or I/O.

- `answers`   answer tags, GSM8K
- `text`      answers compared as text
- `symbolic`  mathematics, compared with math-verify
- `prm800k`   short answers, compared by the rules of OpenAI's PRM800K grader
- `logic`     knights-and-knaves puzzles
- `boxed`     `\\boxed{..}`, and format rules
- `latex`     conversion of LaTeX to plain text

A verifier never guesses. If it cannot judge (for example, because the reference is not a number), it raises ValueError
and the sample becomes `unverifiable`, which is different from a score of 0.

`@extracts(function)` attaches the function that extracts the answer of a completion, with equal answers as equal text
where possible; maj@k needs it. Verifiers that only check the format have none. kk_reward has none either, because its
answer may start in the prompt.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def extracts(extract: Callable[[str], str | None]) -> Callable[[F], F]:
    """Return a decorator that sets `extract` as the attribute `extract` of a verifier. Users set theirs directly."""

    def attach(verifier: F) -> F:
        vars(verifier)["extract"] = extract
        return verifier

    return attach

"""What is to be measured, from what was typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from async_grpo.bench.pipeline.lengths import Kind
from async_grpo.errors import ConfigError

STALENESS, REPETITIONS, STEPS = "0,1,2,4,8", 3, 12
QUICK_STALENESS, QUICK_REPETITIONS, QUICK_STEPS = "0,2", 1, 2


@dataclass(frozen=True, slots=True)
class Ask:
    """The options of the bench, checked."""

    staleness: tuple[int, ...]
    repetitions: int
    steps: int
    """M: timed ones of a run."""
    lengths: Kind
    lengths_from: Path | None
    prompt_tokens: int | None
    """None: calibrated."""
    cores: int
    """Of each side."""
    quick: bool


def asked(
    *,
    quick: bool,
    staleness: str = "",
    repetitions: int | None = None,
    steps: int | None = None,
    lengths: Kind = "lognormal",
    lengths_from: Path | None = None,
    prompt_tokens: int | None = None,
    cores: int = 1,
) -> Ask:
    """Defaults where nothing was said. Raises ConfigError for a list of S without the baseline.

    >>> asked(quick=False, staleness="0,2").staleness
    (0, 2)
    """
    return Ask(
        staleness=_parse(staleness or (QUICK_STALENESS if quick else STALENESS)),
        repetitions=repetitions or (QUICK_REPETITIONS if quick else REPETITIONS),
        steps=steps or (QUICK_STEPS if quick else STEPS),
        lengths=lengths,
        lengths_from=lengths_from,
        prompt_tokens=prompt_tokens,
        cores=cores,
        quick=quick,
    )


def _parse(text: str) -> tuple[int, ...]:
    values = [part.strip() for part in text.split(",")]
    numbers = tuple(int(value) for value in values if value.isdecimal())
    if len(numbers) < len(values) or 0 not in numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"--staleness is {text!r}, and must be whole numbers, each once, with 0 among them: that is the "
            "synchronous loop, with which the others are compared. Give for example --staleness 0,2"
        )
    return numbers

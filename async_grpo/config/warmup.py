"""The quickstart's task and the supervised stage that makes its first policy."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from async_grpo.config.base import PositiveInt, StrictModel
from async_grpo.config.tiny_qwen2 import TinyQwen2Config

Probability = Annotated[float, Field(ge=0, le=1)]


class ArithmeticTaskConfig(StrictModel):
    """Addition of two numbers, worked out digit by digit with a carry."""

    digits: Annotated[int, Field(ge=2, le=9)] = 3
    """Of each summand; the first digit is never 0, so there are (9 * 10 ** (digits - 1)) ** 2 problems."""
    held_out: Annotated[int, Field(ge=1, le=4096)] = 256
    """Problems kept for evaluation; no other stream of the same seed contains one of them."""

    @property
    def max_completion_tokens(self) -> int:
        """Length of the longest demonstration, with its end token: 10 * digits + 5."""
        return 10 * self.digits + 5


class WarmupConfig(TinyQwen2Config):
    """A tiny Qwen2 that has been taught both to reason and to guess, and does either by chance.

    Every demonstration is correct. A share of them reasons first; the others answer at once, which a
    model of this size cannot do. So the accuracy is about reasoning_share * (accuracy when
    reasoning), and a reward for the right answer teaches the policy to think before it answers.
    """

    task: ArithmeticTaskConfig = ArithmeticTaskConfig()

    layers: PositiveInt = 2
    """Two are enough to reason digit by digit, and too few to add three digits in one go."""
    intermediate_size: PositiveInt = 384
    max_positions: PositiveInt = 128
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Of all matrices. At the customary 0.02 the same accuracy takes twice as many steps."""

    reasoning_share: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of the demonstrations that reason before they answer."""
    steps: PositiveInt = 340
    batch_size: Annotated[int, Field(ge=2)] = 96
    """Demonstrations of one step."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak; then a cosine down to a twentieth."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 20

    probe_every: PositiveInt = 40
    """Steps between two measurements of the sampled accuracy."""
    probe_samples: PositiveInt = 256
    """Completions of one measurement, at temperature 1, on problems that are not held out."""
    accuracy_limit: Probability = 0.5
    """A policy that passes this is too good to be a start: the one of the previous probe is kept."""
    accuracy_floor: Probability = 0.25
    """Held-out accuracy that the result must have: below it, GRPO has too little to build on."""
    threads: PositiveInt = 1
    """torch threads when run as a program."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        need = 2 * self.task.digits + 2 + self.task.max_completion_tokens
        if self.max_positions < need:
            raise ValueError(
                f"max_positions ({self.max_positions}) is below the {need} tokens of a whole demonstration with "
                f"{self.task.digits} digits. Raise max_positions to {need} or lower task.digits"
            )
        return self

    @model_validator(mode="after")
    def _accuracies_ordered(self) -> Self:
        if self.accuracy_floor >= self.accuracy_limit:
            raise ValueError(
                f"accuracy_floor ({self.accuracy_floor:g}) is not below accuracy_limit "
                f"({self.accuracy_limit:g}): no policy would be accepted. Lower accuracy_floor"
            )
        return self

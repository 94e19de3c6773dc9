"""Base class of all configuration sections: immutable, and strict about unknown keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class StrictModel(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    def find_problems(self) -> Iterator[str]:
        """Yield an error message, with rule and fix, per combination of values that cannot work.

        Covers this section only. Conflicts with other sections are found by the section's
        `find_conflicts`, which `RunConfig.find_problems` calls.
        """
        yield from ()

    @model_validator(mode="after")
    def _reject_problems(self) -> Self:
        # Report only the first problem: the next ones are often consequences of it.
        problem = next(self.find_problems(), None)
        if problem is not None:
            raise ValueError(problem)
        return self

"""The base of every configuration model: immutable, and unknown keys are errors."""

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

    def problems(self) -> Iterator[str]:
        """Yield conflicts between values of this section, each with rule and fix. The first one is reported.

        Conflicts with other sections are yielded by a section's `problems_in_run`, which `RunConfig.problems` calls.
        """
        yield from ()

    @model_validator(mode="after")
    def _combination_works(self) -> Self:
        if problem := next(self.problems(), None):
            raise ValueError(problem)
        return self

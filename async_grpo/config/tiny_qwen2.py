"""The shape of the tiny Qwen2 models that a run can make for itself."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from async_grpo.config.base import PositiveInt, StrictModel

HEAD_SIZES = (32, 64, 128)
"""For which the CPU engine has an attention kernel."""


class TinyQwen2Config(StrictModel):
    """Sizes and initialisation; the vocabulary is that of the tokenizer."""

    hidden_size: PositiveInt = 128
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    """hidden_size / heads is the size of a head: 32, 64 or 128."""
    kv_heads: PositiveInt = 2
    intermediate_size: PositiveInt = 256
    tie_embeddings: bool = True
    max_positions: PositiveInt = 2048
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Of all matrices."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in HEAD_SIZES:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) / heads ({self.heads}) is the size of a head and must be one of "
                f"{HEAD_SIZES}: the CPU engine has no attention kernel for others. Set heads to hidden_size / 32"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads}), so query heads cannot "
                "share key heads evenly. Set kv_heads to a divisor of heads"
            )
        return self

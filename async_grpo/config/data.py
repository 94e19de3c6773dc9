"""The prompts and their reference answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from async_grpo.config.base import PositiveInt, StrictModel
from async_grpo.config.warmup import ArithmeticTaskConfig


class DataConfig(StrictModel):
    """The prompts and their reference answers."""

    kind: Literal["arithmetic", "jsonl"] = "arithmetic"
    arithmetic: ArithmeticTaskConfig = ArithmeticTaskConfig()
    path: Path | None = None
    """A JSON-lines file (kind: jsonl)."""
    eval_path: Path | None = None
    """A JSON-lines file of held-out prompts; without it the last `eval.prompts` rows are held out."""
    prompt_field: str = "question"
    answer_field: str = "answer"
    template: str = "{prompt}"
    """Text around the prompt; `{prompt}` is replaced."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are dropped when the data are loaded, with a count."""
    shuffle: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("kind jsonl needs a file. Set data.path, for example -o data.path=train.jsonl")
        if "{prompt}" not in self.template:
            raise ValueError(f"template {self.template!r} does not contain {{prompt}}. Add it where the prompt goes")
        return self

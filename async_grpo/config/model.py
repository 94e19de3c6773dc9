"""Where the first policy comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from async_grpo.config.base import StrictModel
from async_grpo.config.tiny_qwen2 import TinyQwen2Config
from async_grpo.config.warmup import WarmupConfig

Precision = Literal["float32", "bfloat16"]


class RandomModelConfig(TinyQwen2Config):
    """A randomly initialised tiny Qwen2, for tests of the machinery: it learns nothing."""

    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """Size of the byte-level BPE vocabulary trained on the prompts."""


class ModelConfig(StrictModel):
    """Where the first policy comes from: exactly one of `path`, `warmup` and `random`."""

    path: Path | None = None
    """A Hugging Face checkpoint folder (config.json, safetensors, tokenizer)."""
    architecture: str | None = None
    """The public model that `path` holds, such as qwen2.5-7b. With it `--dry-run` works where the files are not; where
    they are, another model in `path` is an error. docs/platforms.md lists the names."""
    warmup: WarmupConfig | None = None
    """Make a tiny policy by a short supervised stage on the arithmetic task (cached)."""
    random: RandomModelConfig | None = None
    """Make a tiny random policy (cached)."""
    precision: Precision = "float32"
    """Of the weights, in the trainer and in the engine."""

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelConfig:
        given = [name for name in ("path", "warmup", "random") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of path, warmup, random says where the policy comes from, but {given or 'none'} "
                "is given. Set model.path to a Hugging Face checkpoint folder, or keep only one of them"
            )
        if self.architecture is not None and self.path is None:
            raise ValueError(
                f"architecture {self.architecture!r} says what model.path holds, and there is no path. Set model.path, "
                "or leave model.architecture out"
            )
        return self

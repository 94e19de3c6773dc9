"""The Megatron-core trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from async_grpo.config.base import PositiveInt, Seconds, StrictModel
from async_grpo.config.objective import ObjectiveConfig


class OptimizerConfig(StrictModel):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where linear and cosine end."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _floor_below_peak(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g}): the rate would rise. Lower min_lr")
        return self


class CheckpointConfig(StrictModel):
    """Resumable checkpoints under `runs/<name>/checkpoints`."""

    every_steps: PositiveInt = 10
    keep: PositiveInt = 2


class TrainerConfig(StrictModel):
    """The Megatron-core trainer."""

    platform: Literal["cpu"] = "cpu"
    """What the trainer computes on; this version knows the CPU only."""
    processes: PositiveInt = 1
    """Ranks that torchrun starts: tensor_parallel * pipeline_parallel * data-parallel size."""
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    threads: PositiveInt = 1
    """torch threads a rank on CPU."""
    micro_batch_tokens: PositiveInt = 8192
    """Sequences are packed, without padding, into micro-batches of at most this many tokens."""
    take_timeout_s: Seconds = 600.0
    """How long the trainer waits for a batch before it ends with an error."""
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _ranks_divide(self) -> TrainerConfig:
        block = self.tensor_parallel * self.pipeline_parallel
        if self.processes % block:
            raise ValueError(
                f"processes ({self.processes}) is not a multiple of tensor_parallel * pipeline_parallel "
                f"({self.tensor_parallel} * {self.pipeline_parallel} = {block}). "
                f"Set trainer.processes to {block} times the data-parallel size"
            )
        return self

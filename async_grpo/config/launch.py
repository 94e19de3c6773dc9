"""The local supervisor, evaluation, and what a run writes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_grpo.config.base import PositiveInt, Seconds, StrictModel


class EvalConfig(StrictModel):
    """Evaluation on held-out prompts, before, after and every `every_steps` versions."""

    prompts: PositiveInt = 256
    samples: PositiveInt = 4
    """mean@k: completions a prompt at temperature 1."""
    greedy: bool = True
    every_steps: Annotated[int, Field(ge=0)] = 0
    """0: only before and after."""
    timeout_s: Seconds = 600.0


class RestartConfig(StrictModel):
    """What the supervisor does when a role dies."""

    rollout: Annotated[int, Field(ge=0)] = 3
    """Restarts of one rollout server before the run is given up."""
    trainer: Annotated[int, Field(ge=0)] = 3


class LaunchConfig(StrictModel):
    """The local supervisor."""

    restarts: RestartConfig = RestartConfig()
    ready_timeout_s: Seconds = 300.0
    stop_timeout_s: Seconds = 30.0


class TelemetryConfig(StrictModel):
    """What a run writes."""

    tensorboard: bool = True
    samples_every: PositiveInt = 8
    """One finished group in so many is written to samples/*.jsonl."""

"""How a training step is made: its reference model, and what may be streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from async_grpo.config.base import PositiveInt, StrictModel
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.presets import WHOLE_BATCH_ADVANTAGES, is_own


class ReferenceConfig(StrictModel):
    """The policy that the KL divergence is measured from."""

    source: Literal["none", "frozen", "synced"] = "none"
    """`frozen`: the weights of `path`, for the whole run. `synced`: those, and from every `sync_every`-th step on the
    policy's own of then."""
    path: Path | None = None
    """Hugging Face folder of the same architecture. None: the first policy of the run."""
    sync_every: PositiveInt | None = None
    """synced: optimizer steps between two copies."""
    placement: Literal["swap", "model"] = "swap"
    """`swap`: its weights lie in CPU memory, in the policy's own dtype, and are exchanged with the policy's for each
    pass. `model`: a second model beside the policy; no exchange, and the memory of its weights."""

    @model_validator(mode="after")
    def _no_key_in_vain(self) -> ReferenceConfig:
        if self.source == "synced" and self.sync_every is None:
            raise ValueError(
                "source synced needs sync_every, or it would stay frozen. Set trainer.reference.sync_every"
            )
        if self.source != "synced" and self.sync_every is not None:
            raise ValueError(
                f"sync_every ({self.sync_every}) has no effect with source {self.source}. Set "
                "trainer.reference.source to synced, or leave sync_every out"
            )
        if self.source == "none" and self.path is not None:
            raise ValueError("path has no effect with source none. Set trainer.reference.source to frozen")
        return self


def check_kl(objective: ObjectiveConfig, reference: ReferenceConfig) -> None:
    """Raise ValueError for a divergence from nothing."""
    if objective.kl_beta > 0 and reference.source == "none":
        raise ValueError(
            f"objective.kl_beta is {objective.kl_beta:g}, but there is no reference model to diverge from: the term "
            "would be missing. Set trainer.reference.source to frozen or synced, or trainer.objective.kl_beta to 0"
        )


def check_streaming(objective: ObjectiveConfig, *, num_iterations: int, mini_batches: int) -> None:
    """Raise ValueError for an objective that must see the whole batch before its first micro-batch."""
    obstacle = _obstacle(objective, num_iterations, mini_batches)
    if obstacle:
        raise ValueError(
            f"streaming trains a group before the others have arrived, but {obstacle}. Change that, or set "
            "trainer.streaming to false"
        )


def _obstacle(objective: ObjectiveConfig, num_iterations: int, mini_batches: int) -> str:
    if num_iterations > 1:
        return f"num_iterations ({num_iterations}) goes over the batch more than once"
    if mini_batches > 1:
        return f"mini_batches ({mini_batches}) deals out the groups of the whole batch"
    if objective.advantage in WHOLE_BATCH_ADVANTAGES:
        return f"objective.advantage {objective.advantage} needs the rewards of the whole batch"
    if is_own(objective.advantage):
        return f"objective.advantage {objective.advantage}, of your own, is given the rewards of the whole batch"
    for correction in objective.corrections:
        if correction.needs_whole_batch:
            return f"correction {correction.kind} needs the log-probabilities of the whole batch"
    return ""

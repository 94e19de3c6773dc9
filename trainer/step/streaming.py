"""A step that begins with the groups that are there, while others are still being generated.

    some groups --add--> forward, backward --> gradients, not yet divided, not yet summed over ranks
       ^                        |
       +--- some are missing ---+--- none is --close--> sum over ranks, divide, optimizer --> next weights

The loss is a sum over sequences of (own weight / D), and D (tokens or sequences of the batch, by `aggregation`) is
known only when all groups are there. Gradients are therefore accumulated without it and divided once, before the
optimizer sees them: up to rounding, the step equals the one that waits for the whole batch. Advantages are relative to
the group. The configuration refuses objectives that need the whole batch before the first micro-batch.

Each part is packed by itself and trained at once, whether it fills its micro-batches or not: otherwise the trainer
would be idle, and while it computes, more groups gather for the next part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from msgspec import structs

from async_grpo.algorithms import denominator
from async_grpo.wire import Batch
from trainer.batch.sequences import Sequence
from trainer.step.results import StepValues
from trainer.step.statistics import StepSums, reduce_sums
from trainer.step.step import MicroBatchLoss, Step


@dataclass(slots=True)
class StreamedStep(Step):
    """The step `version` -> `version + 1`, made part by part. All calls are collective."""

    parts: list[Batch] = field(default_factory=list)
    found: list[StepSums] = field(default_factory=list)
    members: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        Step.__post_init__(self)
        self.policy.zero_grad()

    @property
    def have(self) -> int:
        """Groups so far."""
        return sum(len(part.groups) for part in self.parts)

    @property
    def complete(self) -> bool:
        """Whether the batch has no more groups."""
        return bool(self.parts) and self.parts[-1].missing == 0

    @property
    def batch(self) -> Batch:
        """All parts as one batch."""
        return structs.replace(self.parts[-1], groups=[group for part in self.parts for group in part.groups])

    def add(self, part: Batch) -> None:
        """Accumulate the gradient of further groups of the batch."""
        self.parts.append(part)
        prepared = self.prepare(part)
        scale = self._denominator(prepared.members)
        loss = MicroBatchLoss(self.config.trainer.objective, self.version, scale=scale)
        with self.phases.span("train", groups=len(part.groups)):
            self.found += self.run(prepared.packed, prepared.precomputed, loss, total=False)
        self.members += prepared.members

    def close(self, lr: float) -> StepValues:
        """Update the weights by the accumulated gradient. Raises NonFiniteStep before it does."""
        total = self._denominator(self.members)
        with self.phases.span("train"):
            self.policy.total_gradients(scale=1.0 / total)
            sums, maxima = reduce_sums(self.found)
        sums["loss"] /= total
        self.update(sums, maxima, lr, None)
        return self.totals.values()

    def _denominator(self, members: list[Sequence]) -> float:
        tokens_N = torch.tensor([member.counted for member in members])
        return denominator(self.config.trainer.objective.aggregation, tokens_N)

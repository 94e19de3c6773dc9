"""A step that begins with the groups that are there, beside one that waits for all of them.

    producer: a group every `seconds` / P --> groups --> add as soon as there are any  --> close
                                                     --> sleep until all are there     --> step

The producer is a clock: it costs no computing time, as rollout servers on machines of their own do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs

from async_grpo.config import RunConfig
from async_grpo.wire import Batch
from trainer.bench.rounds import Done
from trainer.phases import Phases
from trainer.policy import Policy
from trainer.step import train_step
from trainer.streaming import StreamedStep

STREAMED, WAITED = "streamed", "waited"


@dataclass(frozen=True, slots=True)
class SlowProducer:
    """Hands out the groups of `batch` evenly over `seconds`."""

    batch: Batch
    seconds: float

    def parts(self) -> Iterator[Batch]:
        """From now on: whatever has come since the last part, at least one group."""
        started, have, total = time.perf_counter(), 0, len(self.batch.groups)
        while have < total:
            there = int(total * (time.perf_counter() - started) / self.seconds)
            if there <= have:
                time.sleep(max(0.0, started + (have + 1) * self.seconds / total - time.perf_counter()))
                there = have + 1
            there = min(there, total)
            yield structs.replace(self.batch, groups=self.batch.groups[have:there])
            have = there

    def whole(self) -> Batch:
        """From now on: all groups, when the last has come."""
        time.sleep(self.seconds)
        return self.batch


def streamed(policy: Policy, producer: SlowProducer, config: RunConfig) -> Done:
    """Each part is trained when it is there."""
    step = StreamedStep(policy, config, producer.batch.version, Phases())
    for part in producer.parts():
        step.add(part)
    result = step.close(lr=0.0)
    return Done(result.loss, result.grad_norm, result.packing_efficiency)


def waited(policy: Policy, producer: SlowProducer, config: RunConfig) -> Done:
    """The step begins when all groups are there."""
    result = train_step(policy, producer.whole(), config, lr=0.0, phases=Phases())
    return Done(result.loss, result.grad_norm, result.packing_efficiency)

"""Runs one step after another: takes the groups of a step, trains it, or skips it.

    take -----------------> train_step ----------+--> version + 1
    take_part, again and again --> StreamedStep -+        |
                                                 |        +--> reference model, every sync_every steps
                            NonFiniteStep        +--> batch into run_dir/dumps/step-N.msgpack, version + 1 with the
                                                      weights as they are then

It waits for the coordinator alone: for P groups, or with `trainer.streaming` for one after another.

One step whose loss or gradient is not finite may be bad luck. Its groups are released like trained ones. After
`trainer.max_skipped_steps` such steps in a row the run ends with TrainingError. All ranks come to the same decision,
because they see the same loss and norm; rank 0 writes the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from async_grpo.config import RunConfig
from async_grpo.errors import NonFiniteStep, TrainingError, WireError
from async_grpo.utils.files import write_atomic
from async_grpo.wire import Batch, encode
from async_grpo.wire.records import Record
from trainer.coordinator import Coordinator
from trainer.model.optimizer import learning_rate
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.run_logger import TrainerLogger
from trainer.step.results import StepValues
from trainer.step.step import StreamedStep, train_step

KEPT = 8
"""Number of dumps of a run; those of the oldest steps are deleted first."""


class SkippedBatch(Record, frozen=True, kw_only=True, tag="dump"):
    """The batch of a step that was skipped, readable with the plain `msgpack` package."""

    step: int
    reason: str
    time_s: float
    batch: Batch


@dataclass(slots=True)
class SkippedSteps:
    """Counts the skipped steps of one trainer process, and dumps their batches."""

    folder: Path
    limit: int
    writes: bool
    """Whether this rank writes the dumps."""
    in_a_row: int = 0

    def reset(self) -> None:
        """Set the count to 0: a step was trained."""
        self.in_a_row = 0

    def record_skip(self, batch: Batch, fault: NonFiniteStep) -> str:
        """Count a step that was skipped because of `fault` and dump its batch. Returns a sentence that says where.

        Raises TrainingError if it is one too many.
        """
        self.in_a_row += 1
        dumped = self._try_to_dump(batch, fault) if self.writes else ""
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"{self.in_a_row} steps in a row had a loss or a gradient that is not finite "
                f"(trainer.max_skipped_steps is {self.limit}), the last one with: {fault}. Checkpoints hold the "
                f"weights before them. {dumped}".rstrip()
            ) from fault
        return dumped

    def _try_to_dump(self, batch: Batch, fault: NonFiniteStep) -> str:
        """A dump is only there to look at: one that is too large, or a full disk, must not end the run."""
        path = self.folder / f"step-{batch.version + 1}.msgpack"
        dump = SkippedBatch(step=batch.version + 1, reason=str(fault), time_s=time.time(), batch=batch)
        try:
            self._write_dump(path, dump)
        except (OSError, WireError) as error:
            return f"Its batch could not be written to {path}: {error}"
        return f"Its batch is in {path}"

    def _write_dump(self, path: Path, dump: SkippedBatch) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, encode(dump))

        def number(path: Path) -> int:
            return int(path.stem.removeprefix("step-"))

        for old in sorted(self.folder.glob("step-*.msgpack"), key=number, reverse=True)[KEPT:]:
            if old != path:
                old.unlink()


class StepOutcome(NamedTuple):
    """What a step was made of, and its result."""

    batch: Batch
    result: StepValues | None
    """None: the step was skipped."""
    lr: float


Gathered = tuple[Batch, Callable[[float], StepValues]]
"""The batch, and what turns it into the next version at a learning rate."""


@dataclass(slots=True)
class StepRunner:
    """Makes one step after another. All calls are collective."""

    config: RunConfig
    policy: Policy
    reference: Reference | None
    coordinator: Coordinator
    logger: TrainerLogger
    skipped_steps: SkippedSteps

    def make(self, version: int, *, waiting: str) -> StepOutcome | None:
        """Make the step `version` -> `version + 1`; None if the run must stop now, and then nothing has changed.

        `waiting`: what the time spent waiting for groups is called. Raises TrainingError after too many skipped steps.
        """
        lr = learning_rate(self.config.trainer.optimizer, version, self.config.steps)  # of every update of the step
        gathered = (
            self._gather_parts(version, waiting) if self.config.trainer.streaming else self._gather(version, waiting)
        )
        if gathered is None:
            return None
        batch, train = gathered
        with self.coordinator.devices.held():
            result = self._train(batch, version, lambda: train(lr))
        if self.reference is not None:
            self.reference.after_step(self.policy, version + 1)
        return StepOutcome(batch, result, lr)

    def _train(self, batch: Batch, version: int, train: Callable[[], StepValues]) -> StepValues | None:
        """Make the update; None if it was skipped."""
        try:
            result = train()
        except NonFiniteStep as fault:
            dumped = self.skipped_steps.record_skip(batch, fault)
            self.logger.warn(version + 1, f"step skipped: {fault}. {dumped}")
            return None
        self.skipped_steps.reset()
        return result

    def _gather(self, version: int, waiting: str) -> Gathered | None:
        """Wait for the whole batch."""
        phases = self.logger.phases
        with phases.span(waiting, version=version):
            batch = self.coordinator.take(version)
        if batch is None:
            return None
        parts = (self.policy, batch, self.config)
        return batch, lambda lr: train_step(*parts, lr=lr, phases=phases, reference=self.reference)

    def _gather_parts(self, version: int, waiting: str) -> Gathered | None:
        """Accumulate the gradients of groups as they come."""
        phases = self.logger.phases
        step = StreamedStep(self.policy, self.config, version, phases, self.reference)
        while not step.complete:
            with phases.span(waiting, version=version, have=step.have):
                part = self.coordinator.take_part(version, step.have)
            if part is None:
                return None
            step.add(part)
        return step.batch, step.close

"""The groups of a step and what becomes of them.

    take -----------------> train_step ----------+--> version + 1
    take_part, again and again --> StreamedStep -+        |
                                                 |        +--> reference model, every sync_every steps
              loss or gradient not finite: dumped, counted, the rest of the step is left out

Waits for the coordinator alone: P groups, or with `trainer.streaming` one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from async_grpo.config import RunConfig
from async_grpo.errors import NonFiniteStep
from async_grpo.wire import Batch
from trainer.coordinator import Coordinator
from trainer.diary import Diary
from trainer.policy import Policy
from trainer.reference import Reference
from trainer.result import StepResult
from trainer.schedule import learning_rate
from trainer.skips import Skips
from trainer.step import train_step
from trainer.streaming import StreamedStep


class Made(NamedTuple):
    """A step of the policy."""

    batch: Batch
    result: StepResult | None
    """None: the step was skipped."""
    lr: float


@dataclass(slots=True)
class Stepper:
    """Makes one step after another. All calls are collective."""

    config: RunConfig
    policy: Policy
    reference: Reference | None
    coordinator: Coordinator
    diary: Diary
    skips: Skips

    def make(self, version: int, *, waiting: str) -> Made | None:
        """The step `version` -> `version + 1`; None if the run is to stop now, and then nothing has changed.

        `waiting`: what the time spent waiting for groups is called. Raises TrainingError after too many skipped steps.
        """
        made = self._stream(version, waiting) if self.config.trainer.streaming else self._train(version, waiting)
        if made is not None and self.reference is not None:
            self.reference.after_step(self.policy, version + 1)
        return made

    def _train(self, version: int, waiting: str) -> Made | None:
        phases, lr = self.diary.phases, self._lr(version)
        with phases.span(waiting, version=version):
            batch = self.coordinator.take(version)
        if batch is None:
            return None
        try:
            result = train_step(self.policy, batch, self.config, lr=lr, phases=phases, reference=self.reference)
        except NonFiniteStep as fault:
            return self._skip(batch, fault, lr)
        return self._done(batch, result, lr)

    def _stream(self, version: int, waiting: str) -> Made | None:
        phases, lr = self.diary.phases, self._lr(version)
        step = StreamedStep(self.policy, self.config, version, phases, self.reference)
        while not step.complete:
            with phases.span(waiting, version=version, have=step.have):
                part = self.coordinator.take_part(version, step.have)
            if part is None:
                return None
            step.add(part)
        try:
            result = step.close(lr)
        except NonFiniteStep as fault:
            return self._skip(step.batch, fault, lr)
        return self._done(step.batch, result, lr)

    def _done(self, batch: Batch, result: StepResult, lr: float) -> Made:
        self.skips.made()
        return Made(batch, result, lr)

    def _skip(self, batch: Batch, fault: NonFiniteStep, lr: float) -> Made:
        path = self.skips.skipped(batch, fault)
        self.diary.warn(batch.version + 1, f"step skipped: {fault}. Its batch is in {path}")
        return Made(batch, None, lr)

    def _lr(self, version: int) -> float:
        """Of every update of the step: the schedule counts steps, not updates."""
        return learning_rate(self.config.trainer.optimizer, version, self.config.steps)

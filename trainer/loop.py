"""The training loop.

    take(v) --> train_step --> weights of v + 1 --publish--> servers
       ^                            |
       +------- release(v) <--------+--> checkpoint every N steps, then commit

The order is the guarantee. Weights are published before the version, the version before the
release that frees slots for new tickets, and the buffer forgets a batch only after a checkpoint
holds what was learned from it. A trainer killed anywhere resumes from its newest checkpoint and is
given the same batches again; while it replays steps that were published before (below
`head_version`), it stays silent, and the servers keep the newer weights that they have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.wire import Batch
from trainer.checkpoint import CheckpointFolder
from trainer.coordinator import Coordinator
from trainer.diary import Diary
from trainer.metrics import step_row
from trainer.outlet import WeightOutlet
from trainer.phases import START, WAIT
from trainer.policy import Policy
from trainer.schedule import learning_rate
from trainer.step import StepResult, measure_gap, train_step


@dataclass(slots=True)
class TrainingLoop:
    """Everything that the loop moves; `version` is that of the weights in `policy`."""

    config: RunConfig
    model_folder: Path
    policy: Policy
    coordinator: Coordinator
    checkpoints: CheckpointFolder
    diary: Diary
    version: int
    epoch: int = field(init=False)
    head_version: int = field(init=False)
    outlet: WeightOutlet = field(init=False)
    saved: int = field(init=False)
    stepped: bool = False
    """Whether this process has made a step; before it, waiting is for engines to start."""

    def run(self) -> None:
        """Train until version `steps`, or until SIGTERM; either way a checkpoint holds what was trained."""
        self._take_over()
        try:
            while self.version < self.config.steps:
                with self.diary.phases.span(WAIT if self.stepped else START, version=self.version):
                    batch = self.coordinator.take(self.version)
                if batch is None:
                    self.diary.note("stopping: SIGTERM", version=self.version)
                    self._checkpoint()
                    return
                self._train_on(batch)
            self._checkpoint()
            self._finish()
        finally:
            self.outlet.close()

    def _take_over(self) -> None:
        resume = self.coordinator.resume(self.version)
        self.epoch, self.head_version, self.saved = resume.epoch, resume.head_version, self.version
        self.outlet = WeightOutlet(self.policy, self.config, self.coordinator, self.epoch)
        self.diary.note("run joined", version=self.version, epoch=self.epoch, head_version=self.head_version)
        self._publish()
        self.diary.phases.reset()

    def _train_on(self, batch: Batch) -> None:
        lr = learning_rate(self.config.trainer.optimizer, self.version, self.config.steps)
        phases = self.diary.phases
        result = train_step(self.policy, batch, self.config, lr=lr, phases=phases)
        self.version += 1
        self.stepped = True
        self._publish()
        self.coordinator.release(batch)
        self._write(batch, result, lr)  # before the commit, after which the step is never replayed
        if self.version % self.config.trainer.checkpoint.every_steps == 0:
            self._checkpoint()

    def _publish(self) -> None:
        if self.version >= self.head_version:
            with self.diary.phases.span("publish", version=self.version):
                self.outlet.publish(self.version)

    def _checkpoint(self) -> None:
        if self.saved == self.version:
            return
        with self.diary.phases.span("checkpoint", version=self.version):
            self.checkpoints.save(self.policy, self.version, self.epoch)
            self.coordinator.commit_checkpoint(self.version)
        self.saved = self.version

    def _write(self, batch: Batch, result: StepResult, lr: float) -> None:
        self.diary.step(step_row(batch, result, lr=lr, seconds=self.diary.phases.seconds))
        self.diary.phases.reset()

    def _finish(self) -> None:
        """The publisher stays until the final evaluation is on the board: a server that is started
        again before that needs the final weights once more."""
        self.coordinator.end()
        timeout_s = self.config.eval.timeout_s
        probe = self.coordinator.probe(self.version, timeout_s)
        if probe is None:
            self.diary.warn(self.version, self._missing("probe"))
        else:
            self.diary.probe(self.version, measure_gap(self.policy, probe, self.config))
        folder = self.checkpoints.export(self.policy, self.model_folder)
        if not self.coordinator.wait_for_evaluation(self.version, timeout_s):
            self.diary.warn(self.version, self._missing("evaluation"))
        self.diary.note("run finished", version=self.version, exported=str(folder))

    def _missing(self, result: str) -> str:
        timeout_s = self.config.eval.timeout_s
        return f"no {result} of version {self.version} came before SIGTERM or within eval.timeout_s ({timeout_s:g} s)"

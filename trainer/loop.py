"""The training loop.

    take(v) --> StepRunner.make --> weights of v + 1 --publish--> servers
       ^                              |
       +------- release(v) <----------+--> checkpoint every N steps --on disk--> commit

Its guarantees come from this order. Weights are handed to the weight sender before the version is published (they are
copied beside the next step, whose update waits for that), the version before the release that frees slots for new
tickets, and the buffer forgets a batch only after a checkpoint on disk holds what was learned from it.
Checkpoints are written beside the training, one at a time. Between steps the loop polls whether one is safe: on disk
and, with runs_store, copied. It waits for it before it starts the next one, and before it ends.

The commit is one checkpoint behind (`trainer.checkpoint.resumable`): while memory allows it, the buffer keeps the steps
since the checkpoint before the newest, so that a run whose newest checkpoint is damaged resumes exactly from that one.

A trainer killed anywhere resumes from its newest checkpoint and is given the same batches again. While it replays steps
that were published before (below `head_version`), it publishes nothing, and the servers keep their newer weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from async_grpo.auto_staleness import StalenessController, controller_for, figures_of
from async_grpo.config import RunConfig
from async_grpo.errors import CheckpointError
from async_grpo.telemetry.contention import ContentionWatch
from async_grpo.telemetry.rows import Row
from async_grpo.telemetry.timeline import START, WAIT
from async_grpo.wire.board import Evaluation
from buffer.base import BufferStats
from trainer.checkpoint.folder import CheckpointFolder
from trainer.coordinator import Coordinator
from trainer.distributed import is_leader, max_over_ranks
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.run_logger import TrainerLogger
from trainer.step.results import step_row, trained_row
from trainer.step.statistics import GapWatch
from trainer.step.step import measure_gap
from trainer.step.step_runner import SkippedSteps, StepOutcome, StepRunner
from trainer.weights import WeightExporter


@dataclass(slots=True)
class TrainingLoop:
    """Trains, publishes and saves step after step; `version` is that of the weights in `policy`."""

    config: RunConfig
    model_folder: Path
    policy: Policy
    coordinator: Coordinator
    checkpoints: CheckpointFolder
    logger: TrainerLogger
    version: int
    damage: str = ""
    """Why `version` is not that of the newest checkpoint; "" if it is."""
    reference: Reference | None = None
    peak_flops: float | None = None
    """FLOP/s of all ranks together; None where it is not known."""
    step_runner: StepRunner = field(init=False)
    epoch: int = field(init=False)
    head_version: int = field(init=False)
    exporter: WeightExporter = field(init=False)
    saved: int = field(init=False)
    safe: list[int] = field(init=False)
    """Versions that a trainer could resume from, the newest last; the buffer keeps the steps since the first."""
    stepped: bool = False
    """Whether this process has trained a step; before the first one, it waits for engines to start."""
    gap_watch: GapWatch = field(default_factory=GapWatch)
    controller: StalenessController | None = field(init=False, default=None)
    """max_staleness: auto; on rank 0."""
    contention: ContentionWatch = field(default_factory=ContentionWatch)

    def __post_init__(self) -> None:
        skipped_steps = SkippedSteps(
            self.config.run_dir / "dumps", self.config.trainer.max_skipped_steps, writes=is_leader()
        )
        self.step_runner = StepRunner(
            self.config, self.policy, self.reference, self.coordinator, self.logger, skipped_steps
        )

    def run(self) -> None:
        """Train until version `steps`, or until SIGTERM; either way a checkpoint holds what was trained."""
        self._take_over()
        try:
            self._begin()
            while self.version < self.config.steps:
                outcome = self.step_runner.make(self.version, waiting=WAIT if self.stepped else START)
                if outcome is None:
                    self.logger.note("stopping: SIGTERM", version=self.version)
                    self._save_rest()
                    return
                self._complete(outcome)
            self._save_rest()
            self._finish()
        finally:
            self.exporter.close()

    def _take_over(self) -> None:
        accept_loss = self.checkpoints.is_chosen(self.version)
        resume = self.coordinator.resume(self.version, damage=self.damage, accept_loss=accept_loss)
        self.checkpoints.forget_choice()
        self.epoch, self.head_version, self.saved = resume.epoch, resume.head_version, self.version
        self.safe = [self.version]
        self.logger.joined(self.epoch, self.version, self.head_version)
        self._warn_of_fallback(resume.lost_steps)
        self.exporter = WeightExporter(self.policy, self.config, self.coordinator, self.epoch)
        self.coordinator.watch_publishing(self.exporter.check_publishing)

    def _warn_of_fallback(self, lost_steps: int) -> None:
        if self.damage:
            self.logger.warn(self.version, f"{self.damage}. The run resumes from version {self.version} instead")
        if lost_steps:
            self.logger.warn(
                self.version,
                f"the buffer had forgotten the groups of {lost_steps} steps after version {self.version}. All steps "
                "from there on are trained again, on new groups: the run is another than the one that was lost",
            )

    def _begin(self) -> None:
        """Publish the first weights of this trainer, and copy what an earlier one may have left only here."""
        self._publish()
        if stats := self.coordinator.buffer_stats():
            self.controller = controller_for(self.config.auto_staleness, self.config.replay_policy, stats.staleness)
        if self.version > 0:
            self.checkpoints.begin_copy(self.version)
        self.logger.phases.reset()
        self.contention.look()

    def _complete(self, outcome: StepOutcome) -> None:
        self.version += 1
        self.stepped = True
        self._publish()
        self.coordinator.release(outcome.batch)
        self._write(outcome)  # before the commit, after which the step is never replayed
        self._poll_saved(wait=False)
        self._make_room()
        if self.version % self.config.trainer.checkpoint.every_steps == 0:
            self._checkpoint()
        if (every := self.config.trainer.checkpoint.export_every_steps) and self.version % every == 0:
            with self.logger.phases.span("checkpoint", version=self.version):
                self.checkpoints.begin_export(self.policy, self.model_folder, self.version, self._evaluations())

    def _publish(self) -> None:
        """Publish the weights, except while replaying steps that were published before; that is reported instead."""
        if self.version <= self.head_version:
            self.coordinator.report_replay(self.version, self.head_version)
        if self.version >= self.head_version:
            with self.logger.phases.span("publish", version=self.version):
                self.exporter.publish(self.version)
            self.logger.serving()

    def _checkpoint(self) -> None:
        if self.saved == self.version:
            return
        with self.logger.phases.span("checkpoint", version=self.version):
            self._poll_saved(wait=True)
            self.checkpoints.save(self.policy, self.version, self.epoch, self._evaluations())
            self._poll_saved(wait=not self.config.trainer.checkpoint.background)
        self.saved = self.version

    def _poll_saved(self, *, wait: bool) -> None:
        """Let the buffer forget what came before the checkpoints that a trainer may have to resume from."""
        version = self.checkpoints.poll_saved(wait=wait)
        if version is None:
            return
        checkpoint = self.config.trainer.checkpoint
        if version not in self.safe:
            self.safe = [*self.safe, version][-min(checkpoint.resumable, checkpoint.keep) :]
        self.coordinator.commit_checkpoint(self.safe[0])

    def _make_room(self) -> None:
        """Keep the buffer from filling up with groups that only a resumption would need.

        Raises CheckpointError if there is no room though nothing but uncopied steps can be forgotten.
        """
        if len(self.safe) > 1 and not self.coordinator.has_room():
            self.safe = self.safe[-1:]
            self.coordinator.commit_checkpoint(self.safe[0])
        if self.checkpoints.uncopied is None or self.coordinator.can_go_on_uncommitted():
            return
        self._copy_now()
        if self.checkpoints.uncopied is not None:
            raise CheckpointError(
                f"the checkpoint of version {self.checkpoints.uncopied} could not be copied to "
                f"{self.config.runs_store}, and the buffer, which keeps all groups since version {self.safe[0]} until "
                "it is, has no room left for another step. The checkpoints here are whole: mend the store, or give the "
                "buffer more memory (redis.max_memory_bytes, redis.quota_bytes), and the same command resumes"
            )

    def _copy_now(self) -> None:
        """Copy what could not be copied before, and wait for it."""
        self.checkpoints.begin_copy()
        self._poll_saved(wait=True)

    def _save_rest(self) -> None:
        """Save and export, and wait for both: afterwards nothing trained is only in memory."""
        self._checkpoint()
        self._poll_saved(wait=True)
        if self.checkpoints.uncopied is not None:
            self._copy_now()
        self.checkpoints.wait_for_export()
        if self.checkpoints.uncopied is not None:
            self.logger.warn(
                self.version,
                f"this trainer ends, and only this machine has the checkpoint of version {self.checkpoints.uncopied}: "
                f"{self.config.runs_store} has an older one, if any. Keep the folder of the run, or copy it by hand",
            )

    def _evaluations(self) -> list[Evaluation]:
        return self.coordinator.evaluations() if self.config.trainer.checkpoint.keep_best else []

    def _write(self, outcome: StepOutcome) -> None:
        stats, seconds = self.coordinator.buffer_stats(), self.logger.phases.seconds
        waited_S = torch.tensor([self.contention.look().waited_s], dtype=torch.float64)
        row = step_row(
            outcome.batch,
            outcome.result,
            stats,
            lr=outcome.lr,
            seconds=seconds,
            peak_flops=self.peak_flops,
            cpu_wait_s=float(max_over_ranks(waited_S)),
        )
        self.logger.step(row)
        self._adjust(row, stats)
        self.logger.trained(lambda: trained_row(outcome.batch, self.config, skipped=outcome.result is None))
        self.logger.phases.reset()
        if outcome.result is not None:
            self._warn_of_gap(self.gap_watch.check_step(outcome.batch, outcome.result))

    def _adjust(self, row: Row, stats: BufferStats | None) -> None:
        """Let the controller choose the S in force for the steps to come. The steps that train what was generated
        before this process waited, and the last ones, for which nothing is admitted, say nothing."""
        if self.controller is None or stats is None or row["replayed"] or row["start_s"]:
            return
        if self.version + stats.staleness >= self.config.steps:
            return
        decision = self.controller.observe(figures_of(row, stats))
        if decision is not None:
            self.coordinator.set_staleness(decision.staleness)
            self.logger.decided(self.version, decision)

    def _finish(self) -> None:
        """End the run and export the weights.

        The publisher stays until the final evaluation is on the board: a server that is started again before that needs
        the final weights once more.
        """
        self.coordinator.end()
        timeout_s = self.config.eval.timeout_s
        probe = self.coordinator.probe(self.version, timeout_s)
        with self.coordinator.devices.held():
            gap = None if probe is None else measure_gap(self.policy, probe, self.config)
        if probe is None or gap is None:
            self.logger.warn(self.version, self._missing("probe"))
        else:
            self.logger.probe(self.version, gap)
            self._warn_of_gap(self.gap_watch.check_probe(probe, gap))
        folder = self.checkpoints.export(self.policy, self.model_folder)
        if not self.coordinator.wait_for_evaluation(self.version, timeout_s):
            self.logger.warn(self.version, self._missing("evaluation"))
        self.checkpoints.mark_best(self._evaluations())
        self.logger.note("run finished", version=self.version, exported=str(folder))

    def _warn_of_gap(self, warning: str | None) -> None:
        if warning is not None:
            self.logger.warn(self.version, warning)

    def _missing(self, result: str) -> str:
        timeout_s = self.config.eval.timeout_s
        return f"no {result} of version {self.version} came before SIGTERM or within eval.timeout_s ({timeout_s:g} s)"

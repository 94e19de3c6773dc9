"""The training loop.

    take(v) --> train_step --> weights of v + 1 --publish--> servers
       ^                              |
       +------- release(v) <----------+--> checkpoint every N steps --on disk--> commit

A trainer killed anywhere resumes from its newest checkpoint and is given the same batches again. The order of the steps
in `train` guarantees that nothing is lost and nothing trained twice; docs/checkpoints.md has the table of crashes.

The commit is one checkpoint behind (`trainer.checkpoint.resumable`): while memory allows it, the buffer keeps the steps
since the checkpoint before the newest, so that a run whose newest checkpoint is damaged resumes exactly from that one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from async_grpo.auto_staleness import StalenessController, controller_for, figures_of
from async_grpo.config import RunConfig
from async_grpo.errors import CheckpointError, NonFiniteStep
from async_grpo.telemetry.contention import ContentionWatch
from async_grpo.telemetry.rows import Row
from async_grpo.telemetry.timeline import START, WAIT
from async_grpo.wire import Batch
from async_grpo.wire.board import Evaluation
from buffer.base import BufferStats
from trainer.checkpoint.folder import CheckpointFolder
from trainer.coordinator import Coordinator
from trainer.model.optimizer import learning_rate
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.ranks.distributed import is_leader, max_over_ranks
from trainer.run_logger import TrainerLogger
from trainer.step.incoming import IncomingBatch
from trainer.step.results import StepValues, step_row, trained_row
from trainer.step.skipped_steps import SkippedSteps
from trainer.step.statistics import GapWatch
from trainer.step.step import measure_gap, train_step, train_step_streamed
from trainer.weights import WeightExporter


def train(run: TrainerRun) -> None:
    """Train from the version of `run` to `config.steps`, or until SIGTERM; either way a checkpoint then holds what was
    trained. All ranks call it."""
    run.take_over()
    try:
        run.publish()  # the weights it starts with: servers may have none yet
        run.prepare_first_step()
        while run.version < run.config.steps:
            # 1. Train. A step whose loss is not finite leaves the weights as they are, but the version still advances:
            #    its groups are spent.
            step = train_next_version(run)
            if step is None:
                run.logger.note("stopping: SIGTERM", version=run.version)
                run.save_everything()
                return

            # 2. Publish before releasing. A released slot lets servers admit groups for the next version; its weights
            #    must be on their way by then. They are copied in parallel with the next step, whose update waits.
            run.version += 1
            run.publish()
            run.coordinator.release(step.batch)

            # 3. Log before committing. A step that is committed is never replayed, so a row that is not on disk by
            #    then would be lost.
            run.log(step)

            # 4. Commit what checkpoints on disk contain, and start the next checkpoint. They are written in the
            #    background, and the buffer forgets a batch only once one on disk holds what was learned from it.
            run.commit_saved(wait=False)
            run.make_room()
            if run.version % run.config.trainer.checkpoint.every_steps == 0:
                run.save_checkpoint()
            run.export_if_due()
        run.save_everything()
        run.finish()
    finally:
        run.exporter.close()


class TrainedStep(NamedTuple):
    """The batch of a step, and its result."""

    batch: Batch
    values: StepValues | None
    """None: the step was skipped."""
    lr: float


def train_next_version(run: TrainerRun) -> TrainedStep | None:
    """Wait for the groups of the next step and train them. None after SIGTERM: nothing has changed then.

    Raises TrainingError after too many skipped steps.
    """
    config, phases = run.config, run.logger.phases
    lr = learning_rate(config.trainer.optimizer, run.version, config.steps)  # of every update of the step
    incoming = IncomingBatch(run.coordinator, run.version, phases, WAIT if run.has_trained else START)
    values: StepValues | None = None
    try:
        if config.trainer.streaming:
            values = train_step_streamed(
                run.policy,
                incoming.parts(),
                config,
                version=run.version,
                lr=lr,
                phases=phases,
                reference=run.reference,
            )
        else:
            incoming.wait()
            if incoming.complete:
                with run.coordinator.devices.held():
                    values = train_step(
                        run.policy, incoming.batch, config, lr=lr, phases=phases, reference=run.reference
                    )
        if not incoming.complete:
            return None
        run.skipped_steps.reset()
    except NonFiniteStep as fault:
        dumped = run.skipped_steps.record_skip(incoming.batch, fault)
        run.logger.warn(run.version + 1, f"step skipped: {fault}. {dumped}")
    if run.reference is not None:
        run.reference.after_step(run.policy, run.version + 1)
    return TrainedStep(incoming.batch, values, lr)


@dataclass(slots=True)
class TrainerRun:
    """What one trainer process has of the run, and the parts of its loop. All calls are collective."""

    config: RunConfig
    model_folder: Path
    policy: Policy
    coordinator: Coordinator
    checkpoints: CheckpointFolder
    logger: TrainerLogger
    version: int
    """Version of the weights in `policy`."""
    damage: str = ""
    """Why `version` is not that of the newest checkpoint; "" if it is."""
    reference: Reference | None = None
    peak_flops: float | None = None
    """FLOP/s of all ranks together; None where it is not known."""
    skipped_steps: SkippedSteps = field(init=False)
    epoch: int = field(init=False)
    head_version: int = field(init=False)
    """Newest version that was published before this trainer took over."""
    exporter: WeightExporter = field(init=False)
    saved_version: int = field(init=False)
    """Version of the newest checkpoint that was started."""
    resumable: list[int] = field(init=False)
    """Versions that a trainer could resume from, the newest last; the buffer keeps the steps since the first."""
    has_trained: bool = False
    """Whether this process has trained a step; before the first one, it waits for engines to start."""
    gap_watch: GapWatch = field(default_factory=GapWatch)
    controller: StalenessController | None = field(init=False, default=None)
    """max_staleness: auto; on rank 0."""
    contention: ContentionWatch = field(default_factory=ContentionWatch)

    def __post_init__(self) -> None:
        limit = self.config.trainer.max_skipped_steps
        self.skipped_steps = SkippedSteps(self.config.run_dir / "dumps", limit, writes=is_leader())

    def take_over(self) -> None:
        """Begin a new epoch: from now on the buffer refuses calls of an earlier trainer."""
        accept_loss = self.checkpoints.is_chosen(self.version)
        resume = self.coordinator.resume(self.version, damage=self.damage, accept_loss=accept_loss)
        self.checkpoints.forget_choice()
        self.epoch, self.head_version, self.saved_version = resume.epoch, resume.head_version, self.version
        self.resumable = [self.version]
        self.logger.joined(self.epoch, self.version, self.head_version)
        if self.damage:
            self.logger.warn(self.version, f"{self.damage}. The run resumes from version {self.version} instead")
        if resume.lost_steps:
            self.logger.warn(
                self.version,
                f"the buffer had forgotten the groups of {resume.lost_steps} steps after version {self.version}. All "
                "steps from there on are trained again, on new groups: the run is another than the one that was lost",
            )
        self.exporter = WeightExporter(self.policy, self.config, self.coordinator, self.epoch)
        self.coordinator.watch_publishing(self.exporter.check_publishing)

    def prepare_first_step(self) -> None:
        """Copy a checkpoint that an earlier trainer may have left on this machine only, and reset the clocks."""
        if stats := self.coordinator.buffer_stats():
            self.controller = controller_for(self.config.auto_staleness, self.config.replay_policy, stats.staleness)
        if self.version > 0:
            self.checkpoints.begin_copy(self.version)
        self.logger.phases.reset()
        self.contention.look()

    def publish(self) -> None:
        """Publish the weights. While steps are replayed that were published before, servers have newer weights and
        keep them: only the progress is reported."""
        if self.version <= self.head_version:
            self.coordinator.report_replay(self.version, self.head_version)
        if self.version >= self.head_version:
            with self.logger.phases.span("publish", version=self.version):
                self.exporter.publish(self.version)
            self.logger.serving()

    def log(self, step: TrainedStep) -> None:
        """Write the rows of a step, and let the controller choose the staleness of the steps to come."""
        self.has_trained = True
        stats, seconds = self.coordinator.buffer_stats(), self.logger.phases.seconds
        waited_S = torch.tensor([self.contention.look().waited_s], dtype=torch.float64)
        row = step_row(
            step.batch,
            step.values,
            stats,
            lr=step.lr,
            seconds=seconds,
            peak_flops=self.peak_flops,
            cpu_wait_s=float(max_over_ranks(waited_S)),
        )
        self.logger.step(row)
        self._adjust_staleness(row, stats)
        self.logger.trained(lambda: trained_row(step.batch, self.config, skipped=step.values is None))
        self.logger.phases.reset()
        if step.values is not None:
            self._warn(self.gap_watch.check_step(step.batch, step.values))

    def _adjust_staleness(self, row: Row, stats: BufferStats | None) -> None:
        """Steps on groups from before this process waited say nothing, nor do the last ones, for which nothing is
        admitted."""
        if self.controller is None or stats is None or row["replayed"] or row["start_s"]:
            return
        if self.version + stats.staleness >= self.config.steps:
            return
        decision = self.controller.observe(figures_of(row, stats))
        if decision is not None:
            self.coordinator.set_staleness(decision.staleness)
            self.logger.decided(self.version, decision)

    def save_checkpoint(self) -> None:
        """Start a checkpoint of this version, after the one before it is on disk: one is written at a time."""
        if self.saved_version == self.version:
            return
        with self.logger.phases.span("checkpoint", version=self.version):
            self.commit_saved(wait=True)
            self.checkpoints.save(self.policy, self.version, self.epoch, self._evaluations())
            self.commit_saved(wait=not self.config.trainer.checkpoint.background)
        self.saved_version = self.version

    def export_if_due(self) -> None:
        """Start a Hugging Face export in the background."""
        every = self.config.trainer.checkpoint.export_every_steps
        if every and self.version % every == 0:
            with self.logger.phases.span("checkpoint", version=self.version):
                self.checkpoints.begin_export(self.policy, self.model_folder, self.version, self._evaluations())

    def commit_saved(self, *, wait: bool) -> None:
        """Let the buffer forget what came before the checkpoints that a trainer may have to resume from. A checkpoint
        counts once it is on disk and, with runs_store, copied."""
        version = self.checkpoints.poll_saved(wait=wait)
        if version is None:
            return
        checkpoint = self.config.trainer.checkpoint
        if version not in self.resumable:
            self.resumable = [*self.resumable, version][-min(checkpoint.resumable, checkpoint.keep) :]
        self.coordinator.commit_checkpoint(self.resumable[0])

    def make_room(self) -> None:
        """Keep the buffer from filling up with groups that only a resumption would need.

        Raises CheckpointError if there is no room though nothing but uncopied steps can be forgotten.
        """
        if len(self.resumable) > 1 and not self.coordinator.has_room():
            self.resumable = self.resumable[-1:]
            self.coordinator.commit_checkpoint(self.resumable[0])
        if self.checkpoints.uncopied is None or self.coordinator.can_go_on_uncommitted():
            return
        self._copy_now()
        if self.checkpoints.uncopied is not None:
            raise CheckpointError(
                f"the checkpoint of version {self.checkpoints.uncopied} could not be copied to "
                f"{self.config.runs_store}, and the buffer, which keeps all groups since version {self.resumable[0]} "
                "until it is, has no room left for another step. The checkpoints here are whole: mend the store, or "
                "give the buffer more memory (redis.max_memory_bytes, redis.quota_bytes), and the same command resumes"
            )

    def _copy_now(self) -> None:
        """Copy what could not be copied before, and wait for it."""
        self.checkpoints.begin_copy()
        self.commit_saved(wait=True)

    def save_everything(self) -> None:
        """Save and export, and wait for both: afterwards nothing trained is only in memory."""
        self.save_checkpoint()
        self.commit_saved(wait=True)
        if self.checkpoints.uncopied is not None:
            self._copy_now()
        self.checkpoints.wait_for_export()
        if self.checkpoints.uncopied is not None:
            self.logger.warn(
                self.version,
                f"this trainer ends, and only this machine has the checkpoint of version {self.checkpoints.uncopied}: "
                f"{self.config.runs_store} has an older one, if any. Keep the folder of the run, or copy it by hand",
            )

    def finish(self) -> None:
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
            self._warn(self.gap_watch.check_probe(probe, gap))
        folder = self.checkpoints.export(self.policy, self.model_folder)
        if not self.coordinator.wait_for_evaluation(self.version, timeout_s):
            self.logger.warn(self.version, self._missing("evaluation"))
        self.checkpoints.mark_best(self._evaluations())
        self.logger.note("run finished", version=self.version, exported=str(folder))

    def _evaluations(self) -> list[Evaluation]:
        return self.coordinator.evaluations() if self.config.trainer.checkpoint.keep_best else []

    def _warn(self, warning: str | None) -> None:
        if warning is not None:
            self.logger.warn(self.version, warning)

    def _missing(self, result: str) -> str:
        timeout_s = self.config.eval.timeout_s
        return f"no {result} of version {self.version} came before SIGTERM or within eval.timeout_s ({timeout_s:g} s)"

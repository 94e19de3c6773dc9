"""The training loop.

    take_batch(v) --> train_step --> weights of v + 1 --publish--> servers
          ^                               |
          +------ release_batch(v) <------+--> checkpoint every N steps --on disk--> commit_checkpoint

A trainer that is killed at any point resumes from its newest checkpoint and receives the same batches again. The order
of the effects in `train` guarantees that no batch is lost and none is trained twice; docs/checkpoints.md has the table
of crashes.

Committing a checkpoint tells the buffer to forget all steps before it. As long as the buffer has memory, the trainer
commits the second-newest checkpoint, not the newest (`trainer.checkpoint.resumable`): a run whose newest checkpoint is
damaged can then resume exactly from the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from async_grpo.auto_staleness import StalenessController, make_controller, staleness_figures
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
from trainer.ranks.distributed import is_rank_zero, max_over_ranks
from trainer.run_logger import TrainerLogger
from trainer.step.incoming import IncomingBatch
from trainer.step.results import StepValues, step_row, trained_row
from trainer.step.skipped_steps import SkippedSteps
from trainer.step.statistics import GapWatch
from trainer.step.step import measure_gap, train_step, train_step_streamed
from trainer.weights import WeightExporter


def train(run: TrainerRun) -> None:
    """Train from the version of `run` to `config.steps`, or until SIGTERM, and save a last checkpoint.

    All ranks call it.
    """
    run.take_over_run()
    try:
        run.publish_weights()  # the weights that training starts from: servers may have none yet
        run.prepare_first_step()
        while run.version < run.config.steps:
            # 1. Train. A step whose loss is not finite leaves the weights unchanged, but the version still advances,
            #    because its groups are used up.
            step = train_next_version(run)
            if step is None:
                run.logger.info("stopping: SIGTERM", version=run.version)
                run.save_everything()
                return

            # 2. Publish before releasing. Releasing a batch makes room in the staleness window, so servers may admit
            #    groups for the new version. Its weights must be on their way by then. The copy runs in parallel with
            #    the next step; the optimizer update of that step waits for it.
            run.version += 1
            run.publish_weights()
            run.coordinator.release_batch(step.batch)

            # 3. Log before committing. A committed step is never replayed, so if its row were written later, a crash in
            #    between would lose the row.
            run.log_step(step)

            # 4. Commit what checkpoints on disk contain, and start the next checkpoint. Checkpoints are written in the
            #    background; the buffer forgets a batch only after a checkpoint with its effect is on disk.
            run.commit_saved_checkpoints(wait=False)
            run.free_buffer_space()
            if run.version % run.config.trainer.checkpoint.every_steps == 0:
                run.save_checkpoint()
            run.start_export_if_due()
        run.save_everything()
        run.finish_run()
    finally:
        run.exporter.close()


class TrainedStep(NamedTuple):
    """The batch of a step, and its result."""

    batch: Batch
    values: StepValues | None
    """None if the step was skipped."""
    lr: float


def train_next_version(run: TrainerRun) -> TrainedStep | None:
    """Wait for the groups of the next step and train them. Returns None after SIGTERM, with nothing changed.

    Raises TrainingError after too many skipped steps in a row.
    """
    config = run.config
    phases = run.logger.phases
    lr = learning_rate(config.trainer.optimizer, run.version, config.steps)  # the same for all updates of the step
    # Before the first step, waiting time includes the start of the engines, so it is a phase by itself.
    waiting_phase = WAIT if run.has_trained else START
    incoming = IncomingBatch(run.coordinator, run.version, phases, waiting_phase)
    values: StepValues | None = None
    try:
        if config.trainer.streaming:
            values = train_step_streamed(
                run.policy,
                incoming.receive_parts(),
                config,
                version=run.version,
                lr=lr,
                phases=phases,
                reference=run.reference,
            )
        else:
            incoming.wait_for_batch()
            if incoming.is_complete:
                with run.coordinator.devices.engines_asleep():  # streaming is refused for engines that sleep
                    values = train_step(
                        run.policy, incoming.batch, config, lr=lr, phases=phases, reference=run.reference
                    )
        if not incoming.is_complete:
            return None  # gradients of streamed parts are dropped: nothing has updated the weights
        run.skipped_steps.reset()
    except NonFiniteStep as fault:
        dump_note = run.skipped_steps.record_skip(incoming.batch, fault)
        run.logger.warn(run.version + 1, f"step skipped: {fault}. {dump_note}")
    if run.reference is not None:
        run.reference.sync_after_step(run.policy, run.version + 1)
    return TrainedStep(incoming.batch, values, lr)


@dataclass(slots=True)
class TrainerRun:
    """State of the run in one trainer process, and the parts of its loop. All calls are collective."""

    config: RunConfig
    model_folder: Path
    policy: Policy
    coordinator: Coordinator
    checkpoints: CheckpointFolder
    logger: TrainerLogger
    version: int
    """Version of the weights in `policy`."""
    damage: str | None = None
    """What is wrong with the newest checkpoint, if the run resumes from an older one; None otherwise."""
    reference: Reference | None = None
    peak_flops: float | None = None
    """FLOP/s of all ranks together; None if unknown."""
    skipped_steps: SkippedSteps = field(init=False)
    epoch: int = field(init=False)
    head_version: int = field(init=False)
    """Newest version that earlier trainers published. It does not change after the takeover."""
    exporter: WeightExporter = field(init=False)
    saved_version: int = field(init=False)
    """Version of the newest checkpoint that was started."""
    resumable_versions: list[int] = field(init=False)
    """Checkpoints that a trainer could resume from, the newest last. The buffer retains the steps since the first."""
    has_trained: bool = False
    """True after the first step of this process."""
    gap_watch: GapWatch = field(default_factory=GapWatch)
    controller: StalenessController | None = field(init=False, default=None)
    """Controller of `max_staleness: auto`, on rank 0."""
    contention: ContentionWatch = field(default_factory=ContentionWatch)

    def __post_init__(self) -> None:
        limit = self.config.trainer.max_skipped_steps
        self.skipped_steps = SkippedSteps(self.config.run_dir / "dumps", limit, writes_dumps=is_rank_zero())

    def take_over_run(self) -> None:
        """Start a new epoch: from now on the buffer rejects calls of earlier trainers."""
        accept_loss = self.checkpoints.is_chosen(self.version)
        resume = self.coordinator.resume_run(self.version, damage=self.damage, accept_loss=accept_loss)
        self.checkpoints.clear_choice()
        self.epoch = resume.epoch
        self.head_version = resume.head_version
        self.saved_version = self.version
        self.resumable_versions = [self.version]

        self.logger.log_takeover(self.epoch, self.version, self.head_version)
        if self.damage is not None:
            self.logger.warn(self.version, f"{self.damage}. The run resumes from version {self.version} instead")
        if resume.lost_steps:
            self.logger.warn(
                self.version,
                f"the buffer had forgotten the groups of {resume.lost_steps} steps after version {self.version}. These "
                "steps and all later ones are trained on new groups, so the run differs from an uninterrupted one",
            )
        self.exporter = WeightExporter(self.policy, self.config, self.coordinator, self.epoch)
        self.coordinator.set_publishing_check(self.exporter.check_publishing)

    def prepare_first_step(self) -> None:
        """Make the staleness controller, copy a checkpoint that may exist only on this machine, reset the clocks."""
        stats = self.coordinator.buffer_stats()
        if stats is not None:
            self.controller = make_controller(self.config.auto_staleness, self.config.replay_policy, stats.staleness)
        if self.version > 0:
            # An earlier trainer may have been killed between writing this checkpoint and copying it.
            self.checkpoints.start_copy(self.version)
        self.logger.phases.reset()
        self.contention.measure()

    def publish_weights(self) -> None:
        """Publish the weights of `version`.

        A version that an earlier trainer has published is only reported as progress: servers keep their newer weights.
        The newest of these is published again, because servers that start now have no other source.
        """
        if self.version <= self.head_version:
            self.coordinator.report_replay(self.version, self.head_version)
        if self.version >= self.head_version:
            with self.logger.phases.span("publish", version=self.version):
                self.exporter.publish_weights(self.version)
            self.logger.mark_serving()

    def log_step(self, step: TrainedStep) -> None:
        """Write the rows of a step, and let the controller choose the staleness of the next steps."""
        self.has_trained = True
        stats = self.coordinator.buffer_stats()
        cpu_wait = torch.tensor([self.contention.measure().wait_s], dtype=torch.float64)
        row = step_row(
            step.batch,
            step.values,
            stats,
            lr=step.lr,
            seconds=self.logger.phases.seconds,
            peak_flops=self.peak_flops,
            cpu_wait_s=float(max_over_ranks(cpu_wait)),
        )
        self.logger.log_step(row)
        self._adjust_staleness(row, stats)
        self.logger.log_trained_groups(lambda: trained_row(step.batch, self.config, skipped=step.values is None))
        self.logger.phases.reset()
        if step.values is not None:
            self._warn(self.gap_watch.check_step(step.batch, step.values))

    def _adjust_staleness(self, row: Row, stats: BufferStats | None) -> None:
        if self.controller is None or stats is None:
            return
        # Skip steps that do not reflect the steady state: replayed ones, the first one of a process, which waited for
        # engines to start, and the last `staleness` steps, during which servers admit nothing more.
        if row["replayed"] or row["start_s"] or self.version + stats.staleness >= self.config.steps:
            return
        decision = self.controller.observe_step(staleness_figures(row, stats))
        if decision is not None:
            self.coordinator.set_staleness(decision.staleness)
            self.logger.log_staleness_change(self.version, decision)

    def save_checkpoint(self) -> None:
        """Start a checkpoint of this version, after the previous one is on disk: only one is written at a time."""
        if self.saved_version == self.version:
            return
        with self.logger.phases.span("checkpoint", version=self.version):
            self.commit_saved_checkpoints(wait=True)
            self.checkpoints.save(self.policy, self.version, self.epoch, self._read_evaluations())
            self.commit_saved_checkpoints(wait=not self.config.trainer.checkpoint.background)
        self.saved_version = self.version

    def start_export_if_due(self) -> None:
        """Start a Hugging Face export in the background, every `export_every_steps` steps."""
        every_steps = self.config.trainer.checkpoint.export_every_steps
        if every_steps and self.version % every_steps == 0:
            with self.logger.phases.span("checkpoint", version=self.version):
                self.checkpoints.start_export(self.policy, self.model_folder, self.version, self._read_evaluations())

    def commit_saved_checkpoints(self, *, wait: bool) -> None:
        """Let the buffer forget the steps before the oldest checkpoint that a trainer may have to resume from.

        A checkpoint counts once it is on disk and, with `runs_store`, copied.
        """
        version = self.checkpoints.poll_saved(wait=wait)
        if version is None:
            return
        checkpoint = self.config.trainer.checkpoint
        if version not in self.resumable_versions:
            limit = min(checkpoint.resumable, checkpoint.keep)
            self.resumable_versions = [*self.resumable_versions, version][-limit:]
        self.coordinator.commit_checkpoint(self.resumable_versions[0])

    def free_buffer_space(self) -> None:
        """Make room in a buffer that is filling up with groups that only a resumption would need.

        Raises CheckpointError if there is no room, and the checkpoint that would free some cannot be copied.
        """
        # 1. Give up the older checkpoints as points to resume from, as soon as there is no room for the spare one.
        if len(self.resumable_versions) > 1 and not self.coordinator.has_room():
            self.resumable_versions = self.resumable_versions[-1:]
            self.coordinator.commit_checkpoint(self.resumable_versions[0])

        # 2. A checkpoint counts only once it is in `runs_store`. If its copy failed and not even the next step fits,
        #    wait for another try.
        if self.checkpoints.uncopied_version is None or self.coordinator.can_train_uncommitted():
            return
        self._copy_now()
        if self.checkpoints.uncopied_version is not None:
            raise CheckpointError(
                f"the checkpoint of version {self.checkpoints.uncopied_version} could not be copied to "
                f"{self.config.runs_store}. Until it is, the buffer must keep all groups since version "
                f"{self.resumable_versions[0]}, and it has no room left for another step. The checkpoints on this "
                "machine are intact: fix the store, or give the buffer more memory (redis.max_memory_bytes, "
                "redis.quota_bytes), and start the same command again to resume"
            )

    def _copy_now(self) -> None:
        """Retry the copy of a checkpoint that could not be copied before, and wait for it."""
        self.checkpoints.start_copy()
        self.commit_saved_checkpoints(wait=True)

    def save_everything(self) -> None:
        """Save and copy a checkpoint of this version, and wait for both and for an export in progress."""
        self.save_checkpoint()
        self.commit_saved_checkpoints(wait=True)
        if self.checkpoints.uncopied_version is not None:
            self._copy_now()
        self.checkpoints.wait_for_export()
        if self.checkpoints.uncopied_version is not None:
            self.logger.warn(
                self.version,
                "this trainer ends, and the checkpoint of version "
                f"{self.checkpoints.uncopied_version} is only on this machine: {self.config.runs_store} has an older "
                "one or none. Keep the folder of the run, or copy it by hand",
            )

    def finish_run(self) -> None:
        """End the run, compare the engines' log-probabilities under the final weights with ours, and export.

        `train` closes the exporter only after this: a server that restarts before its final evaluation has to fetch the
        final weights again.
        """
        self.coordinator.end_run()
        timeout_s = self.config.eval.timeout_s
        # The probe is a small batch that the engines sampled from the final weights. On shared devices engines sleep
        # while we evaluate it, and the final evaluation goes on afterwards.
        probe = self.coordinator.wait_for_probe(self.version, timeout_s)
        with self.coordinator.devices.engines_asleep():
            gap = None if probe is None else measure_gap(self.policy, probe, self.config)
        if probe is None or gap is None:
            self._warn_missing("probe")
        else:
            self.logger.log_probe(self.version, gap)
            self._warn(self.gap_watch.check_probe(probe, gap))
        folder = self.checkpoints.export_final(self.policy, self.model_folder)
        if not self.coordinator.wait_for_evaluation(self.version, timeout_s):
            self._warn_missing("evaluation")
        self.checkpoints.mark_best(self._read_evaluations())
        self.logger.info("run finished", version=self.version, exported=str(folder))

    def _read_evaluations(self) -> list[Evaluation]:
        """Evaluations that decide which checkpoints are kept; [] if they do not matter."""
        if not self.config.trainer.checkpoint.keep_best:
            return []
        return self.coordinator.read_evaluations()

    def _warn(self, warning: str | None) -> None:
        if warning is not None:
            self.logger.warn(self.version, warning)

    def _warn_missing(self, result: str) -> None:
        timeout_s = self.config.eval.timeout_s
        self.logger.warn(
            self.version,
            f"no {result} of version {self.version} arrived: eval.timeout_s ({timeout_s:g} s) passed, or SIGTERM came "
            "first",
        )

"""The simulated trainer: take, train, publish, release, repeated in the order of `trainer/loop.py`.

    wait for P groups  -->  compute  -->  publish (stall)  -->  release  -->  checkpoint  -->  next step
       ^                       |
       +-- streaming: part ----+

    prefetches_batches: after computing, wait for the next batch before publishing

The buffer calls `try_take` after each of its changes. A trainer that crashes restarts from its last checkpoint and gets
the same batches again.

Its phase follows from three fields:

    _waiting_since_s is set     it waits for a batch, or for the next part of one
    is_computing                it computes `_batches[0]`
    _trained_batch is set       it has trained this batch and waits for the next one before it publishes
    none of them                it publishes, saves a checkpoint or restarts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from async_grpo.auto_staleness import StalenessDecision, StalenessFigures, make_controller
from async_grpo.lab.simulate.buffer import SimulatedBuffer
from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.processors import SharedProcessors
from async_grpo.lab.simulate.server import SimulatedServer
from async_grpo.staleness import age
from async_grpo.wire import Batch


@dataclass(slots=True)
class SimulatedStep:
    """Metrics of one optimizer step."""

    version: int
    """Version before the step."""
    ended_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    tokens: float = 0.0
    samples: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    """Number of trained tokens by age."""
    group_ages: float = 0.0
    """Age of the oldest token of a group, mean over the groups."""
    before_queue: float = 0.0
    """Versions published between admission and insert of a group, mean over the groups."""
    replayed: bool = False
    busy_s: float = 0.0
    """Seconds in which an engine generated, mean over the servers."""
    slots: float = 0.0
    """Samples running at the end of the step, over all servers."""
    ready: int = 0
    """READY groups at the end of the step."""
    inserted: int = 0
    """Groups inserted since the start of the run."""
    staleness: int = 0
    """Effective S during the step."""


class SimulatedTrainer:
    """Trains to the last step of the run, sends weights to the servers, and records a row per step."""

    def __init__(
        self,
        context: SimulationContext,
        buffer: SimulatedBuffer,
        servers: Sequence[SimulatedServer],
        processors: SharedProcessors,
    ) -> None:
        self._context = context
        self._settings = context.settings
        self._events = context.events
        self._timings = context.timings.trainer
        self._buffer = buffer
        self._servers = servers
        self._processors = processors

        self.version = 0
        self.is_computing = False
        self.steps: list[SimulatedStep] = []
        self._open_row: SimulatedStep | None = None
        """Row in `steps` of a step that has not ended."""
        self.decisions: list[tuple[int, StalenessDecision]] = []
        """max_staleness: auto. Versions at which S changed, and why."""
        self._epoch = 0
        self._published_version = 0
        """Highest published version. A restarted trainer does not publish it again."""
        self._checkpoint_version = 0
        self._controller = make_controller(self._settings.auto_staleness, self._settings.policy)

        self._batches: list[Batch] = []
        """Batches, or parts of one, that are taken and not trained yet."""
        self._computed_groups = 0
        """Groups of the step's batch whose computing has started."""
        self._trained_batch: Batch | None = None
        """prefetches_batches: the trained batch whose update waits for the next batch."""
        self._trained_at_s = 0.0
        self._waiting_since_s: float | None = None
        self._step_started_s = 0.0
        self._wait_s = 0.0
        """Seconds of the step that the trainer has waited for batches."""
        self._tokens = 0.0
        """Completion tokens of the step so far."""

        self._slowdown = 1.0
        """Factor by which computing is slower than alone on the machine."""
        self._work_s = 0.0
        """Seconds of work left at `_work_updated_s`, without slowdown."""
        self._work_updated_s = 0.0
        self._finish_work: Callable[[], None] | None = None
        self._engines_busy_s = 0.0
        """Seconds in which engines have generated until the last step ended, mean over the servers."""
        self._schedule_number = 0
        """Incremented by crashes and changes of speed; actions scheduled with an older number are not run."""

    @property
    def is_over(self) -> bool:
        """True once all steps are trained."""
        return self.version >= self._settings.steps

    def start(self) -> None:
        """Take over the run and wait for the first batch."""
        self._epoch = self._buffer.state.rollback(self.version).epoch
        self._step_started_s = self._events.now_s
        self._start_step()

    # Take

    def _start_step(self) -> None:
        self._wait_s = 0.0
        self._tokens = 0.0
        self._computed_groups = 0
        self._waiting_since_s = self._events.now_s
        self.try_take()

    def try_take(self) -> None:
        """Take the next batch if one is needed and ready. Called after each change of the buffer."""
        if self.is_over:
            return
        if self._trained_batch is not None:
            self._take_before_publication(self._trained_batch)
        elif self._waiting_since_s is not None:
            self._take_and_compute(self._waiting_since_s)
        elif self.is_computing:
            self._prefetch_batch()

    def _take_before_publication(self, trained: Batch) -> None:
        self._take_batch(self.version + 1)
        if self._batches:
            self._wait_s += self._events.now_s - self._trained_at_s
            self._trained_batch = None
            self._start_publication(trained)

    def _take_and_compute(self, waiting_since_s: float) -> None:
        if not self._batches:
            self._take_batch(self.version)
        if self._batches:
            self._wait_s += self._events.now_s - waiting_since_s
            self._waiting_since_s = None
            self._start_compute(self._batches[0])

    def _prefetch_batch(self) -> None:
        has_next_step = self.version + 1 < self._settings.steps
        if self._settings.prefetches_batches and len(self._batches) < 2 and has_next_step:
            self._take_batch(self.version + 1)

    def _take_batch(self, version: int) -> None:
        settings = self._settings
        state = self._buffer.state
        computed = self._computed_groups if settings.streaming else 0
        missing = settings.groups_per_step - computed
        min_groups = min(missing, settings.min_part_groups) if settings.streaming else missing
        # Most calls end here. A batch that the buffer has formed before (a replay) needs no READY groups.
        if state.ready_count < min_groups and version not in state.steps:
            return

        batch = self._buffer.take_batch(self._epoch, version, have=computed, whole=not settings.streaming)
        if batch is not None:
            self._batches.append(batch)

    # Train

    def _start_compute(self, batch: Batch) -> None:
        settings = self._settings
        timings = self._timings
        groups = self._buffer.groups
        completion_tokens = sum(sum(groups[group.seq].tokens_by_version.values()) for group in batch.groups)
        prompt_tokens = self._context.timings.prompt_tokens * len(batch.groups) * settings.group_size
        noise = self._context.draw_noise(timings.variation)

        work_s = timings.take_s + timings.token_s * (completion_tokens + prompt_tokens) * noise
        if settings.streaming:
            work_s += timings.part_s
        if batch.missing == 0:  # the last part, or the whole batch: it includes the optimizer step
            work_s += timings.base_s + (self._context.timings.first_step_s if self.version == 0 else 0.0)

        self._tokens += completion_tokens
        self._computed_groups += len(batch.groups)
        self._set_computing(True)
        self._work_s = work_s
        self._work_updated_s = self._events.now_s
        self._schedule_work_end(lambda: self._finish_compute(batch))
        self.try_take()  # prefetches_batches: the next batch may be ready already

    def _schedule_work_end(self, finish: Callable[[], None]) -> None:
        self._finish_work = finish
        self._schedule_number += 1
        self._call_later(self._work_s * self._slowdown, finish)

    def set_slowdown(self, factor: float) -> None:
        """Train `factor` times slower than alone from now on."""
        if factor == self._slowdown:
            return
        if self.is_computing:
            assert self._finish_work is not None
            now_s = self._events.now_s
            self._work_s = max(0.0, self._work_s - (now_s - self._work_updated_s) / self._slowdown)
            self._work_updated_s = now_s
            self._slowdown = factor
            self._schedule_work_end(self._finish_work)
        self._slowdown = factor

    def _set_computing(self, computing: bool) -> None:
        if computing != self.is_computing:
            self.is_computing = computing
            self._processors.update_engine_speed(computing)

    def _finish_compute(self, batch: Batch) -> None:
        """Continue after the gradients of a batch or a part: with the next part, the next batch, or the update."""
        self._set_computing(False)
        self._record_ages(batch)
        self._batches.pop(0)

        if batch.missing:
            self._waiting_since_s = self._events.now_s
            self.try_take()
        elif self._settings.prefetches_batches and not self._batches and self.version + 1 < self._settings.steps:
            self._trained_batch = batch
            self._trained_at_s = self._events.now_s
            self.try_take()
        else:
            self._start_publication(batch)

    # Publish, release, save

    def _start_publication(self, batch: Batch) -> None:
        next_version = self.version + 1
        publishes = next_version > self._published_version and next_version % self._settings.sync_every == 0
        stall_s = self._context.timings.sync.stall_s if publishes else 0.0
        self._call_later(stall_s, lambda: self._finish_step(batch, publishes))

    def _finish_step(self, batch: Batch, publishes: bool) -> None:
        self.version += 1
        self._published_version = max(self._published_version, self.version)
        # Publish before releasing, as the real loop does: the room that the release makes goes to tickets of the new
        # version.
        if publishes:
            self.publish_version(self.version)
        self._buffer.release_batch(batch)
        self._finish_row()

        every_steps = self._settings.checkpoint_steps
        saves = every_steps > 0 and self.version % every_steps == 0
        checkpoint_s = self._timings.checkpoint_s if saves else 0.0
        self._call_later(checkpoint_s, lambda: self._continue_after_step(saves))

    def publish_version(self, version: int) -> None:
        """Let new tickets carry `version`, and send its weights to the servers."""
        self._buffer.state.publish_version(self._epoch, version)
        # Not `_call_later`: the weights arrive even if the trainer crashes meanwhile.
        self._events.call_later(self._context.timings.sync.transfer_s, lambda: self._deliver_weights(version))

    def _deliver_weights(self, version: int) -> None:
        for server in self._servers:
            server.receive_weights(version)

    def _continue_after_step(self, saves: bool) -> None:
        if saves:
            self._checkpoint_version = self.version
            self._buffer.state.commit_checkpoint(self._epoch, self.version)
        if not self.is_over:
            self._start_step()

    # Rows

    def _record_ages(self, batch: Batch) -> None:
        """Add the ages of a batch or a part to the row of its step."""
        if self._open_row is None:
            self._open_row = SimulatedStep(self.version, replayed=batch.replayed)
            self.steps.append(self._open_row)
        row = self._open_row
        groups_per_step = self._settings.groups_per_step

        for record in batch.groups:
            group = self._buffer.groups[record.seq]
            for version, tokens in group.tokens_by_version.items():
                if version >= batch.mask_below:
                    row.ages[age(self.version, version)] += round(tokens)
            row.group_ages += age(self.version, record.oldest_version) / groups_per_step
            row.before_queue += group.versions_until_insert / groups_per_step
            row.samples += group.needed

    def _finish_row(self) -> None:
        now_s = self._events.now_s
        state = self._buffer.state
        assert self._open_row is not None
        row = self._open_row
        self._open_row = None
        row.ended_s = now_s
        row.step_s = now_s - self._step_started_s
        row.wait_s = self._wait_s
        row.tokens = self._tokens
        row.busy_s = self._measure_busy_time()
        row.slots = sum(server.engine.running for server in self._servers)
        row.ready = state.ready_count
        row.inserted = state.inserted
        self._adjust_staleness(row)
        self._step_started_s = now_s

    def _measure_busy_time(self) -> float:
        """Seconds in which engines generated since the last call, mean over the servers."""
        for server in self._servers:
            server.engine.advance_to(self._events.now_s)
        total_s = sum(server.engine.busy_s for server in self._servers) / len(self._servers)
        since_last_s = total_s - self._engines_busy_s
        self._engines_busy_s = total_s
        return since_last_s

    def _adjust_staleness(self, row: SimulatedStep) -> None:
        """Let the controller of `max_staleness: auto` choose the S of the next steps."""
        state = self._buffer.state
        row.staleness = state.policy.window.effective_staleness
        if self._controller is None or self.version + row.staleness >= self._settings.steps:
            return

        figures = StalenessFigures(
            idle=row.wait_s / row.step_s,
            tokens_per_s=row.tokens / row.step_s,
            active=len(state.open) + len(state.taken),
            ready=row.ready,
        )
        decision = self._controller.observe_step(figures)
        if decision:
            self.decisions.append((self.version, decision))
            self._buffer.set_staleness(self._epoch, decision.staleness)

    # Faults

    def crash(self) -> None:
        """Fail, and restart from the last checkpoint."""
        self._schedule_number += 1
        self._set_computing(False)
        self._batches = []
        self._waiting_since_s = None
        self._trained_batch = None
        if self._open_row is not None:
            self.steps.pop()
            self._open_row = None
        self._call_later(self._context.timings.faults.trainer_restart_s, self._restart)

    def _restart(self) -> None:
        self.version = self._checkpoint_version
        self.start()

    def _call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run the action after `delay_s` seconds, unless the trainer crashes or changes its speed before."""
        number = self._schedule_number

        def run_if_current() -> None:
            if number == self._schedule_number:
                action()

        self._events.call_later(delay_s, run_if_current)

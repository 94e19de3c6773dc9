"""The simulated trainer: take, train, publish, release, again, in the order of `trainer/loop.py`.

It waits for P groups (or, streaming, for some), computes for as long as the timings say, and hands the next version to
the buffer and to the servers. The buffer calls `try_take` after each change. A trainer that crashes restarts from its
last checkpoint, and the buffer gives it the same batches again.
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
    """One optimizer step: when it ended, where its time went, and how old its tokens were."""

    version: int
    """Version before the step."""
    ended_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    tokens: float = 0.0
    samples: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    """Age -> trained tokens."""
    group_ages: float = 0.0
    """Mean over the groups of the age of their oldest token."""
    before_queue: float = 0.0
    """Mean over the groups of the versions that went by between admission and insert."""
    replayed: bool = False
    busy_s: float = 0.0
    """Seconds in which an engine generated, mean over the servers."""
    slots: float = 0.0
    """Samples running at the end of the step, over all servers."""
    ready: int = 0
    """Groups that were READY when the step ended."""
    inserted: int = 0
    """Groups inserted since the run began."""
    staleness: int = 0
    """Effective S during the step."""


class SimulatedTrainer:
    """Trains to the run's last step. It sends weights to the servers and sums up their load once per step."""

    def __init__(
        self,
        context: SimulationContext,
        buffer: SimulatedBuffer,
        servers: Sequence[SimulatedServer],
        processors: SharedProcessors,
    ) -> None:
        self._context = context
        self._settings, self._events = context.settings, context.events
        self.timings = context.timings.trainer
        self._buffer = buffer
        self._servers = servers
        self._processors = processors
        self.version = 0
        self.head = 0
        """Highest version that was published."""
        self.saved = 0
        self.epoch = 0
        self.computing = False
        self.steps: list[SimulatedStep] = []
        self.decisions: list[tuple[int, StalenessDecision]] = []
        """max_staleness: auto. Versions at which S changed, and why."""
        self._controller = make_controller(self._settings.auto, self._settings.policy)
        self._batches: list[Batch] = []
        """Batches, or parts of one, that were taken and are not trained."""
        self._have = 0
        self._waiting_since_s: float | None = None
        self._began_s = 0.0
        self._waited_s = 0.0
        self._unpublished: Batch | None = None
        """With prefetching: the batch that is trained, while the next one is not there."""
        self._unpublished_since_s = 0.0
        self._tokens = 0.0
        self._work_s = 0.0
        """Seconds of work left at `_work_at_s`, at the speed of a trainer that is alone on its machine."""
        self._work_at_s = 0.0
        self._end_work: Callable[[], None] = lambda: None
        self._beside = 1.0
        """How much slower it is than alone."""
        self._busy_before_s = 0.0
        """Seconds in which engines generated, mean over the servers, until the last step ended."""
        self._life = 0
        """Counts restarts and changes of speed: what was scheduled before lapses."""

    @property
    def is_over(self) -> bool:
        """True once all steps are trained."""
        return self.version >= self._settings.steps

    def start(self) -> None:
        """Take the run over and wait for the first batch."""
        self.epoch = self._buffer.state.rollback(self.version).epoch
        self._began_s = self._events.now_s
        self._start_step()

    # Take

    def _start_step(self) -> None:
        self._waited_s, self._tokens, self._have = 0.0, 0.0, 0
        self._waiting_since_s = self._events.now_s
        self.try_take()

    def try_take(self) -> None:
        """Take the next batch, if one is needed and there. Called after each change of the buffer."""
        if self.is_over:
            return
        now_s = self._events.now_s
        if self._unpublished is not None:
            self._take_batch(self.version + 1)
            if self._batches:
                self._waited_s += now_s - self._unpublished_since_s
                batch, self._unpublished = self._unpublished, None
                self._start_publication(batch)
        elif self._waiting_since_s is None:
            has_next = self.version + 1 < self._settings.steps
            if self._settings.prefetches and self.computing and len(self._batches) < 2 and has_next:
                self._take_batch(self.version + 1)
        else:
            if not self._batches:
                self._take_batch(self.version)
            if self._batches:
                self._waited_s += now_s - self._waiting_since_s
                self._waiting_since_s = None
                self._start_compute(self._batches[0])

    def _take_batch(self, version: int) -> None:
        settings, state = self._settings, self._buffer.state
        have = self._have if settings.streaming else 0
        missing = settings.groups_per_step - have
        least = min(missing, settings.least_part) if settings.streaming else missing
        if state.ready_count < least and version not in state.steps:
            return
        batch = self._buffer.take_batch(self.epoch, version, have=have, whole=not settings.streaming)
        if batch is not None:
            self._batches.append(batch)

    # Train

    def _start_compute(self, batch: Batch) -> None:
        settings, timings = self._settings, self.timings
        groups = self._buffer.groups
        tokens = sum(sum(groups[group.seq].tokens.values()) for group in batch.groups)
        prompts = self._context.timings.prompt_tokens * len(batch.groups) * settings.group_size
        work_s = timings.take_s + timings.token_s * (tokens + prompts) * self._context.draw_noise(timings.variation)
        if settings.streaming:
            work_s += timings.part_s
        if batch.missing == 0:
            work_s += timings.base_s + (self._context.timings.first_step_s if self.version == 0 else 0.0)
        self._tokens += tokens
        self._have += len(batch.groups)
        self._set_computing(True)
        self._work_s, self._work_at_s = work_s, self._events.now_s
        self._schedule_end(lambda: self._finish_compute(batch))
        self.try_take()

    def _schedule_end(self, end: Callable[[], None]) -> None:
        self._end_work = end
        self._life += 1
        self._call_later(self._work_s * self._beside, end)

    def slow_down(self, factor: float) -> None:
        """Train at 1 / `factor` of the speed that the trainer has alone."""
        if factor == self._beside:
            return
        if self.computing:
            now_s = self._events.now_s
            self._work_s = max(0.0, self._work_s - (now_s - self._work_at_s) / self._beside)
            self._work_at_s, self._beside = now_s, factor
            self._schedule_end(self._end_work)
        self._beside = factor

    def _set_computing(self, computing: bool) -> None:
        if computing != self.computing:
            self.computing = computing
            self._processors.note_training(computing)

    def _finish_compute(self, batch: Batch) -> None:
        """The gradients of a batch or a part are there."""
        self._set_computing(False)
        self._count_ages(batch)
        self._batches.pop(0)
        if batch.missing:
            self._waiting_since_s = self._events.now_s
            self.try_take()
        elif self._settings.prefetches and not self._batches and self.version + 1 < self._settings.steps:
            self._unpublished, self._unpublished_since_s = batch, self._events.now_s
            self.try_take()
        else:
            self._start_publication(batch)

    # Publish, release, save

    def _start_publication(self, batch: Batch) -> None:
        following = self.version + 1
        publishes = following > self.head and following % self._settings.sync_every == 0
        stall_s = self._context.timings.sync.stall_s if publishes else 0.0
        self._call_later(stall_s, lambda: self._finish_step(batch, publishes))

    def _finish_step(self, batch: Batch, publishes: bool) -> None:
        self.version += 1
        self.head = max(self.head, self.version)
        if publishes:
            self.publish_version(self.version)
        self._buffer.release_batch(batch)
        self._finish_row()
        every_steps = self._settings.checkpoint_steps
        saves = every_steps > 0 and self.version % every_steps == 0
        self._call_later(self.timings.checkpoint_s if saves else 0.0, lambda: self._continue_after_step(saves))

    def publish_version(self, version: int) -> None:
        """Let new tickets carry `version`, and send its weights to the servers."""
        self._buffer.state.publish_version(self.epoch, version)
        self._events.call_later(self._context.timings.sync.transfer_s, lambda: self._deliver_weights(version))

    def _deliver_weights(self, version: int) -> None:
        for server in self._servers:
            server.receive_weights(version)

    def _continue_after_step(self, saves: bool) -> None:
        if saves:
            self.saved = self.version
            self._buffer.state.commit_checkpoint(self.epoch, self.version)
        if not self.is_over:
            self._start_step()

    # Rows

    def _count_ages(self, batch: Batch) -> None:
        """Add the ages of a batch or a part to the row of its step."""
        if not self._has_open_row():
            self.steps.append(SimulatedStep(self.version, replayed=batch.replayed))
        row, groups_per_step = self.steps[-1], self._settings.groups_per_step
        for record in batch.groups:
            group = self._buffer.groups[record.seq]
            for version, tokens in group.tokens.items():
                if version >= batch.mask_below:
                    row.ages[age(self.version, version)] += round(tokens)
            row.group_ages += age(self.version, record.oldest_version) / groups_per_step
            row.before_queue += group.versions_before_insert / groups_per_step
            row.samples += group.needed

    def _has_open_row(self) -> bool:
        return bool(self.steps) and self.steps[-1].version == self.version and self.steps[-1].ended_s == 0

    def _finish_row(self) -> None:
        now_s, row, state = self._events.now_s, self.steps[-1], self._buffer.state
        row.ended_s, row.step_s, row.wait_s = now_s, now_s - self._began_s, self._waited_s
        row.tokens = self._tokens
        row.busy_s = self._measure_busy_time()
        row.slots = sum(server.engine.running for server in self._servers)
        row.ready, row.inserted = state.ready_count, state.inserted
        self._adjust_staleness(row)
        self._began_s = now_s

    def _measure_busy_time(self) -> float:
        """Seconds in which engines generated since the last call, mean over the servers."""
        for server in self._servers:
            server.engine.advance(self._events.now_s)
        total_s = sum(server.engine.busy_s for server in self._servers) / len(self._servers)
        since_s, self._busy_before_s = total_s - self._busy_before_s, total_s
        return since_s

    def _adjust_staleness(self, row: SimulatedStep) -> None:
        """Let the controller choose the S of the steps to come."""
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
        if decision := self._controller.observe_step(figures):
            self.decisions.append((self.version, decision))
            self._buffer.set_staleness(self.epoch, decision.staleness)

    # Faults

    def crash(self) -> None:
        """End the process. It restarts from its last checkpoint."""
        self._life += 1
        self._set_computing(False)
        self._batches, self._waiting_since_s, self._unpublished = [], None, None
        if self._has_open_row():
            self.steps.pop()
        self._call_later(self._context.timings.faults.trainer_restart_s, self._restart)

    def _restart(self) -> None:
        self.version = self.saved
        self.start()

    def _call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run the action after `delay_s` seconds, unless the trainer crashes or changes its speed meanwhile."""
        life = self._life
        self._events.call_later(delay_s, lambda: action() if life == self._life else None)

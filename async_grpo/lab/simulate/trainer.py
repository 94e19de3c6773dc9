"""The simulated trainer: take, train, publish, release, again, in the order of `trainer/loop.py`.

It waits for P groups (or, streaming, for some), computes for as long as the timings say, and hands the next version to
the buffer and to the servers. `world` tells it when the buffer has changed. A trainer that dies goes back to its last
checkpoint, and the buffer gives it the same batches again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.auto_staleness import StalenessFigures, controller_for
from async_grpo.staleness import age
from async_grpo.wire import Batch

if TYPE_CHECKING:
    from async_grpo.lab.simulate.world import World


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
    """S in force during the step."""


class SimulatedTrainer:
    """Makes steps until the run's last one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.version = 0
        self.head = 0
        """Highest version that was published."""
        self.saved = 0
        self.epoch = 0
        self.computing = False
        self.steps: list[SimulatedStep] = []
        self._batches: list[Batch] = []
        """Batches, or parts of one, that were taken and are not trained."""
        self._have = 0
        self._asked_s: float | None = None
        """Since when it waits."""
        self._began_s = 0.0
        self._waited_s = 0.0
        self._unpublished: Batch | None = None
        """With prefetching: the batch that is trained, while the next one is not there."""
        self._since_s = 0.0
        self._tokens = 0.0
        self._work_s = 0.0
        """Seconds of work left, alone on the machine, and when that was computed."""
        self._work_at_s = 0.0
        self._beside = 1.0
        self.controller = controller_for(world.settings.auto, world.settings.policy)
        self._life = 0
        """Counts restarts and changes of speed: what was planned before lapses."""

    def start(self) -> None:
        """Take the run over and wait for the first batch."""
        self.epoch = self._world.buffer.rollback(self.version).epoch
        self._began_s = self._world.events.now_s
        self._next()

    @property
    def is_over(self) -> bool:
        """Whether all steps are trained."""
        return self.version >= self._world.settings.steps

    def _next(self) -> None:
        self._waited_s, self._tokens, self._have = 0.0, 0.0, 0
        self._asked_s = self._world.events.now_s
        self.poll()

    def poll(self) -> None:
        """Take what may be taken now. Called whenever the buffer has changed."""
        world = self._world
        if self.is_over:
            return
        if self._unpublished is not None:
            self._take(self.version + 1)
            if self._batches:
                self._waited_s += world.events.now_s - self._since_s
                batch, self._unpublished = self._unpublished, None
                self._publish(batch)
            return
        if self._asked_s is None:
            following = self.version + 1
            if (
                world.settings.prefetches
                and self.computing
                and len(self._batches) < 2
                and following < world.settings.steps
            ):
                self._take(following)
            return
        if not self._batches:
            self._take(self.version)
        if self._batches:
            now_s = world.events.now_s
            self._waited_s += now_s - self._asked_s
            self._asked_s = None
            self._compute(self._batches[0])

    def _take(self, version: int) -> None:
        world, streaming = self._world, self._world.settings.streaming
        have = self._have if streaming else 0
        missing = world.settings.groups_per_step - have
        least = min(missing, world.settings.least_part) if streaming else missing
        if world.ready < least and version not in world.buffer.steps:
            return
        taken = world.take(self.epoch, version, have=have, whole=not streaming)
        if taken is not None:
            self._batches.append(taken)

    def _compute(self, batch: Batch) -> None:
        world = self._world
        timings = world.timings.trainer
        tokens = sum(sum(world.groups[group.seq].tokens.values()) for group in batch.groups)
        prompts = world.timings.prompt_tokens * len(batch.groups) * world.settings.group_size
        work_s = timings.take_s + timings.token_s * (tokens + prompts) * world.noise(timings.variation)
        if world.settings.streaming:
            work_s += timings.part_s
        if batch.missing == 0:
            work_s += timings.base_s + (world.timings.first_step_s if self.version == 0 else 0.0)
        self._tokens += tokens
        self._have += len(batch.groups)
        self._set_computing(True)
        self._work_s, self._work_at_s = work_s, world.events.now_s
        self._plan_end(lambda: self._trained(batch))
        self.poll()

    def _plan_end(self, end: Callable[[], None]) -> None:
        self._end = end
        self._life += 1
        life = self._life
        self._world.events.after(self._work_s * self._beside, lambda: end() if life == self._life else None)

    def slow_down(self, beside: float) -> None:
        """Work at 1 / `beside` of the speed that it has alone."""
        if beside == self._beside:
            return
        if self.computing:
            now_s = self._world.events.now_s
            self._work_s = max(0.0, self._work_s - (now_s - self._work_at_s) / self._beside)
            self._work_at_s, self._beside = now_s, beside
            self._plan_end(self._end)
        self._beside = beside

    def _set_computing(self, computing: bool) -> None:
        if computing != self.computing:
            self.computing = computing
            self._world.trainer_changed()

    def _trained(self, batch: Batch) -> None:
        """The gradients of a batch or a part are there."""
        self._set_computing(False)
        self._note(batch)
        self._batches.pop(0)
        if batch.missing:
            self._asked_s = self._world.events.now_s
            self.poll()
        elif self._world.settings.prefetches and not self._batches and self.version + 1 < self._world.settings.steps:
            self._unpublished, self._since_s = batch, self._world.events.now_s
            self.poll()
        else:
            self._publish(batch)

    def _publish(self, batch: Batch) -> None:
        life = self._life
        publishes = self._publishes
        stall_s = self._world.timings.sync.stall_s if publishes else 0.0
        self._world.events.after(stall_s, lambda: self._published(batch, publishes) if life == self._life else None)

    @property
    def _publishes(self) -> bool:
        following = self.version + 1
        return following > self.head and following % self._world.settings.sync_every == 0

    def _published(self, batch: Batch, publishes: bool) -> None:
        world = self._world
        self.version += 1
        self.head = max(self.head, self.version)
        if publishes:
            world.publish(self.epoch, self.version)
        world.release(batch)
        self._finish_row()
        saves = world.settings.checkpoint_steps and self.version % world.settings.checkpoint_steps == 0
        life = self._life
        world.events.after(
            world.timings.trainer.checkpoint_s if saves else 0.0,
            lambda: self._saved(bool(saves)) if life == self._life else None,
        )

    def _saved(self, saves: bool) -> None:
        if saves:
            self.saved = self.version
            self._world.buffer.commit_checkpoint(self.epoch, self.version)
        if not self.is_over:
            self._next()

    def _note(self, batch: Batch) -> None:
        """Count the ages of a batch or a part."""
        world = self._world
        if not self._row_begun():
            self.steps.append(SimulatedStep(self.version, replayed=batch.replayed))
        row = self.steps[-1]
        for record in batch.groups:
            group = world.groups[record.seq]
            for version, tokens in group.tokens.items():
                if version >= batch.mask_below:
                    row.ages[age(self.version, version)] += round(tokens)
            assert group.ticket is not None
            row.group_ages += age(self.version, record.oldest_version) / world.settings.groups_per_step
            row.before_queue += world.before_queue.get(record.seq, 0) / world.settings.groups_per_step
            row.samples += group.needed

    def _row_begun(self) -> bool:
        return bool(self.steps) and self.steps[-1].version == self.version and self.steps[-1].ended_s == 0

    def _finish_row(self) -> None:
        now_s, row = self._world.events.now_s, self.steps[-1]
        row.ended_s, row.step_s, row.wait_s = now_s, now_s - self._began_s, self._waited_s
        row.tokens = self._tokens
        row.busy_s, row.slots = self._world.busy_since_last(), self._world.running
        row.ready, row.inserted = self._world.ready, self._world.buffer.inserted
        self._adjust(row)
        self._began_s = now_s

    def _adjust(self, row: SimulatedStep) -> None:
        """Let the controller choose the S of the steps to come."""
        buffer = self._world.buffer
        row.staleness = buffer.policy.window.in_force
        if self.controller is None or self.version + row.staleness >= self._world.settings.steps:
            return
        figures = StalenessFigures(
            idle=row.wait_s / row.step_s,
            tokens_per_s=row.tokens / row.step_s,
            active=len(buffer.open) + len(buffer.taken),
            ready=row.ready,
        )
        if decision := self.controller.observe(figures):
            buffer.set_staleness(self.epoch, decision.staleness)
            self._world.decisions.append((self.version, decision))
            self._world.let_all_ask()

    def die(self) -> None:
        """The trainer dies, restarts, and goes on from its last checkpoint."""
        self._life += 1
        self._set_computing(False)
        self._batches, self._asked_s, self._unpublished = [], None, None
        if self._row_begun():
            self.steps.pop()
        life = self._life
        self._world.events.after(
            self._world.timings.faults.trainer_restart_s, lambda: self._come_back() if life == self._life else None
        )

    def _come_back(self) -> None:
        self.version = self.saved
        self.start()

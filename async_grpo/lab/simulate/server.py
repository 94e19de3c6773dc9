"""A simulated rollout server: tickets become groups, as the dispatcher makes them.

    buffer --admit--> SimulatedGroup --samples--> SimulatedEngine --> verifiers --> insert | discard --> buffer

What it decides, real code decides: whether another group is wanted and how many (`SampleSlots`), how many samples run
at once (`next_concurrency`), and everything of the buffer (`BufferState`). What it waits for: a free slot, a ticket,
weights of the ticket's version, its samples, verifiers. New weights are loaded as `rollout.interruption` says, and kept
back while an evaluation runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_grpo.lab.simulate.engine import SimulatedEngine, SimulatedSample
from async_grpo.lab.simulate.timings import EngineTimings
from async_grpo.wire import Group, Sample, Ticket
from async_grpo.wire.records import VersionSpan
from rollout_server.dispatch.concurrency import EVERY_S, SampleSlots, next_concurrency
from rollout_server.engines.base import EngineLoad

if TYPE_CHECKING:
    from async_grpo.lab.simulate.world import World


class SimulatedGroup:
    """A ticket's samples. It is complete once `needed` have ended; with over-sampling there are more."""

    __slots__ = ("committed", "ended", "needed", "prompt_read", "samples", "seq", "started_s", "ticket")

    def __init__(self, seq: int, samples: list[SimulatedSample], needed: int) -> None:
        self.seq = seq
        self.samples = samples
        self.needed = needed
        self.ended: list[SimulatedSample] = []
        self.prompt_read = False
        self.ticket: Ticket | None = None
        self.committed = 0
        """Samples that count as committed in the server's slots."""
        self.started_s = 0.0

    @property
    def missing(self) -> list[SimulatedSample]:
        """The samples that have not ended; none once enough have."""
        return [] if len(self.ended) >= self.needed else [sample for sample in self.samples if sample.left > 0]

    @property
    def tokens(self) -> dict[int, float]:
        """Version -> tokens of the samples that count."""
        total: dict[int, float] = {}
        for sample in self.ended[: self.needed]:
            for version, tokens in sample.tokens.items():
                total[version] = total.get(version, 0.0) + tokens
        return total

    def record(self) -> Group:
        """The group as the buffer takes it: one sample without tokens that has the oldest and the newest version."""
        assert self.ticket is not None
        versions = self.tokens
        oldest, newest = min(versions), max(versions)
        spans = [VersionSpan(oldest, 0, 0), VersionSpan(newest, 0, 0)]
        samples = [Sample(tokens=b"", logprobs=b"", spans=spans)]
        return Group(seq=self.seq, attempt=self.ticket.attempt, task=self.ticket.task, samples=samples)


class HeldOutPrompt:
    """A prompt of an evaluation, which its completions share."""

    __slots__ = ("prompt_read",)

    def __init__(self) -> None:
        self.prompt_read = False


@dataclass(slots=True)
class SimulatedEvaluation:
    """An evaluation as `EvalRunner` makes it: rounds one after another (sampled completions, then greedy ones), and of
    a round at most `room` completions at once, in places that are separate from those of training.

    Started all at once instead, thousands of completions would slow each other, and the groups of training next to
    them, far more than they do.
    """

    began_s: float
    room: int
    rounds: deque[deque[SimulatedSample]]
    """Completions that have not started."""
    running: int = 0
    ended_s: float | None = None

    def next_samples(self) -> list[SimulatedSample]:
        """The completions that may start now."""
        while self.rounds and not self.rounds[0] and self.running == 0:
            self.rounds.popleft()
        waiting = self.rounds[0] if self.rounds else deque[SimulatedSample]()
        count = min(len(waiting), self.room - self.running)
        self.running += count
        return [waiting.popleft() for _ in range(count)]

    @property
    def is_over(self) -> bool:
        """True if every completion has ended."""
        return self.running == 0 and not any(self.rounds)


class SimulatedServer:
    """One server. `world` has the clock, the buffer and the settings that all servers share."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self.name = f"rollout-{number}"
        settings = world.settings
        self.slots = SampleSlots(settings.min_concurrency or settings.max_concurrency)
        self.engine = SimulatedEngine(_engine_of(world, number), prompt_tokens=world.timings.prompt_tokens)
        self.groups: dict[int, SimulatedGroup] = {}
        self.is_up = True
        self._takes_groups = False
        """False until the first version is evaluated, if that is due: only then a server asks for tickets."""
        self._queue: deque[SimulatedSample] = deque()
        self._early: list[SimulatedGroup] = []
        """Groups whose ticket is of a version that the engine does not have yet."""
        self._newest = 0
        self._pinned = False
        self._draining = False
        self._evaluation: SimulatedEvaluation | None = None
        self._evaluated: set[SimulatedSample] = set()
        """Completions of the evaluation that run."""
        self._look = 0
        self._verifiers_free_s = [0.0] * world.timings.verifier.workers
        if settings.min_concurrency:
            world.events.after(EVERY_S, self._adjust)

    # Tickets

    @property
    def need(self) -> tuple[float, int]:
        """Orders waiting servers as the buffer serves them (`buffer.fair_share`): by the share of free slots."""
        size = self._world.settings.started_samples
        return self.slots.groups_wanted(size) / self.slots.groups_at_once(size), -self._number

    def ask(self) -> None:
        """Ask for tickets for all free slots, as long as the buffer gives any."""
        world, slots = self._world, self.slots
        world.waits_no_more(self._number)
        once, size = world.settings.groups_in_flight is not None, world.settings.started_samples
        while self.is_up and self._takes_groups and slots.has_room:
            tickets = world.admit(slots.groups_wanted(size), self.name, slots.groups_at_once(size))
            if not tickets:
                world.wait_for_ticket(self._number)
                return
            for ticket in tickets:
                self._take_up(ticket)
            if once:
                return

    def _take_up(self, ticket: Ticket) -> None:
        world = self._world
        group = world.group_of(ticket)
        group.ticket, group.started_s = ticket, world.events.now_s
        self.groups[ticket.seq] = group
        group.committed = len(group.missing)
        self.slots.commit(group.committed)
        newest = max([ticket.version, *(version for sample in group.samples for version in sample.tokens)])
        if self.engine.version < newest:
            self._early.append(group)
        else:
            world.exchange(lambda: world.events.after(world.timings.engine.call_s, lambda: self._begin(group)))

    def _uncommit(self, group: SimulatedGroup, samples: int) -> None:
        group.committed -= samples
        self.slots.finish(samples)

    def _begin(self, group: SimulatedGroup) -> None:
        if self.groups.get(group.seq) is group:
            self._queue.extend(group.missing)
            self._fill()

    def _fill(self) -> None:
        """Start samples while slots are free."""
        now_s, slots, engine = self._world.events.now_s, self.slots, self.engine
        shared = self._world.timings.engine.shared_prompt
        while self._queue and slots.in_use < slots.capacity and not self._draining:
            sample = self._queue.popleft()
            group = sample.group
            assert isinstance(group, SimulatedGroup)
            if self.groups.get(group.seq) is not group:
                continue
            engine.start(now_s, sample, prompt=not (shared and group.prompt_read))
            group.prompt_read = True
            slots.in_use += 1
        self.reschedule()

    # Samples

    def reschedule(self) -> None:
        """Look at the engine again when its next sample ends. Earlier looks that were asked for lapse."""
        self._look += 1
        look, at_s = self._look, self.engine.next_s()
        if at_s < math.inf:
            self._world.events.at(at_s, lambda: self._step(look))

    def _step(self, look: int) -> None:
        if look != self._look:
            return
        now_s = self._world.events.now_s
        for sample in self.engine.finished(now_s):
            if isinstance(sample.group, SimulatedGroup):
                self._sample_ended(sample.group, sample)
            elif self._evaluation is not None:
                self._world.evaluation_tokens += sample.done
                self._evaluated.remove(sample)
                self._evaluation.running -= 1
        if self._evaluation is not None:
            self._continue_evaluation(self._evaluation)
        if self._draining and self.slots.in_use == 0:
            self._draining = False
            self._load()
        self._fill()
        if self._world.settings.groups_in_flight is None:
            self.ask()
        self._world.note_busy()

    def _sample_ended(self, group: SimulatedGroup, sample: SimulatedSample) -> None:
        world = self._world
        group.ended.append(sample)
        self.slots.in_use -= 1
        if len(group.ended) < group.needed:
            if not world.settings.slots_by_group:
                self._uncommit(group, 1)
            return
        for extra in group.samples:  # over-sampling: the others are not needed
            self._abort(extra)
        self._uncommit(group, group.committed)
        world.events.at(self._judged_s(group.needed), lambda: world.exchange(lambda: self._settle(group)))

    def _abort(self, sample: SimulatedSample, *, lose: float = 0.0) -> None:
        if sample.is_running:
            self.engine.stop(self._world.events.now_s, sample, lose=lose)
            self.slots.in_use -= 1

    def _judged_s(self, samples: int) -> float:
        """When the verifiers have judged so many samples more."""
        free = self._verifiers_free_s
        verifier, now_s = self._world.timings.verifier, self._world.events.now_s
        if verifier.sample_s == 0:
            return now_s + verifier.latency_s
        done_s = now_s
        for _ in range(samples):
            place = free.index(min(free))
            free[place] = max(free[place], now_s) + verifier.sample_s
            done_s = max(done_s, free[place])
        return done_s + verifier.latency_s

    def _settle(self, group: SimulatedGroup) -> None:
        if self.groups.pop(group.seq, None) is not group:
            return
        self._world.settle(group)
        self._world.let_ask(self)

    def forget(self, group: SimulatedGroup) -> None:
        """Stop a group that has lost its lease: the buffer ended it as too old."""
        if self.groups.get(group.seq) is not group:
            return
        self._drop(group)
        self._fill()
        self._world.let_ask(self)

    # Weights

    def weights_came(self, version: int) -> None:
        """A version is on this machine: load it, unless the engine is pinned or has a newer one."""
        self._newest = max(self._newest, version)
        if self.is_up and not self._pinned and not self._draining and self._newest > self.engine.version:
            self._begin_load()

    def _begin_load(self) -> None:
        how = self._world.settings.interruption
        if how == "drain" and self.slots.in_use:
            self._draining = True
        else:
            if how == "abort":
                self._give_all_back()
            self._load()

    def _load(self) -> None:
        world = self._world
        encode_again = world.settings.interruption == "recompute"
        version = self._newest
        done_s = self.engine.load(world.events.now_s, version, world.timings.sync.load_s, encode_again=encode_again)
        self.reschedule()
        world.events.at(done_s, lambda: self._loaded(version))

    def _loaded(self, version: int) -> None:
        if version != self.engine.version or not self.is_up:
            return
        self._start_early()
        self._evaluate_if_due()
        self._world.let_ask(self)
        if self._newest > version:
            self.weights_came(self._newest)

    def _start_early(self) -> None:
        ready = [group for group in self._early if group.ticket and group.ticket.version <= self.engine.version]
        self._early = [group for group in self._early if group not in ready]
        for group in ready:
            self._begin(group)

    def _give_all_back(self) -> None:
        """`abort`: store what there is of the groups that may be interrupted again, and give them back."""
        for group in list(self.groups.values()):
            assert group.ticket is not None
            if group.ticket.attempt <= self._world.settings.max_interruptions:
                self._drop(group)
                self._world.give_back(group)

    def _drop(self, group: SimulatedGroup, *, lose: float = 0.0) -> None:
        del self.groups[group.seq]
        self._uncommit(group, group.committed)
        for sample in group.samples:
            self._abort(sample, lose=lose)
        group.prompt_read = False
        if group in self._early:
            self._early.remove(group)

    # Evaluations

    def _evaluate_if_due(self) -> None:
        """Pin the version and generate for held-out prompts, if a milestone was reached and no other server does it."""
        evaluation = self._world.claim_evaluation(self.engine.version)
        if evaluation is not None:
            self._pinned, self._evaluation = True, evaluation
            self._continue_evaluation(evaluation)

    def _continue_evaluation(self, evaluation: SimulatedEvaluation) -> None:
        """Start completions in the places that are free; let go of the version when none is left."""
        now_s = self._world.events.now_s
        for sample in evaluation.next_samples():
            prompt, timings = sample.group, self._world.timings
            assert isinstance(prompt, HeldOutPrompt)
            is_read = timings.engine.shared_prompt and prompt.prompt_read
            self.engine.start(now_s, sample, prompt=0.0 if is_read else timings.evaluation_factor)
            prompt.prompt_read = True
            self._evaluated.add(sample)
        if evaluation.is_over:
            evaluation.ended_s = now_s
            self._evaluation = None
            self._unpin()
        self.reschedule()

    def first(self) -> None:
        """Evaluate the first version if it is due, then ask for tickets."""
        self._evaluate_if_due()
        if not self._pinned:
            self._take_groups()

    def _take_groups(self) -> None:
        self._takes_groups = True
        self._world.let_ask(self)

    def _unpin(self) -> None:
        self._pinned = False
        self.weights_came(self._newest)
        if not self._takes_groups:
            self._take_groups()

    # Faults

    def die(self) -> None:
        """The process dies: what was not stored is lost. Its leases end with its restart, or by themselves."""
        world = self._world
        leased_s = min(world.settings.lease_s, world.timings.faults.server_restart_s)
        lost_s = world.random() * world.settings.progress_interval_s
        rate = 1 / max(1e-9, self.engine.beside * world.timings.engine.step_s)
        self.is_up, self._pinned, self._draining = False, False, False
        world.waits_no_more(self._number)
        for group in list(self.groups.values()):
            self._drop(group, lose=lost_s * rate)
            world.events.after(leased_s, self._give_back_later(group))
        for sample in self._evaluated:
            self.engine.stop(world.events.now_s, sample)
        self._queue.clear()
        self._evaluation, self._evaluated = None, set()
        self._takes_groups = True
        world.events.after(world.timings.faults.server_restart_s, self._come_back)

    def _give_back_later(self, group: SimulatedGroup) -> Callable[[], None]:
        return lambda: self._world.give_back(group)

    def _come_back(self) -> None:
        self.is_up = True
        self._begin_load()

    def _adjust(self) -> None:
        """What the dispatcher's controller does every second."""
        settings, engine = self._world.settings, self.engine
        engine.advance(self._world.events.now_s)
        room = self._world.timings.engine.cache_tokens
        load = EngineLoad(engine.running, 0, 0, kv_use=engine.context_tokens / room if room else 0.0)
        wanted = next_concurrency(self.slots.capacity, self.slots.in_use, load)
        self.slots.resize(min(settings.max_concurrency, max(settings.min_concurrency, wanted)))
        self._fill()
        self._world.let_ask(self)
        self._world.events.after(EVERY_S, self._adjust)


def _engine_of(world: World, number: int) -> EngineTimings:
    """The engine of that server: one of the last may be slower."""
    slower, last = world.timings.slow_servers, world.settings.servers - 1 - number
    return world.timings.engine.times(slower[last] if last < len(slower) else 1.0)

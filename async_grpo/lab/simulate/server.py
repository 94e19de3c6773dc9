"""A simulated rollout server: tickets become groups, as the dispatcher makes them.

    buffer --admit--> SimulatedGroup --samples--> SimulatedEngine --> verifiers --> insert | discard --> buffer

Real code decides whether another group is wanted and how many (`SampleSlots`), how many samples run at once
(`next_concurrency`), and everything of the buffer (`BufferState`). A server waits for a free slot, a ticket, weights of
the ticket's version, its samples, and verifiers. It loads new weights as `rollout.interruption` says, but none while an
evaluation runs.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial

from async_grpo.lab.simulate.buffer import SimulatedBuffer
from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.engine import SimulatedEngine, SimulatedSample
from async_grpo.lab.simulate.evaluation import EvaluationClaims, HeldOutPrompt, SimulatedEvaluation
from async_grpo.lab.simulate.group import SimulatedGroup
from async_grpo.lab.simulate.processors import SharedProcessors
from async_grpo.lab.simulate.timings import EngineTimings, Timings
from async_grpo.wire import Ticket
from rollout_server.dispatch.concurrency import ADJUST_INTERVAL_S, SampleSlots, next_concurrency
from rollout_server.engines.base import EngineLoad


class SimulatedServer:
    """One server and its engine. It meets the other roles only in the buffer, and on `processors`."""

    def __init__(
        self,
        number: int,
        context: SimulationContext,
        buffer: SimulatedBuffer,
        evaluations: EvaluationClaims,
        processors: SharedProcessors,
    ) -> None:
        self.name = f"rollout-{number}"
        self._number = number
        self._settings, self._timings = context.settings, context.timings
        self._events, self._generator = context.events, context.generator
        self._buffer = buffer
        self._evaluations = evaluations
        self._processors = processors
        self.slots = SampleSlots(self._settings.min_concurrency or self._settings.max_concurrency)
        engine = _engine_timings(self._timings, number, self._settings.servers)
        self.engine = SimulatedEngine(engine, prompt_tokens=self._timings.prompt_tokens)
        self.groups: dict[int, SimulatedGroup] = {}
        self.is_up = True
        self._takes_groups = False
        """False until the first version is evaluated, if that is due: only then a server requests tickets."""
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
        """Number of the latest scheduled look at the engine."""
        self._verifiers_free_s = [0.0] * self._timings.verifier.workers
        if self._settings.min_concurrency:
            self._events.call_later(ADJUST_INTERVAL_S, self._adjust_slots, recurring=True)

    def start(self) -> None:
        """Evaluate the first version if it is due, then request tickets."""
        self._evaluate_if_due()
        if not self._pinned:
            self._start_taking_groups()

    # Tickets

    @property
    def need(self) -> tuple[float, int]:
        """Orders waiting servers as the buffer serves them (`buffer.fair_share`): by the share of free slots."""
        size = self._settings.started_samples
        return self.slots.groups_to_fill_free_slots(size) / self.slots.groups_to_fill_all_slots(size), -self._number

    def request_tickets(self) -> None:
        """Request tickets for all free slots, as long as the buffer has any."""
        slots, size = self.slots, self._settings.started_samples
        self._buffer.stop_waiting(self)
        while self.is_up and self._takes_groups and slots.has_room:
            tickets = self._buffer.admit_groups(
                self, slots.groups_to_fill_free_slots(size), slots.groups_to_fill_all_slots(size)
            )
            if not tickets:
                return
            for ticket in tickets:
                self._take_group(ticket)
            if self._settings.groups_in_flight is not None:
                return

    def _start_taking_groups(self) -> None:
        self._takes_groups = True
        self._buffer.offer_room(self)

    def _take_group(self, ticket: Ticket) -> None:
        group = self._buffer.groups.find_or_create(ticket.seq)
        group.ticket, group.started_s = ticket, self._events.now_s
        self.groups[ticket.seq] = group
        group.committed = len(group.missing)
        self.slots.commit_samples(group.committed)
        newest = max([ticket.version, *(version for sample in group.samples for version in sample.tokens)])
        if self.engine.version < newest:
            self._early.append(group)
        else:
            call_s = self._timings.engine.call_s
            self._buffer.exchange(lambda: self._events.call_later(call_s, lambda: self._queue_group(group)))

    def _free_slots(self, group: SimulatedGroup, samples: int) -> None:
        group.committed -= samples
        self.slots.finish_samples(samples)

    # Samples

    def slow_down(self, factor: float) -> None:
        """Generate at 1 / `factor` of the speed that the engine has alone."""
        self.engine.slow_down(self._events.now_s, factor)
        self._schedule_look()

    def _queue_group(self, group: SimulatedGroup) -> None:
        if self.groups.get(group.seq) is not group:
            return
        if group.missing:
            self._queue.extend(group.missing)
            self._start_samples()
        else:  # an earlier server generated all, and could not judge it
            self._judge_group(group)

    def _start_samples(self) -> None:
        """Start queued samples while slots are free."""
        now_s, slots, engine = self._events.now_s, self.slots, self.engine
        shared = self._timings.engine.shared_prompt
        while self._queue and slots.in_use < slots.capacity and not self._draining:
            sample = self._queue.popleft()
            group = sample.group
            assert isinstance(group, SimulatedGroup)
            if self.groups.get(group.seq) is not group:
                continue
            engine.start(now_s, sample, prompt=not (shared and group.prompt_read))
            group.prompt_read = True
            slots.in_use += 1
        self._schedule_look()

    def _schedule_look(self) -> None:
        """Look at the engine again when its next sample ends. Looks that were scheduled before lapse."""
        self._look += 1
        look, end_s = self._look, self.engine.next_s()
        if end_s < math.inf:
            self._events.call_at(end_s, lambda: self._collect_ended(look))

    def _collect_ended(self, look: int) -> None:
        if look != self._look:
            return
        for sample in self.engine.finished(self._events.now_s):
            if isinstance(sample.group, SimulatedGroup):
                self._end_sample(sample.group, sample)
            elif self._evaluation is not None:
                self._evaluations.tokens += sample.done
                self._evaluated.remove(sample)
                self._evaluation.running -= 1
        if self._evaluation is not None:
            self._continue_evaluation(self._evaluation)
        if self._draining and self.slots.in_use == 0:
            self._draining = False
            self._load_newest()
        self._start_samples()
        if self._settings.groups_in_flight is None:
            self.request_tickets()
        self._processors.note_generation()

    def _end_sample(self, group: SimulatedGroup, sample: SimulatedSample) -> None:
        group.ended.append(sample)
        self.slots.in_use -= 1
        if len(group.ended) < group.needed:
            if not self._settings.slots_by_group:
                self._free_slots(group, 1)
            return
        for extra in group.samples:  # over-sampling: the others are not needed
            self._abort_sample(group, extra)
        self._free_slots(group, group.committed)
        self._judge_group(group)

    def _abort_sample(self, group: SimulatedGroup, sample: SimulatedSample, *, lose: float = 0.0) -> None:
        if sample.is_running:
            self.engine.stop(self._events.now_s, sample, lose=lose)
            self.slots.in_use -= 1
            if sample.left <= 0:  # it got its last token at this very moment, so nobody generates it again
                group.ended.append(sample)

    def _judge_group(self, group: SimulatedGroup) -> None:
        judged_s, ticket = self._judge_samples(group.needed), group.ticket
        self._events.call_at(judged_s, lambda: self._buffer.exchange(lambda: self._settle_group(group, ticket)))

    def _judge_samples(self, count: int) -> float:
        """Queue `count` samples for the verifiers; returns when they are judged."""
        verifier, now_s = self._timings.verifier, self._events.now_s
        if verifier.sample_s == 0:
            return now_s + verifier.latency_s
        free_s, done_s = self._verifiers_free_s, now_s
        for _ in range(count):
            worker = free_s.index(min(free_s))
            free_s[worker] = max(free_s[worker], now_s) + verifier.sample_s
            done_s = max(done_s, free_s[worker])
        return done_s + verifier.latency_s

    def _settle_group(self, group: SimulatedGroup, ticket: Ticket | None) -> None:
        """End a judged group, unless this server lost the lease with which it was judged."""
        if self.groups.get(group.seq) is not group or group.ticket is not ticket:
            return
        del self.groups[group.seq]
        self._buffer.settle_group(group)
        self._buffer.offer_room(self)

    # Groups that end early

    def drop_expired(self, group: SimulatedGroup) -> None:
        """Stop a group that has lost its lease: the buffer ended it as too old."""
        if self.groups.get(group.seq) is not group:
            return
        self._drop_group(group)
        self._start_samples()
        self._buffer.offer_room(self)

    def _give_all_back(self) -> None:
        """`abort`: store what there is of the groups that may be interrupted again, and give them back. Those that are
        being judged stay: the engine has none of their samples."""
        for group in list(self.groups.values()):
            assert group.ticket is not None
            if group.missing and group.ticket.attempt <= self._settings.max_interruptions:
                self._drop_group(group)
                self._buffer.give_back_group(group)

    def _drop_group(self, group: SimulatedGroup, *, lose: float = 0.0) -> None:
        """Stop a group; its samples keep their tokens, without the last `lose`."""
        del self.groups[group.seq]
        self._free_slots(group, group.committed)
        for sample in group.samples:
            self._abort_sample(group, sample, lose=lose)
        group.prompt_read = False
        if group in self._early:
            self._early.remove(group)

    # Weights

    def receive_weights(self, version: int) -> None:
        """Load a version that has arrived on this machine, unless the engine is pinned or has a newer one."""
        self._newest = max(self._newest, version)
        if self.is_up and not self._pinned and not self._draining and self._newest > self.engine.version:
            self._start_load()

    def _start_load(self) -> None:
        interruption = self._settings.interruption
        if interruption == "drain" and self.slots.in_use:
            self._draining = True
            return
        if interruption == "abort":
            self._give_all_back()
        self._load_newest()

    def _load_newest(self) -> None:
        encode_again = self._settings.interruption == "recompute"
        version, load_s = self._newest, self._timings.sync.load_s
        loaded_s = self.engine.load(self._events.now_s, version, load_s, encode_again=encode_again)
        self._schedule_look()
        self._events.call_at(loaded_s, lambda: self._finish_load(version))

    def _finish_load(self, version: int) -> None:
        if version != self.engine.version or not self.is_up:
            return
        self._start_early_groups()
        self._evaluate_if_due()
        self._buffer.offer_room(self)
        if self._newest > version:
            self.receive_weights(self._newest)

    def _start_early_groups(self) -> None:
        ready = [group for group in self._early if group.ticket and group.ticket.version <= self.engine.version]
        self._early = [group for group in self._early if group not in ready]
        for group in ready:
            self._queue_group(group)

    # Evaluations

    def _evaluate_if_due(self) -> None:
        """Pin the version and generate for held-out prompts, if a milestone was reached and no other server does it."""
        evaluation = self._evaluations.claim_evaluation(self.engine.version)
        if evaluation is not None:
            self._pinned, self._evaluation = True, evaluation
            self._continue_evaluation(evaluation)

    def _continue_evaluation(self, evaluation: SimulatedEvaluation) -> None:
        """Start completions in the places that are free; unpin the version when none is left."""
        now_s, timings = self._events.now_s, self._timings
        for sample in evaluation.next_samples():
            prompt = sample.group
            assert isinstance(prompt, HeldOutPrompt)
            is_read = timings.engine.shared_prompt and prompt.prompt_read
            self.engine.start(now_s, sample, prompt=0.0 if is_read else timings.evaluation_factor)
            prompt.prompt_read = True
            self._evaluated.add(sample)
        if evaluation.is_over:
            evaluation.ended_s = now_s
            self._evaluation = None
            self._unpin_version()
        self._schedule_look()

    def _unpin_version(self) -> None:
        self._pinned = False
        self.receive_weights(self._newest)
        if not self._takes_groups:
            self._start_taking_groups()

    # Faults and adaptive concurrency

    def crash(self) -> None:
        """End the process: what was not stored is lost. Its leases end with its restart, or by themselves."""
        settings, restart_s = self._settings, self._timings.faults.server_restart_s
        leased_s = min(settings.lease_s, restart_s)
        lost_s = float(self._generator.random()) * settings.progress_interval_s
        tokens_per_s = 1 / max(1e-9, self.engine.beside * self._timings.engine.step_s)
        self.is_up, self._pinned, self._draining = False, False, False
        self._buffer.stop_waiting(self)
        for group in list(self.groups.values()):
            self._drop_group(group, lose=lost_s * tokens_per_s)
            self._events.call_later(leased_s, partial(self._buffer.give_back_group, group), recurring=True)
        for sample in self._evaluated:
            self.engine.stop(self._events.now_s, sample)
        self._queue.clear()
        self._evaluation, self._evaluated = None, set()
        self._takes_groups = True
        self._events.call_later(restart_s, self._restart, recurring=True)

    def _restart(self) -> None:
        self.is_up = True
        self._start_load()

    def _adjust_slots(self) -> None:
        """Adapt the number of slots to the engine's load, as the dispatcher does every second."""
        settings, engine = self._settings, self.engine
        engine.advance(self._events.now_s)
        room = self._timings.engine.cache_tokens
        load = EngineLoad(engine.running, 0, 0, kv_use=engine.context_tokens / room if room else 0.0)
        wanted = next_concurrency(self.slots.capacity, self.slots.in_use, load)
        self.slots.resize(min(settings.max_concurrency, max(settings.min_concurrency, wanted)))
        self._start_samples()
        self._buffer.offer_room(self)
        self._events.call_later(ADJUST_INTERVAL_S, self._adjust_slots, recurring=True)


def _engine_timings(timings: Timings, number: int, servers: int) -> EngineTimings:
    """Timings of that server's engine. Those of the last servers may be slower."""
    slower, from_last = timings.slow_servers, servers - 1 - number
    return timings.engine.times(slower[from_last] if from_last < len(slower) else 1.0)

"""A simulated rollout server, which turns tickets into groups as the real dispatcher does.

    buffer --admit--> SimulatedGroup --samples--> SimulatedEngine --> verifiers --> insert | discard --> buffer

A group on its way through a server:

    admitted --> waits for weights of its ticket's version --> queued --> running --> judged --> inserted or discarded
                                                                 ^            |
                                  next attempt, here or elsewhere +--- interrupted, expired, or lost in a crash

Real code decides how many groups to request (`SampleSlots`), how many samples may run (`next_concurrency`), and
everything about the buffer (`BufferState`). New weights are loaded as `rollout.interruption` requires, but not during
an evaluation, which pins the version.
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
    """A server and its engine. It interacts with the other roles only through the buffer and the shared processors."""

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
        self._settings = context.settings
        self._timings = context.timings
        self._events = context.events
        self._generator = context.generator
        self._buffer = buffer
        self._evaluations = evaluations
        self._processors = processors

        self.slots = SampleSlots(self._settings.min_concurrency or self._settings.max_concurrency)
        self.engine = SimulatedEngine(
            _engine_timings(self._timings, number, self._settings.servers), prompt_tokens=self._timings.prompt_tokens
        )
        self.groups: dict[int, SimulatedGroup] = {}
        """Groups that this server has a lease for, by sequence number."""
        self.is_up = True
        self._requests_tickets = False
        """False until the evaluation of the first version, if one is due, has ended."""
        self._queue: deque[SimulatedSample] = deque()
        """Samples that wait for a slot."""
        self._waiting_for_weights: list[SimulatedGroup] = []
        """Groups whose tokens or ticket have a newer version than the engine."""
        self._newest_version = 0
        """Newest version on this machine; the engine may still have an older one."""
        self._is_version_pinned = False
        self._is_draining = False
        """True while `interruption: drain` lets the running samples end before an update."""
        self._evaluation: SimulatedEvaluation | None = None
        self._evaluation_samples: set[SimulatedSample] = set()
        """Running completions of the evaluation."""
        self._engine_check = 0
        """Number of the latest scheduled engine check. Earlier ones do nothing."""
        self._verifiers_free_at_s = [0.0] * self._timings.verifier.workers
        if self._settings.min_concurrency:
            self._events.call_later(ADJUST_INTERVAL_S, self._adjust_slots, background=True)

    def start(self) -> None:
        """Evaluate the first version if it is due, then request tickets."""
        self._start_due_evaluation()
        if not self._is_version_pinned:
            self._start_requesting_tickets()

    # Tickets

    @property
    def priority(self) -> tuple[float, int]:
        """Priority among waiting servers, as in `buffer.fair_share`: the fraction of free slots, then the number."""
        size = self._settings.samples_started_per_group
        free_fraction = self.slots.groups_to_fill_free_slots(size) / self.slots.groups_to_fill_all_slots(size)
        return free_fraction, -self._number

    def request_tickets(self) -> None:
        """Request tickets until the slots are full or the buffer has none."""
        slots = self.slots
        size = self._settings.samples_started_per_group
        self._buffer.stop_waiting(self)

        while self.is_up and self._requests_tickets and slots.has_room:
            tickets = self._buffer.admit_groups(
                self, slots.groups_to_fill_free_slots(size), slots.groups_to_fill_all_slots(size)
            )
            if not tickets:
                return
            for ticket in tickets:
                self._add_group(ticket)
            # Where groups in flight are limited, the buffer chooses the server for each: the emptiest.
            if self._settings.groups_in_flight is not None:
                return

    def _start_requesting_tickets(self) -> None:
        self._requests_tickets = True
        self._buffer.offer_tickets(self)

    def _add_group(self, ticket: Ticket) -> None:
        group = self._buffer.groups.get_or_create(ticket.seq)
        group.ticket = ticket
        group.admitted_s = self._events.now_s
        self.groups[ticket.seq] = group
        group.reserved_slots = len(group.unfinished_samples)
        self.slots.reserve_samples(group.reserved_slots)

        if self.engine.version < _find_required_version(group):
            self._waiting_for_weights.append(group)
        else:
            call_s = self._timings.engine.call_s
            self._buffer.schedule_exchange(lambda: self._events.call_later(call_s, lambda: self._queue_group(group)))

    def _release_slots(self, group: SimulatedGroup, samples: int) -> None:
        group.reserved_slots -= samples
        self.slots.release_samples(samples)

    # Samples

    def set_slowdown(self, factor: float) -> None:
        """Generate `factor` times slower than alone from now on."""
        self.engine.set_slowdown(self._events.now_s, factor)
        self._schedule_engine_check()

    def _queue_group(self, group: SimulatedGroup) -> None:
        if self.groups.get(group.seq) is not group:
            return  # expired, or given back, since it was admitted
        if group.unfinished_samples:
            self._queue.extend(group.unfinished_samples)
            self._start_samples()
        else:
            # An earlier attempt generated everything but failed before the group was judged.
            self._judge_group(group)

    def _start_samples(self) -> None:
        """Start queued samples while slots are free."""
        now_s = self._events.now_s
        slots = self.slots
        shares_prompts = self._timings.engine.shared_prompt

        while self._queue and slots.in_use < slots.capacity and not self._is_draining:
            sample = self._queue.popleft()
            group = sample.group
            assert isinstance(group, SimulatedGroup)
            if self.groups.get(group.seq) is not group:
                continue  # the group has left this server since the sample was queued
            is_cached = shares_prompts and group.is_prompt_read
            self.engine.start_sample(now_s, sample, prompt=0.0 if is_cached else 1.0)
            group.is_prompt_read = True
            slots.in_use += 1
        self._schedule_engine_check()

    def _schedule_engine_check(self) -> None:
        """Check the engine when its next sample ends.

        Anything that changes the engine's speed or its samples must call this: a check that was scheduled before is
        at the wrong time, so it lapses.
        """
        self._engine_check += 1
        check = self._engine_check
        end_s = self.engine.next_end_s()
        if end_s < math.inf:
            self._events.call_at(end_s, lambda: self._handle_finished_samples(check))

    def _handle_finished_samples(self, check: int) -> None:
        if check != self._engine_check:
            return

        for sample in self.engine.collect_finished(self._events.now_s):
            if isinstance(sample.group, SimulatedGroup):
                self._finish_sample(sample.group, sample)
            elif self._evaluation is not None:
                self._evaluations.generated_tokens += sample.generated_tokens
                self._evaluation_samples.remove(sample)
                self._evaluation.running -= 1

        if self._evaluation is not None:
            self._continue_evaluation(self._evaluation)
        self._end_drain_if_idle()
        self._start_samples()
        if self._settings.groups_in_flight is None:
            self.request_tickets()
        self._processors.update_trainer_speed()

    def _finish_sample(self, group: SimulatedGroup, sample: SimulatedSample) -> None:
        group.finished.append(sample)
        self.slots.in_use -= 1
        if len(group.finished) < group.needed:
            if not self._settings.holds_slots_per_group:
                self._release_slots(group, 1)
            return

        # The group is complete. With over-sampling, others are still running and no longer needed.
        for extra in group.samples:
            self._abort_sample(group, extra)
        self._release_slots(group, group.reserved_slots)
        self._judge_group(group)

    def _abort_sample(self, group: SimulatedGroup, sample: SimulatedSample, *, lost_tokens: float = 0.0) -> None:
        if not sample.is_running:
            return
        self.engine.stop_sample(self._events.now_s, sample, lost_tokens=lost_tokens)
        self.slots.in_use -= 1
        # It may have got its last token at this very moment. Then no later attempt would generate it, and the group
        # would never be complete.
        if sample.remaining <= 0:
            group.finished.append(sample)

    def _judge_group(self, group: SimulatedGroup) -> None:
        judged_s = self._queue_for_verifiers(group.needed)
        ticket = group.ticket
        self._events.call_at(
            judged_s, lambda: self._buffer.schedule_exchange(lambda: self._end_judged_group(group, ticket))
        )

    def _queue_for_verifiers(self, samples: int) -> float:
        """Assign samples to the verifiers that are free first; returns the time at which all are judged."""
        verifier = self._timings.verifier
        now_s = self._events.now_s
        if verifier.sample_s == 0:
            return now_s + verifier.latency_s

        free_at_s = self._verifiers_free_at_s
        judged_s = now_s
        for _ in range(samples):
            worker = free_at_s.index(min(free_at_s))
            free_at_s[worker] = max(free_at_s[worker], now_s) + verifier.sample_s
            judged_s = max(judged_s, free_at_s[worker])
        return judged_s + verifier.latency_s

    def _end_judged_group(self, group: SimulatedGroup, ticket: Ticket | None) -> None:
        # The lease may have been lost while the group was judged. If this server was admitted to it again since, the
        # new attempt has another ticket and ends on its own.
        if self.groups.get(group.seq) is not group or group.ticket is not ticket:
            return
        del self.groups[group.seq]
        self._buffer.end_group(group)
        self._buffer.offer_tickets(self)

    # Groups that leave before they are complete

    def abandon_expired_group(self, group: SimulatedGroup) -> None:
        """Stop generating a group that the buffer has ended as too old."""
        if self.groups.get(group.seq) is not group:
            return
        self._remove_group(group)
        # These may have been the last running samples. No other sample would then end the drain.
        self._end_drain_if_idle()
        self._start_samples()
        self._buffer.offer_tickets(self)

    def _give_back_groups(self) -> None:
        """interruption: abort. Give back the unfinished groups that may be interrupted again, with their tokens.

        Groups that are being judged stay: the engine has none of their samples.
        """
        for group in list(self.groups.values()):
            assert group.ticket is not None
            if group.unfinished_samples and group.ticket.attempt <= self._settings.max_interruptions:
                self._remove_group(group)
                self._buffer.give_back_group(group)

    def _remove_group(self, group: SimulatedGroup, *, lost_tokens: float = 0.0) -> None:
        """Remove a group. Its samples keep their tokens, except the last `lost_tokens` of each."""
        del self.groups[group.seq]
        self._release_slots(group, group.reserved_slots)
        for sample in group.samples:
            self._abort_sample(group, sample, lost_tokens=lost_tokens)
        group.is_prompt_read = False  # the next attempt may run on another server
        if group in self._waiting_for_weights:
            self._waiting_for_weights.remove(group)

    # Weights

    def receive_weights(self, version: int) -> None:
        """Load a version that has arrived on this machine.

        While the version is pinned, the engine drains or the server restarts, the version is only noted and loaded
        afterwards.
        """
        self._newest_version = max(self._newest_version, version)
        is_ready = self.is_up and not self._is_version_pinned and not self._is_draining
        if is_ready and self._newest_version > self.engine.version:
            self._start_update()

    def _start_update(self) -> None:
        interruption = self._settings.interruption
        if interruption == "drain" and self.slots.in_use:
            self._is_draining = True
            return
        if interruption == "abort":
            self._give_back_groups()
        self._load_newest_version()

    def _end_drain_if_idle(self) -> None:
        if self._is_draining and self.slots.in_use == 0:
            self._is_draining = False
            self._load_newest_version()

    def _load_newest_version(self) -> None:
        version = self._newest_version
        loaded_s = self.engine.load_weights(
            self._events.now_s,
            version,
            self._timings.sync.load_s,
            encode_again=self._settings.interruption == "recompute",
        )
        self._schedule_engine_check()
        self._events.call_at(loaded_s, lambda: self._finish_update(version))

    def _finish_update(self, version: int) -> None:
        if version != self.engine.version or not self.is_up:
            return  # a newer version is being loaded, or the server failed meanwhile
        self._queue_waiting_groups()
        self._start_due_evaluation()
        self._buffer.offer_tickets(self)
        if self._newest_version > version:
            self.receive_weights(self._newest_version)

    def _queue_waiting_groups(self) -> None:
        ready: list[SimulatedGroup] = []
        waiting: list[SimulatedGroup] = []
        for group in self._waiting_for_weights:
            if _find_required_version(group) <= self.engine.version:
                ready.append(group)
            else:
                waiting.append(group)

        self._waiting_for_weights = waiting
        for group in ready:
            self._queue_group(group)

    # Evaluations

    def _start_due_evaluation(self) -> None:
        """Pin the version and start an evaluation if a milestone was reached and no other server has claimed it."""
        evaluation = self._evaluations.claim_evaluation(self.engine.version)
        if evaluation is not None:
            self._is_version_pinned = True
            self._evaluation = evaluation
            self._continue_evaluation(evaluation)

    def _continue_evaluation(self, evaluation: SimulatedEvaluation) -> None:
        """Start the completions for which there is room; unpin the version when all have ended."""
        now_s = self._events.now_s
        timings = self._timings
        for sample in evaluation.take_startable():
            prompt = sample.group
            assert isinstance(prompt, HeldOutPrompt)
            is_cached = timings.engine.shared_prompt and prompt.is_prompt_read
            self.engine.start_sample(now_s, sample, prompt=0.0 if is_cached else timings.evaluation_factor)
            prompt.is_prompt_read = True
            self._evaluation_samples.add(sample)

        if evaluation.is_over:
            evaluation.ended_s = now_s
            self._evaluation = None
            self._unpin_version()
        self._schedule_engine_check()

    def _unpin_version(self) -> None:
        self._is_version_pinned = False
        self.receive_weights(self._newest_version)
        if not self._requests_tickets:
            self._start_requesting_tickets()

    # Faults and adaptive concurrency

    def crash(self) -> None:
        """Fail: tokens since the last stored partials are lost. The leases end at the restart, or when they expire."""
        settings = self._settings
        restart_s = self._timings.faults.server_restart_s
        leased_s = min(settings.lease_s, restart_s)
        since_progress_s = float(self._generator.random()) * settings.progress_interval_s
        tokens_per_s = 1 / max(1e-9, self.engine.slowdown * self._timings.engine.step_s)

        self.is_up = False
        self._is_version_pinned = False
        self._is_draining = False
        self._buffer.stop_waiting(self)
        for group in list(self.groups.values()):
            self._remove_group(group, lost_tokens=since_progress_s * tokens_per_s)
            self._events.call_later(leased_s, partial(self._buffer.give_back_group, group), background=True)

        for sample in self._evaluation_samples:
            self.engine.stop_sample(self._events.now_s, sample)
        self._queue.clear()
        self._evaluation = None
        self._evaluation_samples = set()
        self._requests_tickets = True
        self._events.call_later(restart_s, self._restart, background=True)

    def _restart(self) -> None:
        self.is_up = True
        self._start_update()

    def _adjust_slots(self) -> None:
        """Adapt the number of slots to the engine's load, as the dispatcher does every second."""
        settings = self._settings
        engine = self.engine
        engine.advance_to(self._events.now_s)
        cache_tokens = self._timings.engine.cache_tokens
        kv_use = engine.context_tokens / cache_tokens if cache_tokens else 0.0
        load = EngineLoad(engine.running, 0, 0, kv_use=kv_use)

        wanted = next_concurrency(self.slots.capacity, self.slots.in_use, load)
        self.slots.resize(min(settings.max_concurrency, max(settings.min_concurrency, wanted)))
        self._start_samples()
        self._buffer.offer_tickets(self)
        self._events.call_later(ADJUST_INTERVAL_S, self._adjust_slots, background=True)


def _find_required_version(group: SimulatedGroup) -> int:
    """Return the oldest version that may continue the group.

    A group that another server has begun may contain tokens of a newer version than its ticket. An older engine must
    not continue it, because versions within a sample never decrease.
    """
    assert group.ticket is not None
    versions = [group.ticket.version]
    for sample in group.samples:
        versions.extend(sample.tokens_by_version)
    return max(versions)


def _engine_timings(timings: Timings, number: int, servers: int) -> EngineTimings:
    """Timings of the engine of server `number`. The last servers may be slower."""
    from_last = servers - 1 - number
    if from_last < len(timings.slow_servers):
        return timings.engine.slowed_by(timings.slow_servers[from_last])
    return timings.engine

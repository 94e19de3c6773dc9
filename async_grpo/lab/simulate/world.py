"""A simulated run: servers, trainer and the replay buffer of this project on a simulated clock.

    SimulatedServer x N --admit, insert--> BufferState <--take, release-- SimulatedTrainer
            ^                                                                  |
            +----------------------- weights, after a transfer ----------------+

The buffer's decisions are those of `buffer.state.BufferState`, the state of `InMemoryBuffer` and the reference of the
Lua scripts: what is admitted, which groups make a batch, what is too old, what a trainer that comes back gets again.
Only the waiting is of this file: after every change of the buffer, whoever waits asks again.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from async_grpo.auto_staleness import StalenessDecision
from async_grpo.errors import ConfigError, LeaseLost, RunEnded
from async_grpo.lab.simulate.engine import SimulatedSample
from async_grpo.lab.simulate.events import Action, EventQueue
from async_grpo.lab.simulate.server import HeldOutPrompt, SimulatedEvaluation, SimulatedGroup, SimulatedServer
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.simulate.trainer import SimulatedStep, SimulatedTrainer
from async_grpo.staleness import WALKING
from async_grpo.telemetry.idle import Span
from async_grpo.wire import Batch, ReleaseReason, Task, Ticket
from buffer.state import BufferState
from rollout_server.evaluation.milestones import milestone_of

DRAWN_AT_ONCE = 512
TASKS_AHEAD = 2


@dataclass(slots=True)
class SimulatedRun:
    """What came out of a simulation."""

    settings: SimulatedSettings
    steps: list[SimulatedStep]
    released: dict[str, int]
    admitted: int
    generated_tokens: float
    """For training."""
    inserted: int
    ended_s: float
    decisions: list[tuple[int, StalenessDecision]]
    """max_staleness: auto. Versions at which another S came into force, and why."""
    evaluations: list[Span] = field(default_factory=list)
    """Start and end of every evaluation that ended."""
    exchange_s: float = 0.0
    """Mean seconds of an exchange with the buffer, its turn included; 0 if they cost nothing."""


class World:
    """Everything of a simulated run. `simulate` makes one and runs it."""

    def __init__(self, settings: SimulatedSettings, timings: Timings, seed: int) -> None:
        self.settings = settings
        self.timings = timings
        self.events = EventQueue()
        self.buffer = BufferState(settings.policy, math.inf, settings.max_attempts)
        self.groups: dict[int, SimulatedGroup] = {}
        self.before_queue: dict[int, int] = {}
        self._generator = np.random.default_rng(seed)
        self._lengths = timings.lengths
        self._drawn: list[list[float]] = []
        self._drawn_so_far = 0
        self._counted_busy_s = 0.0
        self._engines_work = False
        self._claimed = -1
        self.evaluation_tokens = 0.0
        self.evaluations: list[SimulatedEvaluation] = []
        self._expired = self._stale = 0
        self.decisions: list[tuple[int, StalenessDecision]] = []
        """max_staleness: auto. Versions at which another S came into force, and why."""
        self._without_ticket: set[int] = set()
        """Numbers of the servers that have room and wait for a ticket."""
        self._blocker: tuple[int, int] | None = None
        """fifo: a version, and a group without which it cannot have its batch."""
        self._exchange_s = self._exchange_time()
        self._buffer_free_s = 0.0
        self.exchanges_s: list[float] = []
        """Seconds that each exchange with the buffer took, its turn included."""
        self.servers = [SimulatedServer(self, number) for number in range(settings.servers)]
        self.trainer = SimulatedTrainer(self)

    def run(self) -> SimulatedRun:
        """Simulate to the last step. Raises ConfigError if the run would stall."""
        self._plan_faults()
        if self.timings.task_s:
            self._read_tasks(1)
        self.trainer.start()
        for server in self.servers:
            server.first()
        if not self.events.run(lambda: self.trainer.is_over):
            raise ConfigError(
                f"the simulated run stalls at version {self.trainer.version}, after {self.events.now_s:.0f} s: nothing "
                "is left that could happen. This combination of selector, admission and faults would stall for real"
            )
        return SimulatedRun(
            self.settings,
            self.trainer.steps,
            dict(self.buffer.released),
            self.buffer.admitted,
            sum(server.engine.generated for server in self.servers) - self.evaluation_tokens,
            self.buffer.inserted,
            self.events.now_s,
            self.decisions,
            [(each.began_s, each.ended_s) for each in self.evaluations if each.ended_s is not None],
            sum(self.exchanges_s) / max(1, len(self.exchanges_s)),
        )

    def random(self) -> float:
        """A number in [0, 1)."""
        return float(self._generator.random())

    def noise(self, variation: float) -> float:
        """A positive factor with mean 1 and that standard deviation."""
        if variation == 0:
            return 1.0
        shape = 1 / variation**2
        return float(self._generator.gamma(shape, 1 / shape))

    # For servers

    def wait_for_ticket(self, number: int) -> None:
        """A server has room, and the buffer has no ticket for it."""
        self._without_ticket.add(number)

    def waits_no_more(self, number: int) -> None:
        """A server asks again, or has died."""
        self._without_ticket.discard(number)
        self.buffer.waiting_servers.pop(self.servers[number].name, None)

    def exchange(self, action: Action) -> None:
        """Do it once the buffer's server has worked on it, which does one thing after another."""
        if self._exchange_s == 0:
            action()
            return
        now_s = self.events.now_s
        self._buffer_free_s = max(now_s, self._buffer_free_s) + self._exchange_s
        self.exchanges_s.append(self._buffer_free_s - now_s)
        self.events.at(self._buffer_free_s, action)

    def admit(self, limit: int, holder: str, slots: int) -> list[Ticket]:
        """Tickets for at most so many groups; none if there is no room, or only room for other servers."""
        buffer, most, kept_since = self.buffer, self.settings.groups_in_flight, 0
        if most is not None:
            kept_since = buffer.asks  # here the emptiest server asks, and the buffer keeps nothing for others
            limit = min(1, most - sum(len(server.groups) for server in self.servers))
            if limit <= 0:
                return []
        if not self.timings.task_s and len(buffer.tasks) <= limit:
            self._read_tasks(limit)
        try:
            return buffer.admit(limit, holder, self.events.now_s, slots=slots, kept_since=kept_since)
        except RunEnded:
            return []

    def _read_tasks(self, least: int) -> None:
        """The source gives tasks without text, of which so many are missing; a slow one gives the next later."""
        first, ahead = self.buffer.tasks_put, TASKS_AHEAD * self.settings.policy.window.capacity
        count = min(1, ahead - len(self.buffer.tasks)) if self.timings.task_s else max(least, ahead)
        tasks = [Task(index=first + place, prompt="", prompt_tokens=b"", answer="") for place in range(count)]
        self.buffer.put_tasks(tasks)
        if self.timings.task_s:
            self.let_all_ask()
            self.events.after(self.timings.task_s, lambda: self._read_tasks(1))

    def group_of(self, ticket: Ticket) -> SimulatedGroup:
        """The group of a ticket: new, or as an earlier attempt left it."""
        found = self.groups.get(ticket.seq)
        if found is None:
            if not self._drawn:
                size = self.settings.started_samples
                first, self._drawn_so_far = self._drawn_so_far, self._drawn_so_far + DRAWN_AT_ONCE
                drawn = self._lengths.groups(self._generator, DRAWN_AT_ONCE, size, first=first)
                self._drawn = drawn[::-1].tolist()
            found = SimulatedGroup(ticket.seq, [], self.settings.group_size)
            found.samples = [SimulatedSample(found, length) for length in self._drawn.pop()]
            self.groups[ticket.seq] = found
        return found

    def settle(self, group: SimulatedGroup) -> None:
        """A group is judged: insert or discard it."""
        assert group.ticket is not None
        filtered = self.timings.verifier.filtered
        try:
            if filtered and self.random() < filtered:
                self.buffer.discard(group.ticket, ReleaseReason.FILTERED)
                del self.groups[group.seq]
            else:
                self.buffer.insert(group.ticket, group.record())
                self.before_queue[group.seq] = self.buffer.version - group.ticket.version
        except LeaseLost:
            self._forget(group)
        self._changed()

    def let_ask(self, server: SimulatedServer) -> None:
        """A server has room for a group; where groups in flight are limited, another may have more."""
        if self.settings.groups_in_flight is None:
            server.ask()
        else:
            self.let_all_ask()

    def give_back(self, group: SimulatedGroup) -> None:
        """A server lets go of a group; another goes on with it."""
        assert group.ticket is not None
        self.buffer.give_back(group.ticket)
        self._changed()

    def claim_evaluation(self, version: int) -> SimulatedEvaluation | None:
        """The evaluation that this version is due for; None if there is none or another server has claimed it."""
        settings = self.settings
        milestone = milestone_of(version, every_steps=settings.eval_every, final=settings.steps)
        if milestone <= self._claimed or settings.eval_prompts == 0 or not (version == 0 or milestone > 0):
            return None
        self._claimed = milestone
        rounds = [settings.eval_samples] + [1] * settings.eval_greedy
        evaluation = SimulatedEvaluation(
            began_s=self.events.now_s,
            room=settings.max_concurrency,
            rounds=deque(self._draw_round(completions) for completions in rounds),
        )
        self.evaluations.append(evaluation)
        return evaluation

    def _draw_round(self, completions: int) -> deque[SimulatedSample]:
        """So many completions of every held-out prompt, in the order in which they start."""
        slower = self.timings.evaluation_factor
        samples: deque[SimulatedSample] = deque()
        drawn = self._lengths.groups(self._generator, 1, self.settings.eval_prompts * completions)[0]
        for first in range(0, len(drawn), completions):
            prompt = HeldOutPrompt()
            samples.extend(SimulatedSample(prompt, slower * length) for length in drawn[first : first + completions])
        return samples

    def note_busy(self) -> None:
        """Samples began or ended: the trainer is slower while an engine of its machine works."""
        if self.timings.trainer_beside > 1:
            works = any(server.engine.running for server in self.servers)
            if works != self._engines_work:
                self._engines_work = works
                self.trainer.slow_down(self.timings.trainer_beside if works else 1.0)

    # For the trainer

    @property
    def ready(self) -> int:
        """Groups that are READY."""
        return self.buffer.ready_count

    @property
    def running(self) -> int:
        """Samples that run now, over all servers."""
        return sum(server.engine.running for server in self.servers)

    def take(self, epoch: int, version: int, *, have: int, whole: bool) -> Batch | None:
        """What the buffer gives for the step `version`; then servers let go of what it found too old."""
        if self._is_blocked(version):
            return None
        batch = self.buffer.take(epoch, version, self.events.now_s, have=have, whole=whole)
        if batch is None and whole and self.settings.policy.selector == "fifo":
            self._blocker = self._find_blocker(version)
        expired = self.buffer.released[ReleaseReason.EXPIRED]
        if expired != self._expired:
            self._expired = expired
            if not self.settings.finishes_stale:
                self.events.after(self.settings.lease_s / 6, self._forget_expired)  # heartbeats: every lease_s / 3
        if self.settings.recycles and self.buffer.released[ReleaseReason.STALE] != self._stale:
            self._stale = self.buffer.released[ReleaseReason.STALE]
            self._recycle()
        if batch is not None or self.settings.policy.selector not in WALKING:
            self.let_all_ask()
        return batch

    def publish(self, epoch: int, version: int) -> None:
        """Let new tickets carry `version`, and send it to the servers."""
        self.buffer.publish_version(epoch, version)
        self.events.after(self.timings.sync.transfer_s, lambda: self._weights_came(version))

    def release(self, batch: Batch) -> None:
        """A batch is trained: its groups end, or go back until their last use."""
        self.buffer.release(batch)
        if self.settings.policy.max_uses == 1 and self.settings.checkpoint_steps == 0:
            for group in batch.groups:
                self.groups.pop(group.seq, None)
        elif len(self.groups) > 4 * self.settings.policy.window.capacity:
            self._forget_ended()
        self.let_all_ask()

    def trainer_changed(self) -> None:
        """The trainer began or ended computing: engines beside it are slower or faster."""
        if self.timings.engine_beside > 1:
            beside = self.timings.engine_beside if self.trainer.computing else 1.0
            for server in self.servers:
                server.engine.slow_down(self.events.now_s, beside)
                server.reschedule()

    def busy_since_last(self) -> float:
        """Seconds in which engines generated since this was asked last, mean over the servers."""
        for server in self.servers:
            server.engine.advance(self.events.now_s)
        total = sum(server.engine.busy_s for server in self.servers) / len(self.servers)
        since, self._counted_busy_s = total - self._counted_busy_s, total
        return since

    # Within

    def _is_blocked(self, version: int) -> bool:
        """Whether the group that kept this version from its batch is still not ready: the buffer need not be asked."""
        if self._blocker is None or self._blocker[0] != version:
            return False
        slot = self.buffer.open.get(self._blocker[1])
        return slot is not None and slot.group is None

    def _find_blocker(self, version: int) -> tuple[int, int] | None:
        """fifo takes the P oldest groups; of those that are not ready, the one with the most tokens to come."""
        oldest = heapq.nsmallest(self.settings.groups_per_step, self.buffer.open)
        unready = [seq for seq in oldest if self.buffer.open[seq].group is None and seq in self.groups]
        left = {seq: max((sample.left for sample in self.groups[seq].samples), default=0.0) for seq in unready}
        return (version, max(unready, key=left.__getitem__)) if unready else None

    def _exchange_time(self) -> float:
        """Seconds of one exchange, beside the repeated calls of all servers. Raises ConfigError if these are more than
        the buffer's server can do."""
        cost, servers = self.timings.buffer, self.settings.servers
        left = 1 - servers * cost.server_share
        if left <= 0:
            raise ConfigError(
                f"the heartbeats of {servers} servers alone need {1 - left:.2f} cores of the server that holds the "
                f"buffer (buffer.server_share {cost.server_share:g} each), which has one. Use fewer and larger servers"
            )
        return cost.exchange_s / left

    def _changed(self) -> None:
        self.trainer.poll()
        self.let_all_ask()

    def let_all_ask(self) -> None:
        """There is more to admit: servers that wait may have it."""
        if self.settings.groups_in_flight is None:
            self._ask_the_neediest()
        else:
            self._ask_the_emptiest()

    def _ask_the_neediest(self) -> None:
        """Let the waiting server whose share comes first ask, until nothing more is given."""
        while self._without_ticket:
            server = max((self.servers[number] for number in self._without_ticket), key=lambda each: each.need)
            had = len(server.groups)
            server.ask()
            if len(server.groups) == had:
                return

    def _ask_the_emptiest(self) -> None:
        """Let the server with the fewest groups ask, until nothing more is given."""
        while True:
            server = min(self.servers, key=lambda server: len(server.groups))
            had = len(server.groups)
            server.ask()
            if len(server.groups) == had:
                return

    def _weights_came(self, version: int) -> None:
        for server in self.servers:
            server.weights_came(version)

    def _forget_expired(self) -> None:
        for server in self.servers:
            for group in [group for seq, group in server.groups.items() if seq not in self.buffer.open]:
                server.forget(group)

    def _forget_ended(self) -> None:
        """Forget groups that no batch can contain any more."""
        for seq in self._ended():
            del self.groups[seq]

    def _ended(self) -> list[int]:
        """The groups that are known here and that no batch can contain any more."""
        known = self.buffer
        kept = {seq for step in known.steps.values() for seq in step.groups}
        return [seq for seq in self.groups if seq not in known.open and seq not in known.taken and seq not in kept]

    def _recycle(self) -> None:
        """Generate the groups again that were too old, with completions of the same lengths. Those that a server still
        makes come once they have ended."""
        for group in [self.groups[seq] for seq in self._ended()]:
            if not group.missing:
                self._forget(group)

    def _forget(self, group: SimulatedGroup) -> None:
        """Forget a group that ended untrained; one that was too old may have been forgotten while a server made it."""
        known = self.groups.pop(group.seq, None)
        if self.settings.recycles and known is not None:
            self._drawn.append([sample.done for sample in group.samples])

    def _plan_faults(self) -> None:
        faults = self.timings.faults
        if faults.server_every_s:
            for server in self.servers:
                self._plan_death(faults.server_every_s, server)
        if faults.trainer_every_s:
            self._plan_death(faults.trainer_every_s, self.trainer)

    def _plan_death(self, every_s: float, role: SimulatedServer | SimulatedTrainer) -> None:
        def die() -> None:
            role.die()
            self._plan_death(every_s, role)

        self.events.after(float(self._generator.exponential(every_s)), die)


def simulate(settings: SimulatedSettings, timings: Timings, *, seed: int = 1) -> SimulatedRun:
    """Simulate a run. The same arguments give the same run. Raises ConfigError if it would stall."""
    return World(settings, timings, seed).run()

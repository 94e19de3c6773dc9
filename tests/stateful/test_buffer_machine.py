"""Whatever happens in whatever order, both implementations do the same and keep the guarantees.

The machine plays rollout servers that finish, wait, die, come back late and repeat themselves, a trainer that
dies and resumes, its predecessor that does not know it yet, and somebody who retunes the run. Every move
is made on `InMemoryBuffer` and on `RedisBuffer`; replies, errors and counters must be equal. Time passes
only when the machine says so. In the end healthy servers and a healthy trainer must be able to finish
the run from wherever it is.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import AsyncGrpoError, BufferFault, Fenced
from async_grpo.staleness import SELECTORS, RateLimit, ReplayPolicy, age
from async_grpo.wire import Batch, Group, ReleaseReason, Ticket
from buffer import InMemoryBuffer, ReplayBuffer, connect, make_client, wipe
from buffer.capacity import MemoryQuota
from buffer.holders import holder_name
from buffer.redis.scripts import RunKeys
from tests.support.buffer_cases import group_of, partial_of, policy, tasks

LEASE_S = 1000.0
STEPS = 6
GROUP_BYTES = 1000
"""More than any group of this machine takes."""
POLICIES = [
    policy(S=1, P=2, steps=STEPS),
    policy(S=0, P=1, steps=2 * STEPS),
    policy(S=1, P=3, steps=4),
    policy(S=2, P=1, steps=2 * STEPS, on_stale="wait"),
    policy(S=1, P=2, steps=STEPS, selector="windowed_fifo", selector_window=3),
    policy(S=1, P=2, steps=STEPS, selector="windowed_fifo", selector_window=4, on_stale="wait"),
    *(policy(S=2, P=2, steps=STEPS, selector=selector) for selector in SELECTORS),
    policy(S=1, P=2, steps=STEPS, selector="freshest", on_stale="mask"),
    policy(S=2, P=2, steps=STEPS, selector="uniform", seed=5),
    policy(S=2, P=2, steps=STEPS, selector="uniform", max_uses=3, rate=RateLimit(min_size=4)),
    policy(S=1, P=2, steps=STEPS, max_uses=2, on_stale="wait"),
    policy(S=2, P=2, steps=STEPS, rate=RateLimit.from_ratio(1.0, min_size=2, error_buffer=3.0)),
    policy(
        S=2,
        P=2,
        steps=STEPS,
        selector="uniform",
        max_uses=2,
        rate=RateLimit.from_ratio(1.5, min_size=2, error_buffer=2.5),
    ),
    policy(S=1, P=2, steps=STEPS, rate=RateLimit.from_ratio(0.5, min_size=2, error_buffer=2.0)),
]
SERVERS = ["server-0", "server-1", "server-2"]
REASONS = st.sampled_from([ReleaseReason.FILTERED, ReleaseReason.UNVERIFIABLE, ReleaseReason.FAILED])
Move = Callable[[ReplayBuffer], Awaitable[Any]]


class BufferMachine(RuleBasedStateMachine):
    """Two buffers, side by side."""

    config: RedisConfig

    @initialize(first=st.sampled_from(POLICIES), room=st.sampled_from([12, 1000]))
    def begin(self, first: ReplayPolicy, room: int) -> None:
        """`room`: groups for which the quota is large enough."""
        self.loop = asyncio.new_event_loop()
        self.run = uuid.uuid4().hex
        self.now_s = 1000.0
        self.policy = first
        self.policies = [first]
        self.most_active = first.window.capacity
        self.client = make_client(self.config)
        options: dict[str, Any] = {"lease_s": LEASE_S, "max_attempts": 2}
        options["quota"] = MemoryQuota(0, room_bytes=room * GROUP_BYTES, group_bytes=GROUP_BYTES)
        self.memory = InMemoryBuffer(first, clock=lambda: self.now_s, **options)
        self.redis = self.do(connect(self.config, self.run, policy=first, **options))
        self.tickets: list[Ticket] = []
        self.lives = dict.fromkeys(SERVERS, 1)
        self.taken: dict[int, Batch] = {}
        """Whole batches, by version."""
        self.delivered: dict[int, list[Group]] = {}
        """What any trainer was given for each version, in order."""
        self.have: list[Group] = []
        """What this trainer has of the step, if it takes it in parts."""
        self.settled: set[int] = set()
        self.uses: Counter[int] = Counter()
        self.epoch = 1
        self.version = 0
        self.head = 0
        self.committed = 0
        self.both(lambda buffer: buffer.rollback(0))
        self.both(lambda buffer: buffer.put_tasks(tasks(0, 3)))

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.the_run_can_be_finished()
        finally:
            self.do(wipe(self.client, self.run))
            self.do(self.redis.aclose())
            self.do(self.client.aclose())
            self.loop.close()

    def do(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def both(self, move: Move) -> Any:
        """The outcome of a move: a reply, or the class of the error; the same on both sides."""
        outcomes = [self.do(self.outcome(move(buffer))) for buffer in (self.memory, self.redis)]
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    async def outcome(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except AsyncGrpoError as error:
            return type(error)

    @rule(count=st.integers(1, 6), back=st.integers(0, 3))
    def put_tasks(self, count: int, back: int) -> None:
        first = max(0, self.do(self.memory.stats()).tasks_put - back)
        self.both(lambda buffer: buffer.put_tasks(tasks(first, count)))

    @rule(limit=st.integers(1, 4), busy=st.integers(0, 3), server=st.sampled_from(SERVERS))
    def admit(self, limit: int, server: str, busy: int = 0) -> None:
        """A server that gets nothing waits from then on, and its share is kept for it."""
        holder = holder_name(server, self.lives[server])
        tickets = self.both(lambda buffer: buffer.admit_groups(limit, holder=holder, timeout_s=0, slots=limit + busy))
        self.tickets += tickets if isinstance(tickets, list) else []

    @rule(server=st.sampled_from(SERVERS), late=st.booleans())
    def a_server_dies(self, server: str, late: bool) -> None:
        """Perhaps the call comes only once the next life has leases."""
        life = self.lives[server]
        self.lives[server] += 1
        if late:
            self.admit(2, server)
        before = self.held()
        self.both(lambda buffer: buffer.expire_leases(server, life=life))
        assert self.held() == before  # until somebody takes them over

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), ago=st.integers(0, 2), ahead=st.integers(0, 2))
    def insert(self, data: st.DataObject, ago: int, ahead: int) -> None:
        """Finish a group, or repeat that, or come too late. Perhaps with older tokens than promised, which every
        policy but `wait` makes up for."""
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        promised = any(policy.on_stale == "wait" for policy in self.policies)
        oldest = max(0, ticket.version - (0 if promised else ago))
        group = group_of(ticket, version=oldest, newest=min(self.head, oldest + ahead), length=2 * ago + 2)
        self.both(lambda buffer: buffer.insert_group(ticket, group))

    @rule(slow=st.booleans())
    def work_off_the_window(self, slow: bool = False) -> None:
        """What healthy servers do: fill the window and finish everything; perhaps all but one group."""
        self.put_tasks(6, 1)
        self.admit(4, "server-0")
        unfinished = [ticket for ticket in self.tickets[-6:] if ticket.seq in self.held()]
        for ticket in unfinished[slow:]:
            self.both(lambda buffer, ticket=ticket: buffer.insert_group(ticket, group_of(ticket)))  # type: ignore[misc]

    def held(self) -> set[int]:
        lost = self.both(lambda buffer: buffer.renew_leases(self.tickets))
        return {ticket.seq for ticket in self.tickets} - set(lost)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), reason=REASONS)
    def discard(self, data: st.DataObject, reason: ReleaseReason) -> None:
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        self.both(lambda buffer: buffer.discard_group(ticket, reason))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), length=st.integers(1, 4))
    def progress(self, data: st.DataObject, length: int) -> None:
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        self.both(lambda buffer: buffer.save_partial(ticket, partial_of(ticket, length)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), count_as_expired=st.booleans())
    def give_back(self, data: st.DataObject, count_as_expired: bool) -> None:
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        self.both(lambda buffer: buffer.give_back(ticket, count_as_expired=count_as_expired))

    @precondition(lambda self: self.tickets)
    @rule()
    def heartbeat(self) -> None:
        self.both(lambda buffer: buffer.renew_leases(self.tickets))

    @rule()
    def all_leases_expire(self) -> None:
        self.now_s += 2 * LEASE_S
        leases = RunKeys(self.run).key("leases")
        for seq, deadline in self.do(self.client.zrange(leases, 0, -1, withscores=True)):
            self.do(self.client.zadd(leases, {seq: min(deadline, 1)}))

    @rule()
    def take(self) -> None:
        batch = self.both(lambda buffer: buffer.take_batch(epoch=self.epoch, version=self.version, timeout_s=0))
        if isinstance(batch, Batch):
            self.check(batch)
            self.have = batch.groups
            self.taken[self.version] = batch

    @precondition(lambda self: self.version not in self.taken or self.taken[self.version].epoch != self.epoch)
    @rule()
    def take_part(self) -> None:
        have = len(self.have)
        batch = self.both(
            lambda buffer: buffer.take_batch_part(epoch=self.epoch, version=self.version, have=have, timeout_s=0)
        )
        if isinstance(batch, Batch):
            assert batch.groups
            self.have = [*self.have, *batch.groups]
            so_far = replace(batch, groups=self.have)
            self.check(so_far)
            if not batch.missing:
                self.taken[self.version] = so_far

    def check(self, batch: Batch) -> None:
        """What was delivered before comes again, first."""
        before = self.delivered.get(batch.version, [])
        both = min(len(before), len(batch.groups))
        assert batch.groups[:both] == before[:both]
        new = batch.groups[both:]
        seqs = [group.seq for group in new]
        assert seqs == sorted(set(seqs)) and not {group.seq for group in before} & set(seqs)
        if earlier := self.taken.get(batch.version):
            assert not new and batch.mask_below == earlier.mask_below
        self.delivered[batch.version] = [*before, *new]
        self.uses.update(seqs)
        assert max(self.uses.values()) <= max(policy.max_uses for policy in self.policies)
        for group in new:
            assert self.age_with_gradient(batch, group) <= self.bound()

    def age_with_gradient(self, batch: Batch, group: Group) -> int:
        """Of the oldest token that is trained; there is one."""
        versions = [span.version for sample in group.samples for span in sample.spans]
        return age(batch.version, min(version for version in versions if version >= batch.mask_below))

    def bound(self) -> int:
        """The policy's; where nothing is dropped, what was admitted under an earlier policy keeps its own, and a
        smaller step makes it wait for more of them."""
        if self.policy.on_stale != "wait":
            return self.policy.age_bound
        capacity = max(policy.window.capacity for policy in self.policies)
        overtaking = max(policy.selector_window for policy in self.policies) - 1
        uses = max(policy.max_uses for policy in self.policies)
        size = min(policy.window.groups_per_step for policy in self.policies)
        return ((capacity + overtaking) * uses - 1) // size

    @precondition(lambda self: self.version in self.taken and self.taken[self.version].epoch == self.epoch)
    @rule()
    def publish_and_release(self) -> None:
        batch = self.taken[self.version]
        self.settled.add(self.version)
        self.version += 1
        self.have = []
        self.head = max(self.head, self.version)
        self.both(lambda buffer: buffer.publish_version(epoch=self.epoch, version=self.version))
        self.both(lambda buffer: buffer.release_batch(batch))

    @rule(slow=st.booleans())
    def train_a_step(self, slow: bool = False) -> None:
        self.work_off_the_window(slow)
        self.take()
        if self.version in self.taken and self.taken[self.version].epoch == self.epoch:
            self.publish_and_release()

    @rule()
    def commit_checkpoint(self) -> None:
        self.both(lambda buffer: buffer.commit_checkpoint(epoch=self.epoch, version=self.version))
        self.committed = max(self.committed, self.version)

    @rule()
    def the_trainer_dies(self) -> None:
        old = self.epoch
        self.epoch = self.epoch + 1
        self.version = self.committed
        self.have = []
        resume = self.both(lambda buffer: buffer.rollback(self.version))
        assert (resume.epoch, resume.head_version) == (self.epoch, self.head)
        assert self.both(lambda buffer: buffer.publish_version(epoch=old, version=99)) is Fenced
        assert self.both(lambda buffer: buffer.take_batch(epoch=old, version=self.version, timeout_s=0)) is Fenced
        late = self.both(lambda buffer: buffer.take_batch_part(epoch=old, version=self.version, have=0, timeout_s=0))
        assert late is Fenced

    @precondition(lambda self: self.committed)
    @rule()
    def a_take_arrives_late(self) -> None:
        """Its step is in a committed checkpoint: it gets nothing, neither old groups nor new ones."""
        version = self.committed - 1
        late = self.both(lambda buffer: buffer.take_batch(epoch=self.epoch, version=version, timeout_s=0))
        assert late is BufferFault

    @rule(policy=st.sampled_from(POLICIES))
    def retune(self, policy: ReplayPolicy) -> None:
        """Not to `wait`, whose bound is that of groups that keep their promise.

        Nor, amid a step, to another P, for which
        the window may have no room."""
        other_size = policy.window.groups_per_step != self.policy.window.groups_per_step
        if policy.on_stale == "wait" or (other_size and self.delivered.get(self.version)):
            return
        self.policy = policy
        self.policies.append(policy)
        self.both(lambda buffer: buffer.update_policy(policy))

    @rule(staleness=st.integers(0, 3))
    def set_staleness(self, staleness: int) -> None:
        """The trainer changes the effective S; the bound of the age stays."""
        outcome = self.both(lambda buffer: buffer.set_staleness(epoch=self.epoch, staleness=staleness))
        assert outcome is None
        self.policy = self.policy.with_staleness(staleness)
        old = self.both(lambda buffer: buffer.set_staleness(epoch=self.epoch - 1, staleness=staleness))
        assert old is Fenced

    @precondition(lambda self: self.version >= 4)
    @rule()
    def end(self) -> None:
        self.both(lambda buffer: buffer.end_run())

    @invariant()
    def guarantees(self) -> None:
        stats = self.both(lambda buffer: buffer.stats())
        assert stats.balanced
        self.most_active = max(self.policy.window.capacity, min(self.most_active, stats.active))
        assert 0 <= stats.active <= self.most_active
        assert 0 <= stats.stored_bytes <= stats.room_bytes
        assert bool(stats.stored_bytes) == bool(stats.kept)
        assert sum(stats.released_by_length.values()) <= stats.released_total
        assert stats.used == sum(self.uses.values())
        assert stats.version == self.head
        self.holders_are_the_same()
        if all(policy.max_uses == 1 for policy in self.policies):
            assert stats.released["trained"] == sum(len(self.taken[version].groups) for version in self.settled)
        if not any(policy.rate.limits for policy in self.policies):
            discarded = stats.released_total - stats.released["trained"]
            assert stats.admitted - discarded <= stats.horizon

    def holders_are_the_same(self) -> None:
        """Who holds how many leases, and who waits."""
        state = self.memory._state
        keys = RunKeys(self.run)
        held = self.do(self.client.hgetall(keys.key("held")))
        waiting = self.do(self.client.hgetall(keys.key("waiting")))
        assert {name.decode(): int(count) for name, count in held.items()} == dict(+state.lease_counts)
        assert {name.decode(): tuple(map(int, text.split())) for name, text in waiting.items()} == {
            name: (server.wanted, server.slots, server.request_number) for name, server in state.waiting_servers.items()
        }

    def the_run_can_be_finished(self) -> None:
        """Some move is always possible: all who held leases are dead, the others are healthy."""
        self.the_trainer_dies()
        for _ in range(60):
            stats = self.do(self.memory.stats())
            if stats.ended or stats.used + stats.groups_per_step > stats.horizon:
                return
            self.all_leases_expire()
            before = self.version
            self.train_a_step()
            self.train_a_step()
            self.commit_checkpoint()
            self.guarantees()
            assert self.version > before or self.do(self.memory.stats()).used > stats.used or self.moved(stats)
        raise AssertionError("60 rounds of healthy servers and a healthy trainer did not finish the run")

    def moved(self, before: Any) -> bool:
        """Whether anything at all has happened since."""
        return self.do(self.memory.stats()) != before


@pytest.fixture
def machine(redis_config: RedisConfig) -> type[BufferMachine]:
    BufferMachine.config = redis_config
    return BufferMachine


def play(machine: type[BufferMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_both_implementations_keep_the_guarantees_in_every_order(machine: type[BufferMachine]) -> None:
    play(machine, 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_they_do_so_in_thousands_of_orders(machine: type[BufferMachine]) -> None:
    play(machine, 1000)

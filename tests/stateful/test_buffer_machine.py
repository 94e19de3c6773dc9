"""Whatever happens in whatever order, both implementations do the same and keep the guarantees.

The machine plays rollout servers that finish, die, come back late and repeat themselves, and a
trainer that dies and resumes. Every move is made on `InMemoryBuffer` and on `RedisBuffer`; replies,
errors and counters must be equal. Time passes only when the machine says so.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import AsyncGrpoError, Fenced
from async_grpo.staleness.window import age
from async_grpo.wire import Batch, ReleaseReason, Ticket
from buffer import InMemoryBuffer, ReplayBuffer, connect, make_client, wipe
from buffer.redis.keys import Keys
from tests.support.buffer_cases import group_of, partial_of, tasks, window

LEASE_S = 1000.0
REASONS = st.sampled_from([ReleaseReason.FILTERED, ReleaseReason.UNVERIFIABLE, ReleaseReason.FAILED])
Move = Callable[[ReplayBuffer], Awaitable[Any]]


class BufferMachine(RuleBasedStateMachine):
    """Two buffers, side by side."""

    config: RedisConfig

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.run = uuid.uuid4().hex
        self.now_s = 1000.0
        self.window = window(S=1, P=2, steps=6)
        self.client = make_client(self.config)
        self.memory = InMemoryBuffer(self.window, lease_s=LEASE_S, max_attempts=2, clock=lambda: self.now_s)
        self.redis = self.do(connect(self.config, self.run, window=self.window, lease_s=LEASE_S, max_attempts=2))
        self.tickets: list[Ticket] = []
        self.taken: dict[int, Batch] = {}
        self.trained: list[int] = []
        self.epoch, self.version, self.head, self.committed = 1, 0, 0, 0
        self.both(lambda buffer: buffer.rollback(0))
        self.both(lambda buffer: buffer.put_tasks(tasks(0, 3)))

    def teardown(self) -> None:
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

    @rule(limit=st.integers(1, 4))
    def admit(self, limit: int) -> None:
        tickets = self.both(lambda buffer: buffer.admit(limit, holder="server", timeout_s=0))
        self.tickets += tickets if isinstance(tickets, list) else []

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), ago=st.integers(0, 2))
    def insert(self, data: st.DataObject, ago: int) -> None:
        """Finish a group, or repeat that, or come too late; perhaps with older tokens than promised."""
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        group = group_of(ticket, version=max(0, ticket.version - ago))
        self.both(lambda buffer: buffer.insert(ticket, group))

    @rule()
    def work_off_the_window(self) -> None:
        """What healthy servers do: fill the window and finish everything."""
        self.put_tasks(6, 1)
        self.admit(4)
        for ticket in self.tickets[-6:]:
            self.both(lambda buffer, ticket=ticket: buffer.insert(ticket, group_of(ticket)))  # type: ignore[misc]

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), reason=REASONS)
    def discard(self, data: st.DataObject, reason: ReleaseReason) -> None:
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        self.both(lambda buffer: buffer.discard(ticket, reason))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), length=st.integers(1, 4))
    def progress(self, data: st.DataObject, length: int) -> None:
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        self.both(lambda buffer: buffer.progress(ticket, partial_of(ticket, length)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        self.both(lambda buffer: buffer.give_back(ticket))

    @precondition(lambda self: self.tickets)
    @rule()
    def heartbeat(self) -> None:
        self.both(lambda buffer: buffer.heartbeat(self.tickets))

    @rule()
    def all_leases_expire(self) -> None:
        self.now_s += 2 * LEASE_S
        leases = Keys(self.run).of("leases")
        for seq, deadline in self.do(self.client.zrange(leases, 0, -1, withscores=True)):
            self.do(self.client.zadd(leases, {seq: min(deadline, 1)}))

    @rule()
    def take(self) -> None:
        batch = self.both(lambda buffer: buffer.take(epoch=self.epoch, version=self.version, timeout_s=0))
        if isinstance(batch, Batch):
            assert all(age(self.version, group.oldest_version) <= 1 for group in batch.groups)
            assert batch.groups == self.taken.get(self.version, batch).groups
            self.taken[self.version] = batch

    @precondition(lambda self: self.version in self.taken and self.taken[self.version].epoch == self.epoch)
    @rule()
    def publish_and_release(self) -> None:
        batch = self.taken[self.version]
        self.version += 1
        self.head = max(self.head, self.version)
        self.both(lambda buffer: buffer.publish_version(epoch=self.epoch, version=self.version))
        self.both(lambda buffer: buffer.release(batch))
        self.trained += [group.seq for group in batch.groups if group.seq not in self.trained]

    @rule()
    def train_a_step(self) -> None:
        self.work_off_the_window()
        self.take()
        if self.version in self.taken and self.taken[self.version].epoch == self.epoch:
            self.publish_and_release()

    @rule()
    def commit_checkpoint(self) -> None:
        self.both(lambda buffer: buffer.commit_checkpoint(epoch=self.epoch, version=self.version))
        self.committed = max(self.committed, self.version)

    @rule()
    def the_trainer_dies(self) -> None:
        old, self.epoch, self.version = self.epoch, self.epoch + 1, self.committed
        resume = self.both(lambda buffer: buffer.rollback(self.version))
        assert (resume.epoch, resume.head_version) == (self.epoch, self.head)
        assert self.both(lambda buffer: buffer.publish_version(epoch=old, version=99)) is Fenced

    @precondition(lambda self: self.version >= 4)
    @rule()
    def end(self) -> None:
        self.both(lambda buffer: buffer.end())

    @invariant()
    def guarantees(self) -> None:
        stats = self.both(lambda buffer: buffer.stats())
        assert stats.balanced
        assert 0 <= stats.active <= self.window.capacity
        assert stats.admitted - (stats.released_total - stats.released["trained"]) <= self.window.horizon
        assert stats.released["trained"] == len(self.trained) == len(set(self.trained))
        assert self.trained == sorted(self.trained)
        assert stats.version == self.head


@pytest.fixture
def machine(redis_config: RedisConfig) -> type[BufferMachine]:
    BufferMachine.config = redis_config
    return BufferMachine


def test_both_implementations_keep_the_guarantees_in_every_order(machine: type[BufferMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )

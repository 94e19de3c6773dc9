"""Keeps the engine full, without waves: a group is admitted whenever a sample slot is free.

    buffer --admit--> GroupWork --G samples--> engine --> reward pool --> insert | discard --> buffer

- admission waits for a free slot (a sample that finishes unblocks it), then for a ticket (room in
  the staleness window: the trainer's release; a task: the feeder)
- a group waits for weights of its ticket's version (the weight watcher unblocks it), then for its
  samples, each of which waits for a slot, then for its verdicts (at most one deadline per sample)
- leases wait for their timer

Invariant: no token of a group is older than its ticket, because its samples start only when
engine.version >= ticket.version, and the engine's version never decreases.

Stopping (cancel `run`): admission ends, running samples are aborted, finished samples are stored as
partials, all tickets are given back. A group resumed from a partial makes only what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from async_grpo.errors import EngineError, LeaseLost, RoleFailed, RunEnded, WaitTimeout
from async_grpo.wire import ReleaseReason, Sample
from rollout_server.cast import Cast
from rollout_server.failures import first_cause
from rollout_server.feeder import Feeder
from rollout_server.group_work import GroupWork
from rollout_server.leases import Leases
from rollout_server.outcome import reason_to_discard, what_is_broken, with_verdict
from rollout_server.seeds import sample_seed
from rollout_server.session import Session
from rollout_server.slots import SampleSlots
from rollout_server.weight_watcher import WeightWatcher

ADMIT_TIMEOUT_S = 10.0
HAND_BACK_TIMEOUT_S = 10.0
NOTED_WAIT_S = 0.05
MAX_FAILURES_IN_A_ROW = 32
"""Groups that fail or cannot be judged, one after the other, before the server gives up."""

log = structlog.get_logger()


class Dispatcher:
    """One server's stream of groups."""

    def __init__(self, cast: Cast, watcher: WeightWatcher, feeder: Feeder) -> None:
        self._cast = cast
        self._watcher = watcher
        self._feeder = feeder
        self.slots = SampleSlots(cast.config.rollout.max_concurrency)
        self.leases = Leases(cast.buffer, every_s=cast.config.rollout.lease_s / 3)
        self.asking_since_s: float | None = None
        """Since when the dispatcher has been waiting for a ticket; None while it is not."""
        self._weights_timeout_s = cast.config.weights.update_timeout_s + cast.config.eval.timeout_s
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Until the run has ended. Raises EngineError (the engine died), RoleFailed (nothing works),
        WaitTimeout (published weights do not come)."""
        try:
            async with asyncio.TaskGroup() as works:
                renewal = works.create_task(self.leases.run(), name="leases")
                await self._admit_until_end(works)
                renewal.cancel()
                for work in self.leases:
                    self.leases.forget(work)
                    if work.doing is not None:
                        work.doing.cancel()
        finally:
            await self._hand_back_all()

    async def _hand_back_all(self) -> None:
        """As far as time allows: a lease that is not given back runs out by itself."""
        try:
            async with asyncio.timeout(HAND_BACK_TIMEOUT_S):
                await asyncio.gather(*(self.leases.hand_back(work) for work in self.leases))
        except TimeoutError:
            log.warning("the buffer did not take all groups back; their leases run out", waited_s=HAND_BACK_TIMEOUT_S)

    async def _admit_until_end(self, works: asyncio.TaskGroup) -> None:
        while True:
            await self.slots.room()
            try:
                work = await self._next_work()
            except RunEnded:
                return
            if work is not None:
                work.doing = works.create_task(self._make(work), name=f"group {work.ticket.seq}")

    async def _next_work(self) -> GroupWork | None:
        """One more group, or None after a while without. Raises RunEnded."""
        self.asking_since_s = time.time()
        try:
            tickets = await self._cast.buffer.admit(1, holder=self._cast.name, timeout_s=ADMIT_TIMEOUT_S)
        except WaitTimeout:
            return None
        finally:
            self._note_wait(self.asking_since_s)
            self._feeder.nudge()
        work = GroupWork.resume(tickets[0], self._cast.config.group_size)
        self.slots.commit(work.committed)
        self.leases.hold(work)
        return work

    def _note_wait(self, since_s: float) -> None:
        self.asking_since_s = None
        now_s = time.time()
        if now_s - since_s >= NOTED_WAIT_S:
            self._cast.diary.wait("ticket", since_s, now_s)

    async def _make(self, work: GroupWork) -> None:
        """A group from ticket to release. Raises EngineError, RoleFailed."""
        try:
            await self._watcher.wait_for_version(work.version_needed, self._weights_timeout_s)
            await self._generate(work)
            await self._settle(work)
        except LeaseLost:
            self.leases.drop(work)
        except RunEnded:
            self.leases.forget(work)
        finally:
            self.slots.finish(work.committed)
            work.committed = 0

    async def _generate(self, work: GroupWork) -> None:
        """Make the missing samples; a workflow that fails makes the group `failed`."""
        try:
            async with asyncio.TaskGroup() as samples:
                for index in work.missing:
                    samples.create_task(self._make_sample(work, index))
        except ExceptionGroup as errors:
            cause = first_cause(errors)
            if isinstance(cause, EngineError):
                raise cause from None
            work.error = f"{type(cause).__name__}: {cause}"

    async def _make_sample(self, work: GroupWork, index: int) -> None:
        try:
            async with self.slots.running():
                session = self._session(work, index)
                work.samples[index] = await self._cast.workflow.run(work.ticket.task, session)
        finally:
            work.committed -= 1
            self.slots.finish(1)

    def _session(self, work: GroupWork, index: int) -> Session:
        ticket, config = work.ticket, self._cast.config
        return Session(
            engine=self._cast.engine,
            request_id=f"{ticket.seq}-{ticket.attempt}-{index}",
            seed=sample_seed(config.seed, "train", ticket.task.index, index, ticket.attempt),
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            prior=work.samples[index],
        )

    async def _settle(self, work: GroupWork) -> None:
        """Insert the group, discard it, or give it back if the engine cut samples short."""
        if work.error:
            await self._discard(work, ReleaseReason.FAILED, work.error)
            return
        if work.missing:
            await self.leases.hand_back(work)
            return
        samples = [sample for sample in work.samples if sample is not None]
        if broken := what_is_broken(samples):
            await self._discard(work, ReleaseReason.FAILED, broken)
            return
        samples = await self._judge(work, samples)
        reason = reason_to_discard(samples, dynamic_sampling=self._cast.config.rollout.dynamic_sampling)
        if reason is not None:
            await self._discard(work, reason, samples[0].unverifiable)
            return
        group = work.group(self._cast.name, samples)
        work.settling = True
        await self._cast.buffer.insert(work.ticket, group)
        self.leases.forget(work)
        self._failures_in_a_row = 0
        self._cast.diary.group(group, version=self._cast.engine.version)

    async def _judge(self, work: GroupWork, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their rewards; failures of verifiers are counted by kind."""
        verdicts = await self._cast.pool.judge([(sample.text, work.ticket.task.answer) for sample in samples])
        for kind, count in Counter(verdict.failure for verdict in verdicts if verdict.failure).items():
            await self._cast.board.count(f"reward_failures.{kind}", count)
        return [with_verdict(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]

    async def _discard(self, work: GroupWork, reason: ReleaseReason, why: str) -> None:
        work.settling = True
        await self._cast.buffer.discard(work.ticket, reason)
        self.leases.forget(work)
        if reason is ReleaseReason.FILTERED:
            self._failures_in_a_row = 0
            return
        log.warning("group discarded", seq=work.ticket.seq, reason=reason.value, why=why)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RoleFailed(
                f"{self._failures_in_a_row} groups in a row ended as {reason.value}, the last because: {why}. "
                "Nothing can be trained like this; mend the workflow or the verifier"
            )

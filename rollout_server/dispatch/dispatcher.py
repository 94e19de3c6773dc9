"""Keeps the engine full, without waves: groups are admitted whenever a sample slot is free.

    buffer --admit--> GroupRollout --G samples--> engine --> reward pool --> insert | discard --> buffer

- Admission waits for a free slot (a sample that finishes unblocks it), then for a ticket, which needs room in the
  staleness window (the trainer's release makes it) and a task (the feeder puts it).
- A group waits for weights of its ticket's version (the weight watcher unblocks it), then for its samples, then for
  their rewards. Each sample waits for a slot, then for its workflow. Workflow and rewards have deadlines.
- Leases wait for their timers.

Invariant: no token of a group is older than its ticket, because its samples start only when
engine.version >= ticket.version, and the engine's version never decreases.

Partials: what was generated is stored every progress_interval_s, so a server that dies costs no more than that. When
`run` is cancelled, or the engine dies, admission ends, what exists is stored and all tickets are given back. The server
that resumes a group goes on behind the last token of every sample.

Pausing and draining (`admission`): a ticket that comes after either is given back at once. A dispatcher that drains
asks for no more tickets and ends once its groups have finished. Groups that have not finished after
rollout.http.drain_timeout_s, or when it is told to stop now, are stored and given back.

Deadlines: a workflow that does not return by its deadline (`workflows.sample_rollout`) makes its group `failed`, so
that no heartbeat renews its lease any longer.

Over-sampling: a group starts G + k samples and is complete once G have finished; the others are aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from async_grpo.errors import EngineError, LeaseLost, RoleFailed, RunEnded, SampleOverdue, WaitTimeout
from async_grpo.rewards.base import RewardInput
from async_grpo.telemetry.rows import REWARD_FAILURES_PREFIX
from async_grpo.utils.aio import root_cause
from async_grpo.wire import ReleaseReason, Sample, Ticket
from rollout_server.context import ServerContext
from rollout_server.dispatch.admission import AdmissionGate, TaskFeeder
from rollout_server.dispatch.concurrency import SampleSlots
from rollout_server.dispatch.group_rollout import GroupRollout
from rollout_server.dispatch.leases import Leases
from rollout_server.dispatch.outcomes import (
    GroupCounters,
    apply_length_rule,
    reason_to_discard,
    what_is_broken,
    with_rewards,
)
from rollout_server.engines.base import sample_seed
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows.sample_rollout import SampleDeadline, SampleMaker
from rollout_server.workflows.session import SampleSession

ADMIT_TIMEOUT_S = 10.0
GIVE_BACK_TIMEOUT_S = 10.0
NOTED_WAIT_S = 0.05
MAX_FAILURES_IN_A_ROW, MAX_OVERDUE_IN_A_ROW = 32, 4
"""Groups in a row that fail or cannot be judged before the server gives up. The second figure holds if the last of them
missed its deadline: that takes so long that the trainer would give up first."""

log = structlog.get_logger()


class Dispatcher:
    """One server's stream of groups. Reports and administration use `admission`, `counters`, `slots` and `leases`."""

    def __init__(self, context: ServerContext, watcher: WeightWatcher, feeder: TaskFeeder) -> None:
        self._context = context
        self._watcher = watcher
        self._feeder = feeder
        self._maker = SampleMaker(
            context.workflow,
            context.config.rollout.workflow,
            SampleDeadline.for_training(context.config),
            clock_s=lambda: watcher.awake_s,
        )
        self.admission = AdmissionGate()
        self.counters = GroupCounters()
        self.slots = SampleSlots(context.config.rollout.min_concurrency or context.config.rollout.max_concurrency)
        rollout = context.config.rollout
        self.leases = Leases(
            context.buffer, every_s=context.config.lease_s / 3, store_every_s=rollout.progress_interval_s
        )
        self.asking_since_s: float | None = None
        """Unix time in seconds since when the dispatcher waits for a ticket; None while it does not."""
        self._weights_timeout_s = context.config.weights.update_timeout_s + context.config.eval.timeout_s
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Make groups until the run has ended, or this server is drained. Raises EngineError (the engine died),
        RoleFailed (too many groups in a row failed), WaitTimeout (published weights do not come)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                lease_loops = [tasks.create_task(loop) for loop in (self.leases.run(), self.leases.run_storing())]
                try:
                    await self._admit_until_end(tasks)
                    await self._finish()
                except asyncio.CancelledError:
                    self.leases.keep_partials()
                    raise
                for loop in lease_loops:
                    loop.cancel()
                self._drop_rest()
        finally:
            await self._give_back_all()

    async def _finish(self) -> None:
        """If the server drains, wait for the groups in work; the last one to end unblocks it, or `stop_now`."""
        timeout_s = self._context.config.rollout.http.drain_timeout_s
        stop_now = asyncio.create_task(self.admission.stop_now.wait())
        try:
            async with asyncio.timeout(timeout_s):
                while self.admission.is_draining and not stop_now.done() and (doing := self._in_work()):
                    await asyncio.wait([stop_now, *doing], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            log.warning("groups are still in work; what exists of them is stored", waited_s=timeout_s)
        finally:
            stop_now.cancel()

    def _in_work(self) -> list[asyncio.Task[None]]:
        return [work.doing for work in self.leases if work.doing is not None and not work.doing.done()]

    def _drop_rest(self) -> None:
        """End all generation. If the run has ended, nothing is kept; if the server drains, all partials are."""
        if self.admission.is_draining:
            self.leases.keep_partials()
        for work in self.leases:
            if not self.admission.is_draining:
                self.leases.forget(work)
            if work.doing is not None:
                work.doing.cancel()

    async def _give_back_all(self) -> None:
        """Give all groups back, as far as time allows. A lease that is not given back runs out by itself."""
        try:
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                await asyncio.gather(*(self.leases.give_back(work) for work in self.leases))
        except TimeoutError:
            log.warning("the buffer did not take all groups back; their leases run out", waited_s=GIVE_BACK_TIMEOUT_S)

    async def _admit_until_end(self, tasks: asyncio.TaskGroup) -> None:
        """Take up groups until the run has ended, or this server is drained."""
        while not self.admission.is_draining:
            try:
                groups = await self.admission.until_draining(self._next_groups()) or []
            except RunEnded:
                return
            if not self.admission.is_open:
                await self._return(groups)
                continue
            for work in groups:
                work.doing = tasks.create_task(self._make(work), name=f"group {work.ticket.seq}")

    async def _next_groups(self) -> list[GroupRollout]:
        """Groups for all free slots, asked for in one request, so that a buffer that answers slowly costs one wait and
        not one a group. Fewer, or none after ADMIT_TIMEOUT_S, if there are no more. Raises RunEnded."""
        await self.slots.room()
        await self.admission.opened()
        config = self._context.config
        wanted = self.slots.groups_wanted(config.group_size + config.rollout.oversample)
        self.asking_since_s = time.time()
        try:
            tickets = await self._context.buffer.admit(wanted, holder=self._context.name, timeout_s=ADMIT_TIMEOUT_S)
        except WaitTimeout:
            return []
        finally:
            self._note_wait(self.asking_since_s)
            self._feeder.notify()
        return [self._take_up(ticket) for ticket in tickets]  # at once: what `leases` holds is given back in any case

    async def _return(self, groups: Sequence[GroupRollout]) -> None:
        """Give back groups that came after a pause, or while the server drains."""
        for work in groups:
            self.slots.finish(work.committed)
            await self.leases.give_back(work)

    def _take_up(self, ticket: Ticket) -> GroupRollout:
        config = self._context.config
        work = GroupRollout.resume(ticket, config.group_size, oversample=config.rollout.oversample)
        self.slots.commit(work.committed)
        self.leases.hold(work)
        return work

    def _note_wait(self, since_s: float) -> None:
        self.asking_since_s = None
        now_s = time.time()
        if now_s - since_s >= NOTED_WAIT_S:
            self._context.logger.wait("ticket", since_s, now_s)

    async def _make(self, work: GroupRollout) -> None:
        """Make a group, from ticket to insert or discard. Raises EngineError, RoleFailed."""
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

    async def _generate(self, work: GroupRollout) -> None:
        """Make the missing samples, until enough have finished; a workflow that fails makes the group `failed`."""
        try:
            async with asyncio.TaskGroup() as samples:
                making = [samples.create_task(self._make_sample(work, index)) for index in work.missing]
                for sample in asyncio.as_completed(making):
                    await sample
                    if not work.missing:
                        break
                for task in making:
                    task.cancel()
        except ExceptionGroup as errors:
            cause = root_cause(errors)
            if isinstance(cause, EngineError):
                raise cause from None
            work.error, work.is_overdue = f"{type(cause).__name__}: {cause}", isinstance(cause, SampleOverdue)

    async def _make_sample(self, work: GroupRollout, index: int) -> None:
        try:
            async with self.slots.running():
                session = work.sessions[index] = self._session(work, index)
                work.keep(index, await self._maker.make(work.ticket.task, session))
                del work.sessions[index]
        except EngineError:
            self.leases.keep_partials()  # before the failure cancels everything else, and what it had is gone
            raise
        finally:
            work.committed -= 1
            self.slots.finish(1)

    def _session(self, work: GroupRollout, index: int) -> SampleSession:
        ticket, config = work.ticket, self._context.config
        seed = sample_seed(config.seed, "train", ticket.task.index, index, ticket.attempt)
        return SampleSession(
            self._context.engine,
            f"{ticket.seq}-{ticket.attempt}-{index}",
            ticket.task.prompt_ids(),
            seed=seed if config.rollout.seeds_samples else None,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            prior=work.samples[index],
            interruptible=ticket.attempt <= config.rollout.max_interruptions,
            index=index,
        )

    async def _settle(self, work: GroupRollout) -> None:
        """Insert the group, discard it, or give it back if the engine cut samples short."""
        if work.error:
            await self._discard(work, ReleaseReason.FAILED, work.error)
            return
        if work.missing:
            self.counters.groups["interrupted"] += 1
            await self.leases.give_back(work)
            return
        samples = work.whole()
        if broken := what_is_broken(samples):
            await self._discard(work, ReleaseReason.FAILED, broken)
            return
        samples = await self._judge(work, samples)
        reason = reason_to_discard(samples, dynamic_sampling=self._context.config.rollout.dynamic_sampling)
        if reason is not None:
            await self._discard(work, reason, samples[0].unverifiable)
            return
        group = work.group(self._context.name, samples)
        work.settling = True
        await self._context.buffer.insert(work.ticket, group)
        self.leases.forget(work)
        self._failures_in_a_row = 0
        self.counters.inserted(samples)
        self._context.logger.group(group, version=self._context.engine.version)

    async def _judge(self, work: GroupRollout, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their rewards. Failures of reward functions are counted by kind."""
        task = work.ticket.task
        items = [RewardInput.of(sample, task) for sample in samples]
        judged = zip(samples, await self._context.pool.judge(items), strict=True)
        results = [apply_length_rule(sample, result, self._context.config) for sample, result in judged]
        kinds = Counter(failure.kind for result in results for failure in result.failures.values())
        for kind, count in kinds.items():
            self.counters.reward_failures[kind] += count
            await self._context.board.count(f"{REWARD_FAILURES_PREFIX}{kind}", count)
        return [with_rewards(sample, result) for sample, result in zip(samples, results, strict=True)]

    async def _discard(self, work: GroupRollout, reason: ReleaseReason, why: str) -> None:
        work.settling = True
        await self._context.buffer.discard(work.ticket, reason)
        self.leases.forget(work)
        self.counters.groups[reason.value] += 1
        if reason is ReleaseReason.FILTERED:
            self._failures_in_a_row = 0
            return
        log.warning("group discarded", seq=work.ticket.seq, reason=reason.value, why=why)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= (MAX_OVERDUE_IN_A_ROW if work.is_overdue else MAX_FAILURES_IN_A_ROW):
            raise RoleFailed(
                f"{self._failures_in_a_row} groups in a row ended as {reason.value}, the last because: {why}. "
                "Nothing can be trained like this; mend the workflow or the verifier"
            )

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

Expired leases: a group that kills its engine must not kill all engines. So if an engine dies, the lease of every group
with a request in it counts as expired, and a group with max_attempts of them is `failed`. Most of these groups are
innocent, so a group with CAREFUL_EXPIRED_LEASES is generated with care: only one such group at a time is in this
server's engine. A group that kills engines then dies alone among them and uses up its attempts, and the innocent ones
finish in turn. Groups with fewer expired leases run next to it, so that the engine stays full; another death costs them
one more.

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

from async_grpo.errors import ConfigError, EngineError, RoleFailed, RunEnded, SampleOverdue, WaitTimeout
from async_grpo.rewards.base import RewardInput
from async_grpo.telemetry.rows import REWARD_FAILURES_PREFIX
from async_grpo.utils.aio import root_cause
from async_grpo.wire import ReleaseReason, Sample, Ticket
from rollout_server.context import ServerContext
from rollout_server.dispatch.admission import AdmissionGate, TaskFeeder
from rollout_server.dispatch.concurrency import SampleSlots
from rollout_server.dispatch.group_rollout import GroupRollout
from rollout_server.dispatch.groups_in_progress import Discard, Drop, GiveBack, GroupsInProgress, Insert
from rollout_server.dispatch.outcomes import (
    GroupCounters,
    apply_length_rule,
    find_invalid_sample,
    reason_to_discard,
    with_rewards,
)
from rollout_server.engines.base import sample_seed
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows.sample_rollout import SampleDeadline, SampleMaker
from rollout_server.workflows.session import SampleSession

ADMIT_TIMEOUT_S = 10.0
GIVE_BACK_TIMEOUT_S = 10.0
NOTED_WAIT_S = 0.05
CAREFUL_EXPIRED_LEASES = 2
"""Number of expired leases from which a group is generated with care. Not 1: when a machine fails, all of its groups
have one, and generating those one at a time would starve the trainer."""
MAX_FAILURES_IN_A_ROW, MAX_OVERDUE_IN_A_ROW = 32, 4
"""Groups in a row that fail or cannot be judged before the server gives up. The second figure holds if the last of them
missed its deadline: that takes so long that the trainer would give up first."""

log = structlog.get_logger()


class Dispatcher:
    """One server's stream of groups. Reports and administration use `admission`, `counters`, `slots` and `groups`."""

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
        self.groups = GroupsInProgress(
            context.buffer,
            self.slots,
            renew_every_s=context.config.lease_s / 3,
            save_every_s=rollout.progress_interval_s,
            max_attempts=rollout.max_attempts,
        )
        self.asking_since_s: float | None = None
        """Unix time in seconds since when the dispatcher waits for a ticket; None while it does not."""
        self._seeds_samples = rollout.seeds_samples  # a property of the configuration that takes time to derive
        self._weights_timeout_s = context.config.weights.update_timeout_s + context.config.eval.timeout_s
        self._failures_in_a_row = 0
        self._careful_turn = asyncio.Lock()
        # With few attempts, care has to start before the last one.
        self._careful_expired_leases = max(1, min(CAREFUL_EXPIRED_LEASES, rollout.max_attempts - 1))

    async def run(self) -> None:
        """Make groups until the run has ended, or this server is drained. Raises EngineError (the engine died),
        RoleFailed (too many groups in a row failed), WaitTimeout (published weights do not come)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(loop) for loop in (self.groups.run_renewing(), self.groups.run_saving())]
                try:
                    await self._admit_until_end(tasks)
                    if self.admission.is_draining:
                        await self._wait_for_groups()
                    else:
                        await self._drop_groups()
                finally:
                    # Before anything is cancelled, because cancelled requests lose their tokens. If a group has failed,
                    # the others are cancelled already: `_generate_sample` has frozen the partials then.
                    self.groups.freeze_partials()
                for task in [*loops, *self._running_tasks()]:
                    task.cancel()
        finally:
            await self._give_back_groups()

    async def _wait_for_groups(self) -> None:
        """The server drains: wait until its groups have ended, for drain_timeout_s at most, or until `stop_now`."""
        timeout_s = self._context.config.rollout.http.drain_timeout_s
        stop_now = asyncio.create_task(self.admission.stop_now.wait())
        try:
            async with asyncio.timeout(timeout_s):
                while not stop_now.done() and (running := self._running_tasks()):
                    await asyncio.wait([stop_now, *running], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            log.warning("groups are still in work; what exists of them is stored", waited_s=timeout_s)
        finally:
            stop_now.cancel()

    def _running_tasks(self) -> list[asyncio.Task[None]]:
        return [group.task for group in self.groups if group.task is not None and not group.task.done()]

    async def _drop_groups(self) -> None:
        """The run has ended: nobody needs what is still being generated."""
        for group in self.groups:
            await self.groups.end(group, Drop())

    async def _give_back_groups(self) -> None:
        """Give back all groups that are left, as far as time allows. A lease that is not given back runs out by
        itself."""
        try:
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                await asyncio.gather(*(self.groups.end(group, GiveBack()) for group in self.groups))
        except TimeoutError:
            log.warning("the buffer did not take all groups back; their leases run out", waited_s=GIVE_BACK_TIMEOUT_S)

    async def _admit_until_end(self, tasks: asyncio.TaskGroup) -> None:
        """Take up groups until the run has ended, or this server is drained."""
        while not self.admission.is_draining:
            try:
                groups = await self.admission.until_draining(self._next_groups()) or []
            except RunEnded:
                return
            for group in groups:
                if self.admission.is_open:
                    group.task = tasks.create_task(self._run_group(group), name=f"group {group.ticket.seq}")
                else:  # it came after a pause, or while the server drains
                    await self.groups.end(group, GiveBack())

    async def _next_groups(self) -> list[GroupRollout]:
        """Groups for all free slots, asked for in one request, so that a buffer that answers slowly costs one wait and
        not one a group. Fewer, or none after ADMIT_TIMEOUT_S, if there are no more. Raises RunEnded."""
        await self.slots.room()
        await self.admission.opened()
        config = self._context.config
        size = config.group_size + config.rollout.oversample
        wanted = self.slots.groups_wanted(size)
        self.asking_since_s = time.time()
        try:
            tickets = await self._context.buffer.admit_groups(
                wanted, holder=self._context.holder, timeout_s=ADMIT_TIMEOUT_S, slots=self.slots.groups_at_once(size)
            )
        except WaitTimeout:
            return []
        finally:
            self._note_wait(self.asking_since_s)
            self._feeder.notify()
        # Without waiting in between: a cancellation there would leave tickets that nobody gives back.
        return [self._add_group(ticket) for ticket in tickets]

    def _add_group(self, ticket: Ticket) -> GroupRollout:
        config = self._context.config
        group = GroupRollout.resume(ticket, config.group_size, oversample=config.rollout.oversample)
        self.groups.add_group(group)
        if not self._needs_care(group):
            self.groups.commit_slots(group)
        return group

    def _needs_care(self, group: GroupRollout) -> bool:
        return group.ticket.expired_leases >= self._careful_expired_leases

    def _note_wait(self, since_s: float) -> None:
        self.asking_since_s = None
        now_s = time.time()
        if now_s - since_s >= NOTED_WAIT_S:
            self._context.logger.wait("ticket", since_s, now_s)

    async def _run_group(self, group: GroupRollout) -> None:
        """Bring a group from its ticket to its end. Raises EngineError, RoleFailed, WaitTimeout."""
        try:
            await self._watcher.wait_for_version(group.version_needed, self._weights_timeout_s)
            if self._needs_care(group):
                async with self._careful_turn:
                    # Its slots are committed only now: groups that wait for their turn do not keep the engine empty.
                    self.groups.commit_slots(group)
                    await self._generate_group(group)
            else:
                await self._generate_group(group)
            await self._settle_group(group)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # by the dispatcher, or by `GroupsInProgress`: whoever did it parts with the group
            log.error("a group's task was cancelled by something that it awaits", seq=group.ticket.seq)

        # A safety net: a group that is still here although its task ends would have its lease renewed for ever. Its
        # lease counts as expired, so that a group to which this happens each time ends as `failed`.
        if group in self.groups:
            group.counts_as_expired = True
            await self.groups.end(group, GiveBack())

    async def _generate_group(self, group: GroupRollout) -> None:
        """Generate the missing samples, until enough have finished; a workflow that fails makes the group `failed`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [tasks.create_task(self._generate_sample(group, index)) for index in group.missing]
                for sample in asyncio.as_completed(samples):
                    await sample
                    if not group.missing:
                        break
                for task in samples:
                    task.cancel()
        except ExceptionGroup as errors:
            cause = root_cause(errors)
            if isinstance(cause, EngineError):
                raise cause from None
            group.error = f"{type(cause).__name__}: {cause}"
            group.is_overdue = isinstance(cause, SampleOverdue)

    async def _generate_sample(self, group: GroupRollout, index: int) -> None:
        try:
            async with self.slots.running():
                session = group.sessions[index] = self._session(group, index)
                group.keep_sample(index, await self._maker.make(group.ticket.task, session))
                del group.sessions[index]
        except EngineError:
            # Now, before this failure cancels the other samples and groups: then their tokens are lost, and it can no
            # longer be told which of them were in the engine.
            self.groups.freeze_partials()
            self.groups.count_lease_of_groups_in_engine()
            raise
        finally:
            self.groups.free_slot(group)

    def _session(self, group: GroupRollout, index: int) -> SampleSession:
        ticket, config = group.ticket, self._context.config
        seed = sample_seed(config.seed, "train", ticket.task.index, index, ticket.attempt)
        return SampleSession(
            self._context.engine,
            f"{ticket.seq}-{ticket.attempt}-{index}",
            ticket.task.prompt_ids(),
            seed=seed if self._seeds_samples else None,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            prior=group.samples[index],
            interruptible=ticket.attempt <= config.rollout.max_interruptions,
            index=index,
            vocabulary=self._context.vocabulary,
        )

    async def _settle_group(self, group: GroupRollout) -> None:
        """Insert the group, discard it, or give it back if the engine cut samples short. Raises RoleFailed."""
        if group.error:
            await self._discard_group(group, ReleaseReason.FAILED, group.error)
            return
        if group.missing:
            self.counters.groups["interrupted"] += 1
            await self.groups.end(group, GiveBack())
            return

        samples = group.finished_samples()
        invalid = find_invalid_sample(samples)
        if invalid:
            await self._discard_group(group, ReleaseReason.FAILED, f"{self._context.name} generated {invalid}")
            return
        samples = await self._judge_samples(group, samples)
        reason = reason_to_discard(samples, dynamic_sampling=self._context.config.rollout.dynamic_sampling)
        if reason is not None:
            await self._discard_group(group, reason, samples[0].unverifiable)
            return

        finished = group.finished_group(self._context.name, samples)
        if await self.groups.end(group, Insert(finished)):
            self._failures_in_a_row = 0
            self.counters.inserted(samples)
            self._context.logger.group(finished, version=self._context.engine.version)

    async def _judge_samples(self, group: GroupRollout, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their rewards. Failures of reward functions are counted by kind."""
        task = group.ticket.task
        items = [RewardInput.from_sample(sample, task) for sample in samples]
        judged = zip(samples, await self._context.pool.judge(items), strict=True)
        results = [apply_length_rule(sample, result, self._context.config) for sample, result in judged]
        kinds = Counter(failure.kind for result in results for failure in result.failures.values())
        for kind, count in kinds.items():
            self.counters.reward_failures[kind] += count
            await self._context.board.add_to_counter(f"{REWARD_FAILURES_PREFIX}{kind}", count)
        return [with_rewards(sample, result) for sample, result in zip(samples, results, strict=True)]

    async def _discard_group(self, group: GroupRollout, reason: ReleaseReason, why: str) -> None:
        """Discard the group. Raises RoleFailed after too many failures in a row."""
        if not await self.groups.end(group, Discard(reason)):
            return
        self.counters.groups[reason.value] += 1
        if reason is ReleaseReason.FILTERED:
            self._failures_in_a_row = 0
            return

        log.warning("group discarded", seq=group.ticket.seq, reason=reason.value, why=why)
        self._failures_in_a_row += 1
        limit = MAX_OVERDUE_IN_A_ROW if group.is_overdue else MAX_FAILURES_IN_A_ROW
        if self._failures_in_a_row >= limit:
            # A verifier or workflow with which no group has ever succeeded fails again after a restart.
            is_final = not group.is_overdue and not self.counters.groups["inserted"]
            error = ConfigError if is_final else RoleFailed
            raise error(
                f"{self._failures_in_a_row} groups in a row ended as {reason.value}, the last because: {why}. "
                "Training cannot continue like this. Fix the workflow or the verifier"
            )

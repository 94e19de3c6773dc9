"""Keeps the engine full: a group is admitted whenever sample slots are free, not batch by batch.

    buffer --admit--> GroupRollout --G samples--> engine --> reward pool --> insert | discard --> buffer

A ticket is the leased right to generate one group: its sequence number, its task and the oldest version that its tokens
may have.

- Admission waits for a free slot (a finished sample unblocks it), then for a ticket. A ticket needs room in the
  staleness window (the trainer's release makes it) and a task (the feeder appends it).
- A group waits for weights of its ticket's version (the weight watcher unblocks it), then for its samples, then for
  their rewards. Each sample waits for a slot, then for its workflow. Workflows and rewards have deadlines.
- The loops that renew leases and save partials wait for their timers.

Invariant: no token of a group is older than its ticket, because its samples start only when
engine.version >= ticket.version, and the engine's version never decreases.

Partials: generated tokens are saved every progress_interval_s, which bounds the loss if the server dies. If
`run_until_end` is cancelled or the engine dies, admission ends, all partials are saved and all tickets are given back.
The server that resumes a group continues after the last token of every sample.

Expired leases: a group that kills its engine must not kill all engines. If an engine dies, the leases of all groups
with a request in it count as expired. Most of these groups are innocent. A group with at least SUSPECT_EXPIRED_LEASES
is a suspect, and a server runs one suspect at a time: when the guilty one kills the engine, no other suspect is charged
for it. After max_attempts expired leases it ends as `failed`, and the innocent suspects finish one after the other.
Groups with fewer expired leases run beside the suspect, so that the engine stays full; another death costs each of them
one.

Pausing and draining (`admission`): a ticket that arrives after either is given back immediately. A draining dispatcher
requests no more tickets and ends once its groups have finished. Groups that have not finished after
rollout.http.drain_timeout_s, or at an urgent stop, are saved and given back.

Failures: a workflow that raises, or that does not return by its deadline (`workflows.sample_rollout`), costs its sample
and not its group. The group continues with the other samples, and ends as `failed` if fewer than two can be judged. If
every 20th sample fails, only 44% of groups of 16 have none that does.

Over-sampling: a group starts G + k samples and is complete once G have finished; the others are aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from async_grpo.errors import ConfigError, EngineError, RoleFailed, RunEnded, WaitTimeout
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
    attach_rewards,
    describe_problem,
    discard_reason,
    failure_kind,
    find_first_failure,
    replace_failed_sample,
    score_failed_sample,
    score_unverifiable,
)
from rollout_server.engines.base import Truncation, sample_seed
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows.sample_rollout import SampleDeadline, WorkflowRunner
from rollout_server.workflows.session import SampleSession

ADMIT_TIMEOUT_S = 10.0
GIVE_BACK_TIMEOUT_S = 10.0
MIN_RECORDED_WAIT_S = 0.05
"""Waits for a ticket shorter than this are not written to the timeline."""
SUSPECT_EXPIRED_LEASES = 2
"""Number of expired leases that make a group a suspect. Not 1: when a machine fails, all of its groups have one, and
generating those one at a time would starve the trainer."""
MIN_GROUPS_BEFORE_GIVING_UP = 32
"""Minimum number of groups in a row of which every sample failed before the server gives up, for small windows."""
MIN_OVERDUE_GROUPS_BEFORE_GIVING_UP = 4
"""The same for samples that miss their deadline: 32 groups could take longer than the trainer waits."""

log = structlog.get_logger()


class Dispatcher:
    """One server's stream of groups. Reports and administration use `admission`, `counters`, `slots` and `groups`."""

    def __init__(self, context: ServerContext, watcher: WeightWatcher, feeder: TaskFeeder) -> None:
        config = context.config
        rollout = config.rollout
        self._context = context
        self._watcher = watcher
        self._feeder = feeder
        self._workflow_runner = WorkflowRunner(
            context.workflow,
            rollout.workflow,
            SampleDeadline.for_training(config),
            # Time in which the engine sleeps must not count, or a long trainer step would fail every sample.
            clock_s=lambda: watcher.awake_s,
        )
        self.admission = AdmissionGate()
        self.counters = GroupCounters()
        self.slots = SampleSlots(rollout.min_concurrency or rollout.max_concurrency)
        self.groups = GroupsInProgress(
            context.buffer,
            self.slots,
            renew_every_s=config.lease_s / 3,
            save_every_s=rollout.progress_interval_s,
            max_attempts=rollout.max_attempts,
        )
        self.ticket_wait_since_s: float | None = None
        """Start of the present wait for a ticket, in Unix seconds; None if the dispatcher does not wait for one."""
        self._samples_are_seeded = rollout.seeds_samples  # cached: the property is slow, and every sample reads it
        # The engine loads no weights during an evaluation, so a group may also have to wait for the end of one.
        self._weights_timeout_s = config.weights.update_timeout_s + config.eval.timeout_s
        self._failures_in_a_row = 0
        """Number of samples in a row that failed or could not be judged."""
        self._suspect_lock = asyncio.Lock()
        # If max_attempts is small, a group becomes a suspect earlier, so that its last attempt has no other suspect.
        self._suspect_expired_leases = max(1, min(SUSPECT_EXPIRED_LEASES, rollout.max_attempts - 1))

    async def run_until_end(self) -> None:
        """Generate groups until the run has ended, or this server is drained.

        Raises EngineError (the engine died), RoleFailed (too many groups in a row failed), WaitTimeout (published
        weights do not arrive).
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(self.groups.run_renewing()),
                    tasks.create_task(self.groups.run_saving()),
                ]
                try:
                    await self._admit_groups(tasks)
                    if self.admission.is_draining:
                        await self._wait_for_groups()
                    else:
                        await self._drop_groups()
                finally:
                    # Take the partials before anything is cancelled, because cancelled requests lose their tokens. If
                    # the task of a group has raised, the others are cancelled already: before that, `_generate_sample`
                    # has taken the partials.
                    self.groups.snapshot_partials()
                for task in [*loops, *self._running_tasks()]:
                    task.cancel()
        finally:
            await self._give_back_groups()

    async def _wait_for_groups(self) -> None:
        """Wait until all groups have ended, for at most drain_timeout_s, or until `stop_now`."""
        timeout_s = self._context.config.rollout.http.drain_timeout_s
        stop_now = asyncio.create_task(self.admission.stop_now.wait())
        try:
            async with asyncio.timeout(timeout_s):
                while not stop_now.done() and (running := self._running_tasks()):
                    await asyncio.wait([stop_now, *running], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            log.warning("groups did not finish before the drain timeout; saving their partials", waited_s=timeout_s)
        finally:
            stop_now.cancel()

    def _running_tasks(self) -> list[asyncio.Task[None]]:
        return [group.task for group in self.groups if group.task is not None and not group.task.done()]

    async def _drop_groups(self) -> None:
        """Drop all unfinished groups: the run has ended, so nobody needs them. Makes no calls to the buffer."""
        for group in self.groups:
            await self.groups.end_group(group, Drop())

    async def _give_back_groups(self) -> None:
        """Give back all remaining groups, for at most GIVE_BACK_TIMEOUT_S. The leases of the others expire."""
        try:
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                await asyncio.gather(*(self.groups.end_group(group, GiveBack()) for group in self.groups))
        except TimeoutError:
            log.warning(
                "the buffer did not accept all groups in time; their leases will expire", waited_s=GIVE_BACK_TIMEOUT_S
            )

    async def _admit_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Lease tickets and start their groups, until the run has ended or this server is drained."""
        while not self.admission.is_draining:
            try:
                groups = await self.admission.run_until_draining(self._lease_groups()) or []
            except RunEnded:
                return
            for group in groups:
                if self.admission.is_open:
                    group.task = tasks.create_task(self._run_group(group), name=f"group {group.ticket.seq}")
                else:  # the ticket arrived after a pause, or while the server drains
                    await self.groups.end_group(group, GiveBack())

    async def _lease_groups(self) -> list[GroupRollout]:
        """Lease groups for all free slots in one request, so that a slow buffer costs one wait and not one per group.

        Returns fewer groups if the buffer has no more, and none after ADMIT_TIMEOUT_S. Raises RunEnded.
        """
        await self.slots.wait_for_room()
        await self.admission.wait_until_open()

        config = self._context.config
        size = config.group_size + config.rollout.oversample
        self.ticket_wait_since_s = time.time()
        try:
            tickets = await self._context.buffer.admit_groups(
                self.slots.groups_to_fill_free_slots(size),
                holder=self._context.holder,
                timeout_s=ADMIT_TIMEOUT_S,
                # The buffer shares the room in the window among servers in proportion to their capacity.
                slots=self.slots.groups_to_fill_all_slots(size),
            )
        except WaitTimeout:
            return []
        finally:
            self._record_ticket_wait(self.ticket_wait_since_s)
            self.ticket_wait_since_s = None
            self._feeder.request_top_up()
        # No await between the lease and `add_group`: if we were cancelled there, nobody would give the tickets back.
        return [self._add_group(ticket) for ticket in tickets]

    def _add_group(self, ticket: Ticket) -> GroupRollout:
        config = self._context.config
        group = GroupRollout.from_ticket(ticket, config.group_size, oversample=config.rollout.oversample)
        self.groups.add_group(group)
        if not self._is_suspect(group):  # a suspect reserves its slots in `_run_group`
            self.groups.reserve_slots(group)
        return group

    def _is_suspect(self, group: GroupRollout) -> bool:
        return group.ticket.expired_leases >= self._suspect_expired_leases

    def _record_ticket_wait(self, since_s: float) -> None:
        now_s = time.time()
        if now_s - since_s >= MIN_RECORDED_WAIT_S:
            self._context.logger.record_wait("ticket", since_s, now_s)

    async def _run_group(self, group: GroupRollout) -> None:
        """Run a group from its ticket to its end. Raises EngineError, RoleFailed, WaitTimeout."""
        try:
            await self._watcher.wait_for_version(group.required_version, self._weights_timeout_s)
            if self._is_suspect(group):
                async with self._suspect_lock:
                    # Reserve its slots only now. Suspects that queue for the lock would otherwise occupy slots, and the
                    # engine would run empty.
                    self.groups.reserve_slots(group)
                    await self._generate_group(group)
            else:
                await self._generate_group(group)
            await self._finish_group(group)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # cancelled by the dispatcher or by `GroupsInProgress`, which also ends the group
            log.error("a group's task was cancelled by something that it awaits", seq=group.ticket.seq)

        # Safety net: if the group were still in progress after its task, its lease would be renewed forever. Its
        # lease counts as expired, so that a group to which this always happens ends as `failed`.
        if group in self.groups:
            group.counts_as_expired = True
            await self.groups.end_group(group, GiveBack())

    async def _generate_group(self, group: GroupRollout) -> None:
        """Generate samples until the group is complete. Raises EngineError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [tasks.create_task(self._generate_sample(group, index)) for index in group.remaining_indices]
                for sample in asyncio.as_completed(samples):
                    await sample
                    if not group.remaining_indices:
                        break
                for task in samples:
                    task.cancel()
        except ExceptionGroup as errors:
            raise root_cause(errors) from None

    async def _generate_sample(self, group: GroupRollout, index: int) -> None:
        try:
            async with self.slots.occupy_slot():
                session = self._open_session(group, index)
                group.sessions[index] = session
                try:
                    sample = await self._workflow_runner.generate_sample(group.ticket.task, session)
                except EngineError:
                    raise
                except Exception as error:
                    # Workflows and their tools may raise anything. It costs this sample alone.
                    cause = root_cause(error)
                    sample = session.end_early(failure_kind(cause), f"{type(cause).__name__}: {cause}")
                group.store_sample(index, sample)
                del group.sessions[index]  # not after an error: partials are read from the session
        except EngineError:
            # Do both before this error cancels the other samples and groups. Afterwards their tokens are lost, and it
            # is no longer known which of them had requests in the engine.
            self.groups.snapshot_partials()
            self.groups.expire_leases_in_engine()
            raise
        finally:
            self.groups.release_reserved_slot(group)

    def _open_session(self, group: GroupRollout, index: int) -> SampleSession:
        ticket = group.ticket
        config = self._context.config
        seed = None
        if self._samples_are_seeded:
            seed = sample_seed(config.seed, "train", ticket.task.index, index, ticket.attempt)
        return SampleSession(
            self._context.engine,
            f"{ticket.seq}-{ticket.attempt}-{index}",
            ticket.task.prompt_ids(),
            seed=seed,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            prior=group.samples[index],
            # After some attempts new weights no longer interrupt it, or a long sample might never end.
            interruptible=ticket.attempt <= config.rollout.max_interruptions,
            index=index,
            vocabulary=self._context.vocabulary,
            truncation=Truncation.from_config(config.sampling),
        )

    async def _finish_group(self, group: GroupRollout) -> None:
        """Insert the group, discard it, or give it back if the engine interrupted samples. Raises RoleFailed."""
        if group.remaining_indices:
            self.counters.groups["interrupted"] += 1
            await self.groups.end_group(group, GiveBack())
            return

        samples = [self._check_sample(sample) for sample in group.ended_samples()]
        samples = await self._judge_samples(group, samples)
        reason = discard_reason(samples, dynamic_sampling=self._context.config.rollout.dynamic_sampling)
        if reason is None:
            has_ended = await self._insert_group(group, samples)
        else:
            has_ended = await self._discard_group(group, samples, reason)
        if has_ended:  # otherwise the lease was lost, and the group is another server's by now
            self._check_failures(samples)

    def _check_sample(self, sample: Sample) -> Sample:
        """Return the sample, or a failed one without tokens if it cannot be trained."""
        problem = describe_problem(sample)
        if problem is None:
            return sample
        reason = f"{self._context.name} generated an invalid sample: {problem}"
        return replace_failed_sample(sample, "workflow_error", reason)

    async def _judge_samples(self, group: GroupRollout, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with their rewards, and count those without by the kind of failure."""
        config = self._context.config
        ends = config.rollout.ends
        reward_names = [function.name for function in config.rewards.functions]
        task = group.ticket.task
        finished = [RewardInput.from_sample(sample, task) for sample in samples if not sample.unverifiable]
        results = iter(await self._context.pool.judge(finished))

        judged: list[Sample] = []
        failures: Counter[str] = Counter()
        for sample in samples:
            if sample.unverifiable:  # its workflow failed, so there is nothing to judge
                failures[sample.finish_reason] += 1
                judged.append(score_failed_sample(sample, ends, reward_names))
            else:
                # The length rule comes last: it may mask a sample that has got reward 0 for its verifier's failure.
                result = score_unverifiable(next(results), ends, reward_names)
                result = apply_length_rule(sample, result, config)
                failures.update(failure.kind for failure in result.failures.values())
                judged.append(attach_rewards(sample, result))

        for kind, count in failures.items():
            self.counters.reward_failures[kind] += count
            await self._context.board.add_to_counter(f"{REWARD_FAILURES_PREFIX}{kind}", count)
        failed = [sample.unverifiable for sample in samples if sample.unverifiable]
        if failed:
            log.warning("samples failed", seq=group.ticket.seq, samples=len(failed), why=failed[0])
        return judged

    async def _insert_group(self, group: GroupRollout, samples: list[Sample]) -> bool:
        """Insert the group. Returns False if its lease was lost."""
        finished = group.build_group(self._context.name, samples)
        if not await self.groups.end_group(group, Insert(finished)):
            return False
        self.counters.count_inserted(samples)
        self._context.logger.record_group(finished, version=self._context.engine.version)
        return True

    async def _discard_group(self, group: GroupRollout, samples: Sequence[Sample], reason: ReleaseReason) -> bool:
        """Discard the group. Returns False if its lease was lost."""
        if not await self.groups.end_group(group, Discard(reason)):
            return False
        self.counters.groups[reason.value] += 1
        if reason is not ReleaseReason.FILTERED:
            log.warning("group discarded", seq=group.ticket.seq, reason=reason.value, why=find_first_failure(samples))
        return True

    def _check_failures(self, samples: Sequence[Sample]) -> None:
        """Count samples in a row that failed or could not be judged. Raises RoleFailed or ConfigError if too many.

        Samples that get reward 0 by `rollout.ends` count too: a workflow that always fails must not go unnoticed.
        """
        if not all(sample.unverifiable for sample in samples):
            self._failures_in_a_row = 0
            return

        self._failures_in_a_row += len(samples)
        missed_deadline = any(sample.finish_reason == "deadline" for sample in samples)
        if self._failures_in_a_row < self._max_failures_in_a_row(missed_deadline):
            return

        message = (
            f"{self._failures_in_a_row} samples in a row failed or could not be judged, the last because: "
            f"{find_first_failure(samples)}. Training cannot continue. Fix the workflow or the verifier"
        )
        # ConfigError, so that the supervisor does not restart us: a workflow or verifier with which no group has ever
        # succeeded would fail again. A missed deadline may be due to a slow tool or machine, so a restart may help.
        if not missed_deadline and not self.counters.groups["inserted"]:
            raise ConfigError(message)
        raise RoleFailed(message)

    def _max_failures_in_a_row(self, missed_deadline: bool) -> int:
        """Number of failed samples in a row after which the server gives up: those of a whole staleness window.

        If samples miss their deadline, those that run at once: another round could take longer than the trainer waits.
        """
        config = self._context.config
        if missed_deadline:
            return max(self.slots.capacity, MIN_OVERDUE_GROUPS_BEFORE_GIVING_UP * config.group_size)
        return config.group_size * max(config.staleness_window.capacity, MIN_GROUPS_BEFORE_GIVING_UP)

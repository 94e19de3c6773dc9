"""The replay buffer and the run board: the interfaces and what they guarantee.

    put_tasks --> WAITING --admit--> INFLIGHT --insert--> READY --take--> TAKEN --release--> RELEASED(trained)
                                      |    ^               ^  |             |
                       lease expired  +----+               |  |             +-- uses left: READY again
                       discard        +--> RELEASED(reason)|  +-- too old --> RELEASED(stale)
                       too old        +--> RELEASED(expired)

`InMemoryBuffer` and `RedisBuffer` implement it, and one contract suite tests both.

Waits:

- `admit_groups` waits for a task and for room in the staleness window that is not reserved for other waiting servers.
  It also waits for the trainer if the ratio of uses to inserts is limited, and for memory under a quota. It is
  unblocked by `release_batch`, `discard_group`, `put_tasks`, `take_batch`, `commit_checkpoint`, `expire_leases`, and by
  a lease that expires.
- `take_batch` waits until the groups that its selector wants are READY. `insert_group` and `discard_group` unblock it.

Guarantees (S, P, selector, on_stale, max_uses: `ReplayPolicy`):

- 0 <= active = admitted - released <= (S + 1) * P, at every moment.
- Every admitted group is released exactly once, with one `ReleaseReason`.
- Every call may be repeated after a lost reply and changes nothing the second time.
- No token that gets a gradient is older than `ReplayPolicy.age_bound` when its batch is taken.
- The groups of a batch are in ticket order; if it was taken in parts, in ticket order within each part.
- Steps after the last committed checkpoint are retained: a trainer that resumes at version v gets exactly the batches
  that were trained after v again (`Batch.replayed`).

The run board holds the few facts that the processes of a run share besides the buffer: the address of the weight
publisher, the progress of a trainer that repeats steps after a restart, a heartbeat per rollout server, counters that
survive restarts, evaluation results, and the probe samples on which the trainer compares log-probabilities.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from async_grpo.errors import AsyncGrpoError
from async_grpo.staleness import ReplayPolicy
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket
from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ReplayProgress, ServerBeat
from buffer.capacity import MemoryQuota

STATS_MAX_AGE_S = 1.0
STATS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class BufferStats:
    """A consistent snapshot of a run's counters. The field names are keys of JSON reports."""

    epoch: int
    version: int
    tasks_put: int
    waiting: int
    inflight: int
    ready: int
    taken: int
    admitted: int
    released: dict[str, int] = field(default_factory=dict)
    """Number of groups that ended, per `ReleaseReason`."""
    released_by_length: dict[str, int] = field(default_factory=dict)
    """"<reason>:<n>" -> number of groups whose longest completion had at most n and more than n / 2 tokens."""
    max_staleness: int = 0
    staleness: int = 0
    """Effective S."""
    groups_per_step: int = 1
    horizon: int = 0
    selector: str = "fifo"
    selector_window: int = 1
    inserted: int = 0
    """Number of groups that ever became READY."""
    used: int = 0
    """Number of uses: a group counts each time it is taken."""
    ended: bool = False
    kept: int = 0
    """Number of groups whose payload is stored: READY, TAKEN, and those that no committed checkpoint contains."""
    stored_bytes: int = 0
    """Size of these payloads. `InMemoryBuffer` measures it only under a quota."""
    room_bytes: int = 0
    """Bytes that the run's quota leaves for payloads; 0 without a quota."""
    group_bytes: int = 0
    """Maximum expected size of a group; 0 without a quota."""

    @property
    def released_total(self) -> int:
        """Number of groups that ended, for any reason."""
        return sum(self.released.values())

    @property
    def active(self) -> int:
        """Number of groups that occupy a slot of the staleness window."""
        return self.admitted - self.released_total

    @property
    def capacity(self) -> int:
        """Maximum number of active groups: (effective S + 1) * P."""
        return (self.staleness + 1) * self.groups_per_step

    @property
    def is_limited_by_quota(self) -> bool:
        """True if the quota leaves no room for another group."""
        return not MemoryQuota(0, self.room_bytes, self.group_bytes).admits_group(self.stored_bytes, self.inflight)

    @property
    def balanced(self) -> bool:
        """True if the counters match the sizes of the sets that they count."""
        return self.active == self.inflight + self.ready + self.taken


class CachedStats:
    """The buffer's statistics, requested at most once per STATS_MAX_AGE_S seconds."""

    def __init__(self) -> None:
        self.stats: BufferStats | None = None
        """The latest statistics. None before the first request, and if the buffer did not answer the last one."""
        self._requested_s = -STATS_MAX_AGE_S
        self._lock = asyncio.Lock()

    async def refresh(self, request_stats: Callable[[], Awaitable[BufferStats]]) -> None:
        """Request new statistics if the last ones are too old. Raises nothing: after a failure, `stats` is None."""
        async with self._lock:
            if time.monotonic() - self._requested_s < STATS_MAX_AGE_S:
                return
            try:
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    self.stats = await request_stats()
            except (AsyncGrpoError, TimeoutError):
                self.stats = None

            # Also after a failure: retrying on every call would block each caller for STATS_TIMEOUT_S.
            self._requested_s = time.monotonic()


class RunBoard(Protocol):
    """Facts that the processes of a run share. `InMemoryBoard` and `RedisBoard` implement it."""

    async def set_publisher(self, address: PublisherAddress) -> None:
        """Announce the address of a new trainer's weight publisher. An older epoch never replaces a newer one."""
        ...

    async def publisher_address(self) -> PublisherAddress | None:
        """Return the address of the newest publisher; None before the first."""
        ...

    async def report_replay(self, progress: ReplayProgress) -> None:
        """Report how far a restarted trainer has repeated its steps. An older epoch never replaces a newer one."""
        ...

    async def replay_progress(self) -> ReplayProgress | None:
        """Return the last report of the newest trainer; None before the first."""
        ...

    async def announce_server(self, beat: ServerBeat, *, ttl_s: float) -> None:
        """Announce that a rollout server is alive. The entry expires after `ttl_s` seconds."""
        ...

    async def live_servers(self) -> list[ServerBeat]:
        """Return the newest heartbeat of each live rollout server, sorted by name."""
        ...

    async def add_to_counter(self, name: str, amount: int) -> None:
        """Add `amount` to the run's counter `name`."""
        ...

    async def counters(self) -> dict[str, int]:
        """Return all counters by name."""
        ...

    async def claim_job(self, job: str, holder: str, *, ttl_s: float) -> bool:
        """Claim a job that only one process may do, for `ttl_s` seconds. False if another process has claimed it.

        The holder renews its claim by claiming again.
        """
        ...

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        """Publish an evaluation result. The first result per version stays."""
        ...

    async def evaluations(self) -> list[Evaluation]:
        """Return all evaluation results, sorted by version."""
        ...

    async def put_probe(self, probe: Probe) -> None:
        """Publish samples of one version with their behaviour log-probabilities. Only the newest probe is retained."""
        ...

    async def wait_for_probe(self, version: int, *, timeout_s: float) -> Probe:
        """Wait for the probe of `version`. Raises WaitTimeout if it is late, or if a newer probe has replaced it."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class Resume:
    """Result of a rollback. The batches from the trainer's checkpoint up to `head_version` are replayed."""

    epoch: int
    """Epoch of the trainer that takes over."""
    head_version: int
    """Newest version that was ever published."""
    lost_steps: int = 0
    """Steps before the newest committed checkpoint whose groups are deleted; they are trained on new groups."""


class ReplayBuffer(Protocol):
    """The buffer of one run. Every wait that does not succeed ends with WaitTimeout or RunEnded."""

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        """Append tasks to the stream. Returns the next index expected.

        Tasks below that index are already stored and are skipped, so several feeders may race. Raises StreamGap if the
        first index is beyond the next one expected, and ValueError if the indices are not consecutive.
        """
        ...

    async def admit_groups(
        self, limit: int, *, holder: str, timeout_s: float, slots: int | None = None
    ) -> list[Ticket]:
        """Lease 1 to `limit` groups: first those without a holder, lowest sequence first, then new ones.

        A group that is leased again gets the next attempt number and its partial, or restarts at the newest version if
        there is no partial. Two kinds of group end instead: those with max_attempts expired leases, as `failed`, and,
        under on_stale drop, those whose partial is older than S, as `expired`.

        While several servers wait, each gets its fair share of the room (`buffer.fair_share`). `slots`: number of
        groups that this server can generate concurrently, of which `limit` are free (default: all of them).

        A cancelled call gives back the groups that it was granted. Raises RunEnded, and WaitTimeout if nothing could be
        admitted.
        """
        ...

    async def renew_leases(self, tickets: Sequence[Ticket]) -> list[int]:
        """Renew leases. Returns the sequences whose lease is lost; the holder must stop generating them."""
        ...

    async def save_partial(self, ticket: Ticket, partial: Partial) -> None:
        """Store the tokens generated so far and renew the lease. Raises LeaseLost."""
        ...

    async def give_back(self, ticket: Ticket, *, count_as_expired: bool = False) -> None:
        """End the lease now, so that another server can continue. Idempotent; a lost lease is no error.

        `count_as_expired`: count this lease in `Ticket.expired_leases`, because the group may have killed its engine.
        """
        ...

    async def expire_leases(self, name: str, *, life: int) -> None:
        """Expire the leases that the server `name` took in its lives up to `life` (`buffer.holders`), which are over.

        Idempotent, even if the call arrives late: leases of a later life stay. As with any expired lease, the attempt
        counts, and an insert still succeeds until another server takes over.
        """
        ...

    async def insert_group(self, ticket: Ticket, group: Group) -> None:
        """INFLIGHT -> READY. Idempotent. Raises LeaseLost if another attempt holds the group.

        An expired lease is valid until another holder takes over, so that finished work is not lost.
        """
        ...

    async def discard_group(self, ticket: Ticket, reason: ReleaseReason) -> None:
        """INFLIGHT -> RELEASED(reason), which frees the slot. Idempotent.

        Raises LeaseLost, and ValueError for the reason `trained`.
        """
        ...

    async def take_batch(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        """Take P groups for the step `version` -> `version + 1`, all or nothing, in ticket order.

        Another call for the same version (after a lost reply or `rollback`) returns the same groups, even after
        `end_run`. Groups that are too old for the step end first: READY ones as `stale`, or as `trained` if they were
        trained before, unfinished ones as `expired`. Raises Fenced, WaitTimeout, RunEnded.
        """
        ...

    async def take_batch_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        """Take further groups for the step: at least one, and as many as the selector allows now.

        `have`: number of groups of the step that the caller has. `Batch.missing`: number still to come. Groups that
        were taken stay taken: later calls, including `take_batch` and those of a trainer that takes over and starts
        with `have` 0, return them in the same order before any others. A selector that does not preserve ticket order
        (`ReplayPolicy.preserves_ticket_order`) chooses whole batches, so all P groups arrive together.

        Raises Fenced, WaitTimeout, RunEnded.
        """
        ...

    async def release_batch(self, batch: Batch) -> None:
        """TAKEN -> RELEASED(trained) for every group of the batch, or READY again if it has uses left.

        Call it after `publish_version(batch.version + 1)`. In the other order, a group admitted into the freed slots
        would carry the old version, and could be trained when it is one step older than S. The payloads stay until
        `commit_checkpoint`. Idempotent. Raises Fenced.
        """
        ...

    async def publish_version(self, *, epoch: int, version: int) -> None:
        """Announce the newest policy version, which tickets carry from now on. An older version changes nothing.

        Raises Fenced.
        """
        ...

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        """Delete the payloads of the steps before `version`, whose checkpoint is on disk. Raises Fenced."""
        ...

    async def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        """Let a trainer take over at `version` (0 at the first start).

        Starts a new epoch, which fences all older ones. Batches taken for steps >= `version` will be delivered again.
        Batches of earlier steps are in the trainer's checkpoint: those not released yet are released as `trained`. A
        run that has ended continues if steps are left.

        Raises StepsForgotten for a version below a committed checkpoint, whose batches are deleted. With `accept_loss`
        generation restarts there instead: active groups end (as `stale` or `expired`), batches taken for later steps
        are deleted, and the version falls to `version`.
        """
        ...

    async def update_policy(self, policy: ReplayPolicy) -> None:
        """Replace the policy of a live run. Groups that are taken stay taken.

        A smaller window admits nothing until enough groups are released. P must not change while a step is taken in
        parts: its batch keeps its size, which may not fit into a smaller window.
        """
        ...

    async def set_staleness(self, *, epoch: int, staleness: int) -> None:
        """Change the effective S of admission, bounded by `ReplayPolicy.smallest_staleness` and max_staleness.

        A larger S admits groups immediately. A smaller one admits nothing until enough groups are released; groups
        already admitted keep the bound of their admission. Raises Fenced.
        """
        ...

    async def end_run(self) -> None:
        """End the run: every wait ends with RunEnded."""
        ...

    async def stats(self) -> BufferStats:
        """Return a consistent snapshot of the counters."""
        ...

    async def aclose(self) -> None:
        """Close connections; the data stay."""
        ...

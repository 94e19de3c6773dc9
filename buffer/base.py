"""The contract of the replay buffer; `InMemoryBuffer` and `RedisBuffer` both keep it.

    put_tasks --> WAITING --admit--> INFLIGHT --insert--> READY --take--> TAKEN --release--> RELEASED(trained)
                                      |    ^               ^  |             |
                       lease expired  +----+               |  |             +-- uses left: READY again
                       discard        +--> RELEASED(reason)|  +-- too old --> RELEASED(stale)
                       too old        +--> RELEASED(expired)

Who waits for what:

- `admit` waits for a task and for room in the staleness window that is not the share of other servers, and where the
  ratio of uses to inserts is limited also for the trainer, under a quota also for memory. `release`, `discard`,
  `put_tasks`, `take`, `commit_checkpoint`, `expire_leases` and an expiring lease unblock it.
- `take` waits until the groups that its selector wants are READY. `insert` and `discard` unblock it.

Guarantees (S, P, selector, on_stale, max_uses: `ReplayPolicy`):

- 0 <= active = admitted - released <= (S + 1) * P, at every moment.
- Every admitted group is released exactly once, with one `ReleaseReason`.
- Every call may be repeated after a lost reply without changing anything twice.
- No token that gets a gradient is older than `ReplayPolicy.age_bound` when its batch is taken.
- The groups of a batch are in ticket order; if it was taken in parts, in ticket order within each part.
- Steps after the last committed checkpoint are kept: a trainer that resumes at version v gets exactly the batches
  again that were trained after v (`Batch.replayed`).

The run board holds the few facts that the processes of a run share beside the buffer: where the publisher of the
weights listens, how far a trainer that resumed repeats its steps, a heartbeat of every rollout server, counters that
survive restarts, results of evaluations, and the probe samples that the trainer compares log-probabilities with.
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
    """A consistent snapshot of a run's counters."""

    epoch: int
    version: int
    tasks_put: int
    waiting: int
    inflight: int
    ready: int
    taken: int
    admitted: int
    released: dict[str, int] = field(default_factory=dict)
    """Number of groups that ended, for every `ReleaseReason`."""
    released_by_length: dict[str, int] = field(default_factory=dict)
    """"<reason>:<n>": groups whose longest completion had at most n tokens and more than n / 2."""
    max_staleness: int = 0
    staleness: int = 0
    """Effective S."""
    groups_per_step: int = 1
    horizon: int = 0
    selector: str = "fifo"
    selector_window: int = 1
    inserted: int = 0
    """Groups that ever became READY."""
    used: int = 0
    """Groups taken; a group counts each time that it was taken."""
    ended: bool = False
    kept: int = 0
    """Groups whose payload is kept: READY, TAKEN, and those that no committed checkpoint contains."""
    stored_bytes: int = 0
    """Size of their payloads. The buffer of one process knows it only with a quota."""
    room_bytes: int = 0
    """What the run's quota leaves for payloads; 0: it has no quota."""
    group_bytes: int = 0
    """The most that a group is expected to take; 0 without a quota."""

    @property
    def released_total(self) -> int:
        """Number of groups that ended, for any reason."""
        return sum(self.released.values())

    @property
    def active(self) -> int:
        """Groups that hold a slot of the staleness window."""
        return self.admitted - self.released_total

    @property
    def capacity(self) -> int:
        """(effective S + 1) * P: groups that may be active."""
        return (self.staleness + 1) * self.groups_per_step

    @property
    def held_by_quota(self) -> bool:
        """Whether the quota leaves no room for one more group."""
        return not MemoryQuota(0, self.room_bytes, self.group_bytes).admits(self.stored_bytes, self.inflight)

    @property
    def balanced(self) -> bool:
        """Whether the counters equal the sizes of the sets they count."""
        return self.active == self.inflight + self.ready + self.taken


class CachedStats:
    """The counters, asked for at most once in STATS_MAX_AGE_S seconds."""

    def __init__(self) -> None:
        self.stats: BufferStats | None = None
        """None if the buffer did not answer, or has not been asked."""
        self._at_s = -STATS_MAX_AGE_S
        self._asking = asyncio.Lock()

    async def refresh(self, ask: Callable[[], Awaitable[BufferStats]]) -> None:
        """Ask, unless the last answer is young enough. Raises nothing: without an answer, `stats` becomes None."""
        async with self._asking:
            if time.monotonic() - self._at_s < STATS_MAX_AGE_S:
                return
            try:
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    self.stats = await ask()
            except (AsyncGrpoError, TimeoutError):
                self.stats = None
            self._at_s = time.monotonic()


class RunBoard(Protocol):
    """Facts that the processes of a run share. `InMemoryBoard` and `RedisBoard` implement it."""

    async def set_publisher(self, address: PublisherAddress) -> None:
        """Announce where the publisher of a new trainer listens. An older epoch never replaces a newer one."""
        ...

    async def publisher(self) -> PublisherAddress | None:
        """The address of the newest publisher; None if there was none yet."""
        ...

    async def report_replay(self, progress: ReplayProgress) -> None:
        """Report how far the trainer has repeated its steps after a restart. An older epoch never replaces a newer
        one."""
        ...

    async def replay_progress(self) -> ReplayProgress | None:
        """The last report of the newest trainer; None if there was none yet."""
        ...

    async def beat(self, beat: ServerBeat, *, ttl_s: float) -> None:
        """Announce that a rollout server is alive. The board forgets it after `ttl_s` seconds."""
        ...

    async def servers(self) -> list[ServerBeat]:
        """The newest heartbeat of each live rollout server, sorted by name."""
        ...

    async def count(self, name: str, amount: int) -> None:
        """Add `amount` to the counter `name` of the run."""
        ...

    async def counters(self) -> dict[str, int]:
        """All counters, by name."""
        ...

    async def claim(self, what: str, holder: str, *, ttl_s: float) -> bool:
        """Claim a job that only one process may do, for `ttl_s` seconds. False if another process holds it.
        The holder renews its claim by claiming again."""
        ...

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        """Publish a result. Each version has one: the first stays."""
        ...

    async def evaluations(self) -> list[Evaluation]:
        """All results, sorted by version."""
        ...

    async def put_probe(self, probe: Probe) -> None:
        """Publish samples of one version with their behaviour log-probabilities. Only the newest probe is kept."""
        ...

    async def probe(self, version: int, *, timeout_s: float) -> Probe:
        """Wait for the probe of `version`. Raises WaitTimeout if it does not come, or a newer one has replaced it."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class Resume:
    """What a trainer learns when it takes over: its epoch, and the newest version that was ever published.

    The batches between the version of its checkpoint and `head_version` are replayed.
    """

    epoch: int
    head_version: int
    lost_steps: int = 0
    """Steps before the newest committed checkpoint whose groups are gone; they are trained again on new groups."""


class ReplayBuffer(Protocol):
    """The buffer of one run. Every wait that does not succeed ends with WaitTimeout or RunEnded."""

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        """Append tasks to the stream; returns the next index expected.

        Tasks below that index are there already and are skipped, so several feeders may race. Raises StreamGap if the
        first index is beyond the next one expected, and ValueError if the indices are not consecutive.
        """
        ...

    async def admit(self, limit: int, *, holder: str, timeout_s: float, slots: int | None = None) -> list[Ticket]:
        """Lease 1 to `limit` groups: first those that lost their holder, lowest sequence first, with the attempt
        raised and the partial attached; then new ones.

        While several servers wait, each gets its share of the room (`buffer.fair_share`). `slots`: groups that this
        server can work on at once, of which `limit` are free (default: all of them).
        A group with max_attempts strikes is released as `failed` instead. An expired lease is a strike, and so is a
        `give_back` that says so. Under on_stale drop, a group whose partial is older than S is released as `expired`. A
        group without a partial restarts at the newest version. A cancelled call gives back what it was granted. Raises
        RunEnded, and WaitTimeout if nothing could be admitted.
        """
        ...

    async def heartbeat(self, tickets: Sequence[Ticket]) -> list[int]:
        """Renew leases. Returns the sequences that the holder has lost and must stop working on."""
        ...

    async def progress(self, ticket: Ticket, partial: Partial) -> None:
        """Store what is generated so far and renew the lease. Raises LeaseLost."""
        ...

    async def give_back(self, ticket: Ticket, *, strike: bool = False) -> None:
        """End the lease now, so that another server can continue. Idempotent; a lost lease is no error.

        `strike`: count this attempt, as an expired lease counts, because the group may have killed its engine.
        """
        ...

    async def expire_leases(self, name: str, *, life: int) -> None:
        """Expire now the leases that the server `name` took in lives up to `life` (`buffer.holders`), because they are
        over. Idempotent, and also if it arrives late: leases of a later life stay.

        As with any lease that expires, the attempt counts, and an insert still succeeds until another server takes
        over.
        """
        ...

    async def insert(self, ticket: Ticket, group: Group) -> None:
        """INFLIGHT -> READY. Idempotent. Raises LeaseLost if another attempt holds the group.

        An expired lease still counts until another holder takes over, so that finished work is kept.
        """
        ...

    async def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        """INFLIGHT -> RELEASED(reason), which frees the slot. Idempotent. Raises LeaseLost, and ValueError for the
        reason `trained`."""
        ...

    async def take(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        """Take P groups for the step `version` -> `version + 1`, all or nothing, in ticket order.

        Another call for the same version (after a lost reply or `rollback`) returns the same groups, even after `end`.
        Groups that are too old for the step end first: READY ones as `stale`, or as `trained` if they were trained
        before, unfinished ones as `expired`. Raises Fenced, WaitTimeout, RunEnded.
        """
        ...

    async def take_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        """Take further groups for the step: at least one, and as many as the selector allows now.

        `have`: how many groups of the step the caller has. `Batch.missing` is the number still to come. What was taken
        stays taken: later calls, also of a trainer that takes over and begins at 0, and `take` return the same groups
        in the same order before any others. A selector that does not walk (`ReplayPolicy.walks`) chooses whole batches,
        so that all P come at once. Raises as `take` does.
        """
        ...

    async def release(self, batch: Batch) -> None:
        """TAKEN -> RELEASED(trained) for every group of the batch, or READY again if it has uses left. The payloads
        stay until `commit_checkpoint`.

        Call it after `publish_version(batch.version + 1)`. Idempotent. Raises Fenced.
        """
        ...

    async def publish_version(self, *, epoch: int, version: int) -> None:
        """Announce the newest policy version, which tickets admitted from now on carry. A version below the newest
        changes nothing. Raises Fenced."""
        ...

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        """Forget the payloads of the steps before `version`, whose checkpoint is safe. Raises Fenced."""
        ...

    async def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        """Let a trainer take over at `version` (0 at the first start).

        A new epoch begins and fences all older ones. Batches taken for steps >= `version` will be delivered again.
        Batches of earlier steps are in the trainer's checkpoint: those not released yet are released as `trained`. A
        run that has ended continues if steps are left.

        Raises StepsForgotten for a version below a committed checkpoint, whose batches are gone. With `accept_loss`
        generation starts again there instead: active groups end (as `stale` or `expired`), batches taken for later
        steps are forgotten, and the version falls to `version`.
        """
        ...

    async def update_admission(self, policy: ReplayPolicy) -> None:
        """Replace the policy of a live run. Groups that are taken stay taken, and a smaller window admits nothing until
        enough groups are released. P must stay while a step is taken in parts: its batch keeps its size, for which a
        smaller window may have no room."""
        ...

    async def set_staleness(self, *, epoch: int, staleness: int) -> None:
        """Change the effective S of admission, kept between `ReplayPolicy.least_staleness` and max_staleness.

        A larger one admits at once. A smaller one admits nothing until enough groups are released; what was admitted
        keeps the bound of its admission, and ends as it would have. Raises Fenced.
        """
        ...

    async def end(self) -> None:
        """End the run: every wait ends with RunEnded."""
        ...

    async def stats(self) -> BufferStats:
        """A consistent snapshot of the counters."""
        ...

    async def aclose(self) -> None:
        """Close connections; the data stay."""
        ...

"""The contract of the replay buffer; `InMemoryBuffer` and `RedisBuffer` both keep it.

    put_tasks --> WAITING --admit--> INFLIGHT --insert--> READY --take--> TAKEN --release--> RELEASED(trained)
                                      |    ^               ^  |             |
                       lease expired  +----+               |  |             +-- uses left: READY again
                       discard        +--> RELEASED(reason)|  +-- too old --> RELEASED(stale)
                       too old        +--> RELEASED(expired)

Who waits for what:

- `admit` waits for room in the staleness window, for a task and, where the ratio of uses to inserts is
  limited, for the trainer; `release`, `discard`, `put_tasks`, `take` and a lease that expires unblock it.
- `take` waits until the groups that its selector wants are READY; `insert` and `discard` unblock it.

Guarantees (S, P, selector, on_stale, max_uses: `ReplayPolicy`):

- 0 <= active = admitted - released <= (S + 1) * P, at every moment.
- Every admitted group is released exactly once, with one `ReleaseReason`; every call may be
  repeated after a lost reply without changing anything twice.
- No token that gets a gradient is older than `ReplayPolicy.age_bound` when its batch is taken.
- A batch comes in ticket order; one that was taken in parts, part after part.
- Steps after the last committed checkpoint are kept: a trainer that resumes at version v takes
  exactly the batches again that were trained after v (`Batch.replayed`).

The run board: the few facts that the processes of a run tell each other beside the buffer.

- where the publisher of the weights listens
- a heartbeat of every rollout server, with its load and what it waits for
- counters that survive restarts
- results of evaluations, and the probe samples that the trainer compares log-probabilities with
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from async_grpo.staleness import ReplayPolicy
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket
from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ServerBeat
from buffer.stats import BufferStats


class RunBoard(Protocol):
    """All calls are coroutines; `InMemoryBoard` and `RedisBoard` keep this contract."""

    async def set_publisher(self, address: PublisherAddress) -> None:
        """The publisher of a (new) trainer listens here; an older epoch never replaces a newer one."""
        ...

    async def publisher(self) -> PublisherAddress | None:
        """Where the newest publisher listens; None before the first."""
        ...

    async def beat(self, beat: ServerBeat, *, ttl_s: float) -> None:
        """State that a rollout server lives; forgotten after ttl_s."""
        ...

    async def servers(self) -> list[ServerBeat]:
        """Rollout servers heard of within their ttl, by name."""
        ...

    async def count(self, name: str, amount: int) -> None:
        """Add to a counter of the run."""
        ...

    async def counters(self) -> dict[str, int]:
        """All counters."""
        ...

    async def claim(self, what: str, holder: str, *, ttl_s: float) -> bool:
        """Take a job that must be done by one process only; False if another holds it. A holder
        may claim again (renews)."""
        ...

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        """Publish a result (one a version; the first stays)."""
        ...

    async def evaluations(self) -> list[Evaluation]:
        """All results, by version."""
        ...

    async def put_probe(self, probe: Probe) -> None:
        """Samples with behaviour log-probabilities, all of one version (the newest probe is kept)."""
        ...

    async def probe(self, version: int, *, timeout_s: float) -> Probe:
        """Wait for the probe of `version`. Raises WaitTimeout."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class Resume:
    """What a trainer that takes over learns: its epoch, and the newest version ever published.

    Between the checkpoint's version and `head_version` the batches are replayed.
    """

    epoch: int
    head_version: int


class ReplayBuffer(Protocol):
    """All calls are coroutines; all waits end with `WaitTimeout` or `RunEnded`."""

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        """Append tasks whose `index` continues the stream; returns the next index expected.

        Tasks below that index are already there and are skipped, so several feeders may race.
        Raises StreamGap if they begin behind the next one, ValueError if they do not follow each other.
        """
        ...

    async def admit(self, limit: int, *, holder: str, timeout_s: float) -> list[Ticket]:
        """Lease 1..limit groups: first those whose lease expired, oldest sequence first (attempt
        raised, partial attached), then new ones.

        A group whose lease has expired max_attempts times is released as `failed` instead (giving back
        uses up no attempt), and one whose partial is older than S, under on_stale drop, as `expired`. Without a
        partial it begins anew, at the newest version. If it is cancelled, what was granted already is given back
        before it ends. Raises WaitTimeout (nothing admitted) or RunEnded.
        """
        ...

    async def heartbeat(self, tickets: Sequence[Ticket]) -> list[int]:
        """Renew leases; returns the sequences that are no longer this holder's (stop working on them)."""
        ...

    async def progress(self, ticket: Ticket, partial: Partial) -> None:
        """Store what exists so far and renew the lease. Raises LeaseLost."""
        ...

    async def give_back(self, ticket: Ticket) -> None:
        """End the lease now, so that another server goes on. Idempotent; a lost lease is no error."""
        ...

    async def insert(self, ticket: Ticket, group: Group) -> None:
        """INFLIGHT -> READY. Repeating it is harmless. Raises LeaseLost if another attempt owns it.

        A lease that has expired still counts while nobody has taken it over: finished work is kept.
        """
        ...

    async def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        """INFLIGHT -> RELEASED(reason), freeing the slot. Repeating it is harmless. Raises LeaseLost, and
        ValueError for `trained`."""
        ...

    async def take(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        """P groups for the step `version` -> `version + 1`, all or nothing, in ticket order.

        Asked again for the same version (a lost reply, or after `rollback`), it returns the same
        groups, even after `end`. What is too old by then ends on the way: READY groups as `stale` (as
        `trained`, if they were trained before), unfinished ones as `expired`. Raises Fenced, WaitTimeout,
        RunEnded.
        """
        ...

    async def take_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        """Further groups for the step, of whose groups the caller has the first `have`: as many as its selector
        allows now, at least one, and `Batch.missing` says how many are still to come.

        What was taken stays taken: asked again (by a trainer that takes over: from 0 on), it returns the same groups
        in the same order before any others, and `take` returns them first as well. Selectors other than fifo and
        windowed_fifo choose whole batches, so there it returns all P. Raises as `take` does.
        """
        ...

    async def release(self, batch: Batch) -> None:
        """TAKEN -> RELEASED(trained) for all of the batch, or READY again for those with uses left;
        payloads stay until `commit_checkpoint`.

        Call it after `publish_version(batch.version + 1)`. Idempotent. Raises Fenced.
        """
        ...

    async def publish_version(self, *, epoch: int, version: int) -> None:
        """State the newest policy version; tickets admitted from now on carry it. A version below the
        newest changes nothing. Raises Fenced."""
        ...

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        """A checkpoint of `version` is safe: forget the payloads of the steps before it. Raises Fenced."""
        ...

    async def rollback(self, version: int) -> Resume:
        """A trainer takes over at `version` (0 at the first start): a new epoch begins and fences all
        older ones; batches taken for steps >= version will be delivered again.

        Batches of steps < version are in its checkpoint: any that were not released yet are, as
        `trained`. A run that has ended goes on if steps are left. Raises BufferFault for a version
        below a committed checkpoint, whose batches are gone.
        """
        ...

    async def update_admission(self, policy: ReplayPolicy) -> None:
        """Retune a live run: S, P, the horizon, the selector, all of the policy. What is taken already stays
        as it was taken; a smaller window admits nothing until enough is released."""
        ...

    async def end(self) -> None:
        """The run is over: every wait ends with RunEnded."""
        ...

    async def stats(self) -> BufferStats:
        """A consistent snapshot."""
        ...

    async def aclose(self) -> None:
        """Close connections; the data stay."""
        ...

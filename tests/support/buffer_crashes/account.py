"""Compares journals with books: acknowledged groups that are missing, and groups that exist twice.

At a moment when no worker runs, with T the groups in the batches that trainers journalled, and K those that
are kept (READY or TAKEN):

    inserted = |T + K| + stale            every group that was ever finished is trained, kept or too old
    trained  = |T - K|                    each of T is trained, and counted once
    admitted = |T + K| + in flight + released for another reason than trained

T is exact: a batch that is in no journal was not trained, and is delivered again. A request without a reply in the
journal may have been executed or not.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from async_grpo.wire import ReleaseReason
from tests.support.buffer_crashes.crash_run import Course, Look
from tests.support.buffer_crashes.journal import Entry
from tests.support.buffer_crashes.plan import Plan

POSTPONED_S = 3.0
"""Seconds of writes that `everysec` may lose when the server is killed: it postpones a write for at most two seconds
while a sync hangs, measured in whole seconds."""
READ_LATE_S = 2.0
"""Seconds after the death of the server in which an earlier reply may still be journalled."""


Kind = Literal["lost", "duplicated", "unbalanced", "inconsistent"]
"""Acknowledged and missing; existing twice; journals and books disagree; books are inconsistent."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken guarantee. `at_s`: time of the acknowledgement, if one request is affected."""

    kind: Kind
    what: str
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Metrics of a whole run, and its faults."""

    killed: int
    killed_in_a_call: int
    server_killed: int
    acknowledged: int
    """Groups whose insert was acknowledged."""
    unacknowledged: int
    """Groups whose insert was executed, but whose caller was killed before the reply."""
    trained: int
    again: int
    """Leases after an earlier lease that ended without a group."""
    replayed: int
    """Batches delivered again to a new trainer."""
    took_over: int
    fenced: int
    stale: int
    looks: int
    most_active: int
    kept_at_the_crash: int
    faults: list[Fault]

    @property
    def by_kind(self) -> dict[str, int]:
        """Number of faults of each kind."""
        return {kind: sum(fault.kind == kind for fault in self.faults) for kind in KINDS}


def judge_run(plan: Plan, course: Course) -> Verdict:
    """Return the metrics, and the faults at the two looks and between them."""
    last = course.looks[-1]
    journals = course.looks[-1].entries
    of = _by_kind(journals)
    noted = {entry.seq for entry in of["inserted"]}
    took = {seq for entry in of["took"] for seq in entry.seqs}
    faults = [fault for look in course.looks for fault in _faults(plan, look)]
    faults += [*_watched(plan, course, of["look"]), *_batches(plan, of["took"])]
    return Verdict(
        killed=course.killed,
        killed_in_a_call=course.killed_in_a_call,
        server_killed=len(course.server_killed_s),
        acknowledged=len(noted),
        unacknowledged=len((took | last.books.kept) - noted),
        trained=len(took),
        again=sum(entry.attempt > 1 for entry in of["admitted"]),
        replayed=sum(entry.replayed for entry in of["took"]),
        took_over=len(of["took over"]),
        fenced=len(of["fenced"]),
        stale=last.stats.released["stale"],
        looks=len(of["look"]),
        most_active=max((entry.active for entry in of["look"]), default=0),
        kept_at_the_crash=len(course.looks[0].books.kept),
        faults=list(dict.fromkeys(faults)),
    )


def is_allowed_by_fsync(plan: Plan, course: Course, faults: Iterable[Fault]) -> bool:
    """True if `everysec` allows these faults.

    Then the books are consistent, and missing groups were acknowledged just before a death of the server. Work that the
    server has lost is repeated, so its results may exist twice.
    """
    kinds = {fault.kind for fault in faults}
    times = [fault.at_s for fault in faults if fault.kind == "lost" and fault.at_s is not None]
    return (
        plan.fsync == "everysec"
        and "inconsistent" not in kinds
        and bool(times)
        and all(any(-READ_LATE_S < killed - at_s < POSTPONED_S for killed in course.server_killed_s) for at_s in times)
    )


def _faults(plan: Plan, look: Look) -> Iterator[Fault]:
    of = _by_kind(look.entries)
    yield from _inserts(plan, look, of)
    yield from _discards(look, of)
    yield from _counters(look, of)
    yield from (Fault("inconsistent", problem) for problem in look.inconsistencies)


def _inserts(plan: Plan, look: Look, of: dict[str, list[Entry]]) -> Iterator[Fault]:
    """Check that each acknowledged group is trained or kept as it was inserted, or has become too old."""
    requested = {(entry.seq, entry.digest) for entry in of["insert?"]}
    trained: dict[int, set[str]] = defaultdict(set)
    for entry in of["took"]:
        for seq, digest in zip(entry.seqs, entry.digests, strict=True):
            trained[seq].add(digest)
    delivered = [(seq, digest) for seq, digests in trained.items() for digest in digests]
    for seq, digest in [*delivered, *look.digests.items()]:
        if (seq, digest) not in requested:
            yield Fault("unbalanced", f"group {seq} has content that no worker has inserted")
    for seq in look.books.kept - set(look.digests):
        yield Fault("lost", f"the payload of group {seq} is gone")
    newest = max((entry.version for entry in of["take?"]), default=0)
    gone = 0
    for entry in of["inserted"]:
        digests = set(trained[entry.seq])
        if entry.seq in look.digests:
            digests.add(look.digests[entry.seq])
        too_old = newest - entry.oldest > min(policy.window.max_staleness for policy in plan.policies)
        gone += not digests
        if digests and digests != {entry.digest}:
            yield Fault("lost", f"attempt {entry.attempt} of group {entry.seq} was replaced", entry.at_s)
        elif not digests and not (too_old and _drops(plan)):
            yield Fault("lost", f"group {entry.seq}, inserted by attempt {entry.attempt}, is gone", entry.at_s)
    if gone > look.stats.released["stale"]:
        yield Fault("lost", f"{gone} groups are gone, {look.stats.released['stale']} became stale")
    for seq, count in Counter(entry.seq for entry in of["inserted"]).items():
        if count > 1:
            yield Fault("duplicated", f"group {seq} was accepted {count} times")
    for (seq, attempt), count in Counter((entry.seq, entry.attempt) for entry in of["admitted"]).items():
        if count > 1:
            yield Fault("duplicated", f"attempt {attempt} of group {seq} was leased {count} times")


def _discards(look: Look, of: dict[str, list[Entry]]) -> Iterator[Fault]:
    finished = {entry.seq for entry in of["inserted"]} | {seq for entry in of["took"] for seq in entry.seqs}
    active = look.books.seqs["open"] | look.books.seqs["taken"]
    for entry in of["discarded"]:
        if entry.seq in finished | active:
            yield Fault("duplicated", f"group {entry.seq} was discarded and continues", entry.at_s)
    told, asked = (Counter(entry.reason for entry in of[what]) for what in ("discarded", "discard?"))
    for reason in (ReleaseReason.FILTERED, ReleaseReason.UNVERIFIABLE):
        if not told[reason] <= look.stats.released[reason] <= asked[reason]:
            yield Fault(
                "unbalanced", f"{look.stats.released[reason]} {reason}, told {told[reason]}, asked {asked[reason]}"
            )


def _counters(look: Look, of: dict[str, list[Entry]]) -> Iterator[Fault]:
    stats = look.stats
    kept = look.books.kept
    trained = {seq for entry in of["took"] for seq in entry.seqs}
    other = stats.released_total - stats.released["trained"]
    rules = {
        "inserted = |T + K| + stale": (stats.inserted, len(trained | kept) + stats.released["stale"]),
        "trained = |T - K|": (stats.released["trained"], len(trained - kept)),
        "admitted = |T + K| + in flight + others": (stats.admitted, len(trained | kept) + stats.inflight + other),
        "active = in flight + ready + taken": (stats.active, stats.inflight + stats.ready + stats.taken),
    }
    yield from (
        Fault("unbalanced", f"{rule}: {left} and {right}") for rule, (left, right) in rules.items() if left != right
    )


def _batches(plan: Plan, took: list[Entry]) -> Iterator[Fault]:
    """Check the batches: one per version, groups used at most max_uses times and not too old, fifo in ticket order."""
    batches: dict[int, Entry] = {}
    for entry in took:
        first = batches.setdefault(entry.version, entry)
        if (first.seqs, first.digests) != (entry.seqs, entry.digests):
            yield Fault("lost", f"version {entry.version}: {first.seqs}, then {entry.seqs}", first.at_s)
        bound = max(policy.age_bound for policy in plan.policies)
        if max(entry.ages) > bound:
            yield Fault("unbalanced", f"version {entry.version} has ages {entry.ages}, the bound is {bound}")
    uses = Counter(seq for entry in batches.values() for seq in entry.seqs)
    most = max(policy.max_uses for policy in plan.policies)
    yield from (
        Fault("duplicated", f"group {seq} is in {count} batches") for seq, count in uses.items() if count > most
    )
    if sorted(batches) != list(range(len(batches))):
        yield Fault("lost", f"the versions taken are {sorted(batches)}")
    order = [seq for version in sorted(batches) for seq in batches[version].seqs]
    if {policy.selector for policy in plan.policies} == {"fifo"} and order != sorted(order):
        yield Fault("unbalanced", "batches of fifo are not in the order of the tickets")


def _watched(plan: Plan, course: Course, looks: list[Entry]) -> Iterator[Fault]:
    capacity = max(policy.window.capacity for policy in plan.policies)
    for look in looks:
        if not 0 <= look.active <= capacity:
            yield Fault("unbalanced", f"{look.active} groups were active, the window has room for {capacity}")
        yield from (Fault("inconsistent", problem) for problem in look.inconsistencies)
    for before, after in itertools.pairwise(looks):
        if any(new < old for old, new in zip(before.counters, after.counters, strict=True)):
            yield Fault("lost", f"counters went back from {before.counters} to {after.counters}", before.at_s)


def _drops(plan: Plan) -> bool:
    return any(policy.on_stale != "wait" for policy in plan.policies)


def _by_kind(journals: list[Entry]) -> dict[str, list[Entry]]:
    kinds: dict[str, list[Entry]] = defaultdict(list)
    for entry in journals:
        kinds[entry.what].append(entry)
    return kinds

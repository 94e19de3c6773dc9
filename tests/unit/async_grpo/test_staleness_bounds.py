"""The bounds of docs/staleness.md: kept by every order of events, and reached by some."""

from __future__ import annotations

from random import Random

import pytest

from async_grpo.staleness import ReplayPolicy, age
from async_grpo.wire import Ticket
from buffer.state import BufferState
from tests.support.buffer_cases import group_of, policy, tasks

STEPS = 14
WAIT = {"steps": STEPS, "on_stale": "wait"}
WINDOWED = {**WAIT, "selector": "windowed_fifo"}
POLICIES = [
    policy(S=0, P=2, **WAIT),
    policy(S=2, P=2, **WAIT),
    policy(S=1, P=2, selector_window=2, **WINDOWED),
    policy(S=1, P=2, selector_window=4, **WINDOWED),
    policy(S=2, P=1, selector_window=3, **WINDOWED),
    policy(S=1, P=2, max_uses=2, **WAIT),
    policy(S=2, P=2, steps=STEPS, selector="freshest"),
    policy(S=2, P=2, steps=STEPS, selector="uniform", seed=3),
    policy(S=2, P=2, steps=STEPS, selector="windowed_fifo", selector_window=6),
]


def oldest_trained(dials: ReplayPolicy, seed: int) -> int:
    """A run whose servers admit greedily and finish in random order, now quickly, now slowly."""
    random, ledger = Random(seed), BufferState(dials, lease_s=1e9, max_attempts=1)
    ledger.rollback(0)
    ledger.put_tasks(tasks(0, 40 * STEPS))
    working: list[Ticket] = []
    version = oldest = 0
    while version < STEPS:
        working += ledger.admit(100, "server", 0.0)
        working = [ticket for ticket in working if ledger._holds(ticket)]
        random.shuffle(working)
        for _ in range(min(len(working), random.choice([1, 1, 2, 5]))):
            ticket = working.pop()
            ledger.insert(ticket, group_of(ticket))
        if (batch := ledger.take(1, version, 0.0)) is not None:
            oldest = max([oldest, *(age(version, group.oldest_version) for group in batch.groups)])
            version += 1
            ledger.publish_version(1, version)
            ledger.release(batch)
    return oldest


@pytest.mark.parametrize(
    "dials", POLICIES, ids=lambda dials: f"{dials.selector}-W{dials.selector_window}-{dials.on_stale}"
)
def test_no_order_of_events_breaks_the_bound_and_some_reach_it(dials: ReplayPolicy) -> None:
    ages = [oldest_trained(dials, seed) for seed in range(150)]
    assert max(ages) == dials.age_bound


def greedy(S: int, P: int, *, free_at: str) -> int:
    """The oldest group trained, in order, where servers admit the moment there is room."""
    versions: list[int] = []  # of the groups that wait to be trained
    active = oldest = 0
    for version in range(10):
        versions += [version] * ((S + 1) * P - active)
        active = (S + 1) * P
        batch, versions = versions[:P], versions[P:]
        oldest = max(oldest, version - min(batch))
        if free_at == "take":  # the next groups begin while this version is still trained
            versions += [version] * P
        else:
            active -= P
    return oldest


@pytest.mark.parametrize(("S", "P"), [(0, 1), (1, 2), (3, 4)])
def test_freeing_slots_at_take_instead_of_after_publication_costs_one_step_of_age(S: int, P: int) -> None:
    assert greedy(S, P, free_at="publication") == S
    assert greedy(S, P, free_at="take") == S + 1

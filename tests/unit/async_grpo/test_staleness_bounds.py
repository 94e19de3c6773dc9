"""The bounds of docs/staleness.md: kept by every order of events, and reached by some."""

from __future__ import annotations

import contextlib
from random import Random

import pytest

from async_grpo.errors import LeaseLost
from async_grpo.staleness import ReplayPolicy, age
from async_grpo.wire import ReleaseReason, Ticket
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
    policy(S=2, P=2, steps=STEPS, selector="exact_age"),
    policy(S=2, P=2, steps=STEPS, selector="uniform", seed=3),
    policy(S=2, P=2, steps=STEPS, selector="windowed_fifo", selector_window=6),
]


def oldest_trained(settings: ReplayPolicy, seed: int) -> int:
    """Greatest age in a run whose servers admit greedily and finish in random order at varying speed."""
    random, ledger = Random(seed), BufferState(settings, lease_s=1e9, max_attempts=1)
    ledger.rollback(0)
    ledger.put_tasks(tasks(0, 40 * STEPS))
    working: list[Ticket] = []
    version = oldest = 0
    while version < STEPS:
        working += ledger.admit_groups(100, "server", 0.0)
        working = [ticket for ticket in working if ledger._is_leased(ticket)]
        random.shuffle(working)
        for _ in range(min(len(working), random.choice([1, 1, 2, 5]))):
            ticket = working.pop()
            ledger.insert_group(ticket, group_of(ticket))
        if (batch := ledger.take_batch(1, version, 0.0)) is not None:
            oldest = max([oldest, *(age(version, group.oldest_version) for group in batch.groups)])
            version += 1
            ledger.publish_version(1, version)
            ledger.release_batch(batch)
    return oldest


@pytest.mark.parametrize(
    "settings", POLICIES, ids=lambda settings: f"{settings.selector}-W{settings.selector_window}-{settings.on_stale}"
)
def test_random_runs_reach_and_keep_the_age_bound(settings: ReplayPolicy) -> None:
    ages = [oldest_trained(settings, seed) for seed in range(150)]
    assert max(ages) == settings.age_bound


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize(("S", "P"), [(0, 2), (1, 3), (4, 2), (20, 1)])
def test_exact_age_trains_every_group_at_age_s(S: int, P: int, seed: int) -> None:
    random, buffer = Random(seed), BufferState(policy(S=S, P=P, steps=STEPS, selector="exact_age"), 1.0, 100)
    buffer.rollback(0)
    buffer.put_tasks(tasks(0, 40 * STEPS))
    working: list[Ticket] = []
    version, epoch, now_s = 0, 1, 0.0
    while version < STEPS:
        if random.random() < 0.02:  # the trainer dies and resumes from an earlier checkpoint
            version = random.randint(0, version)
            epoch = buffer.rollback(version).epoch
        now_s += random.choice([0.0, 0.0, 1.5])  # leases of a second expire, and others begin the groups again
        working = [*working, *buffer.admit_groups(3, "server", now_s)]
        for ticket in random.sample(working, min(2, len(working))):
            working.remove(ticket)
            with contextlib.suppress(LeaseLost):
                if random.random() < 0.2:
                    buffer.discard_group(ticket, ReleaseReason.FILTERED)
                else:
                    buffer.insert_group(ticket, group_of(ticket))
        if (batch := buffer.take_batch(epoch, version, now_s)) is not None:
            assert {(group.oldest_version, group.newest_version) for group in batch.groups} == {
                (max(0, version - S),) * 2
            }
            version += 1
            buffer.publish_version(epoch, version)
            buffer.release_batch(batch)
    assert len(buffer.open) == 0


def greedy(S: int, P: int, *, free_at: str) -> int:
    """Greatest age when groups are trained in order and servers admit as soon as there is room."""
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
def test_freeing_slots_at_take_costs_one_step_of_age(S: int, P: int) -> None:
    assert greedy(S, P, free_at="publication") == S
    assert greedy(S, P, free_at="take") == S + 1

"""The arithmetic of the staleness bound, and of the ratio of uses to inserts."""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.staleness import RateLimit, ReplayPolicy, StalenessWindow, age
from tests.support.buffer_cases import policy


@pytest.mark.parametrize(("max_staleness", "capacity"), [(0, 4), (2, 12)])
def test_capacity_is_one_batch_per_step_of_staleness_plus_one(max_staleness: int, capacity: int) -> None:
    assert StalenessWindow(max_staleness, groups_per_step=4, horizon=40).capacity == capacity


def test_age_is_never_negative() -> None:
    assert [age(trainer, oldest) for trainer, oldest in [(5, 5), (5, 3), (3, 5)]] == [0, 2, 0]


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"S": 2, "P": 4}, 2),
        ({"S": 2, "P": 4, "on_stale": "wait"}, 2),
        ({"S": 0, "P": 4, "on_stale": "wait"}, 0),
        ({"selector": "windowed_fifo", "selector_window": 4}, 1),
        *(
            (
                {"S": 1, "P": 4, "selector": "windowed_fifo", "selector_window": W, "on_stale": "wait"},
                bound,
            )
            for W, bound in [(1, 1), (2, 2), (5, 2), (6, 3), (8, 3)]  # S + ceil((W - 1) / P)
        ),
        ({"S": 1, "P": 4, "max_uses": 2, "on_stale": "wait"}, 3),  # (S + 1) * k - 1
    ],
)
def test_age_bound(settings: dict[str, Any], bound: int) -> None:
    assert policy(**settings).age_bound == bound


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selector": "newest"}, "selector 'newest' is unknown.*freshest"),
        ({"on_stale": "ignore"}, "on_stale 'ignore' is unknown.*wait, drop, mask"),
        ({"on_stale": ""}, "on_stale '' is unknown"),
        ({"selector_window": 2}, "windowed_fifo"),
        (
            {"selector": "windowed_fifo", "selector_window": 9},
            r"selector.window \(9\).* = 4",
        ),
        ({"selector": "freshest", "on_stale": "wait"}, "occupy their slots"),
        ({"selector": "uniform", "on_stale": "wait"}, "occupy their slots"),
        ({"selector": "exact_age", "max_uses": 2}, "several ages"),
        ({"selector": "exact_age", "rate": RateLimit(min_size=3)}, "admission rule"),
        ({"max_uses": 3}, r"max_uses \(3\).*S \+ 1 = 2"),
        ({"rate": RateLimit(min_size=5)}, r"min_size \(5\)"),
        ({"rate": RateLimit(samples_per_insert=2)}, r"samples_per_insert \(2\).*max_uses \(1\)"),
        ({"rate": RateLimit(min_diff=0, max_diff=2.5)}, r"at least 1\.5"),
    ],
)
def test_a_policy_that_would_stall_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(S=1, P=2, **settings)


def test_tokens_below_v_minus_s_are_masked_only_under_mask() -> None:
    assert [policy(S=2, on_stale="mask").mask_below(version) for version in (0, 2, 3)] == [0, 0, 1]
    assert policy(S=2).mask_below(9) == 0


def test_rate_limit_bounds_inserts_and_samples_as_reverb_does() -> None:
    """R = 2, at least 4 groups, buffer of 3 uses: 2 * 4 - 3 <= 2 * I - U <= 2 * 4 + 3."""
    rate = RateLimit.from_ratio(2.0, min_size=4, error_buffer=3.0)
    assert (rate.min_diff, rate.max_diff) == (5.0, 11.0)
    assert rate.allowed_inserts(inserts=0, uses=0, size=0, needed_size=4) == 5
    assert rate.allowed_inserts(inserts=5, uses=0, size=5, needed_size=4) == 0  # 2 * 6 - 0 > 11
    assert rate.allowed_inserts(inserts=5, uses=1, size=5, needed_size=4) == 1
    assert rate.allowed_inserts(inserts=5, uses=0, size=2, needed_size=4) == 2  # the table is nearly empty
    assert rate.allows_sample(3, inserts=4, uses=0)  # 2 * 4 - 3 = 5
    assert not rate.allows_sample(4, inserts=4, uses=0)


def test_default_rate_limit_limits_nothing() -> None:
    rate = RateLimit()
    assert not rate.limits
    assert rate.allowed_inserts(inserts=10**9, uses=0, size=10**6, needed_size=1) > 10**9
    assert rate.allows_sample(10**6, inserts=0, uses=0)


def test_number_of_ready_groups_that_a_batch_needs() -> None:
    window = StalenessWindow(3, 2, 100)
    assert [ReplayPolicy(window, rate=RateLimit(min_size=size)).ready_groups_needed for size in (0, 2, 5)] == [2, 2, 5]

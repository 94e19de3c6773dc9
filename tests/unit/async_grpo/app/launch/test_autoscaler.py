"""Hysteresis of the autoscaler."""

from __future__ import annotations

import pytest

from async_grpo.app.launch.autoscaler import SteadyDemand
from async_grpo.config import validate
from async_grpo.errors import ConfigError


def simulate_targets(demands: list[int], running: int) -> list[int]:
    """Return the target of each second, with 1 to 4 servers that are always at the target."""
    steady = SteadyDemand(min_servers=1, max_servers=4, after_s=3.0)
    targets = []
    for second, demand in enumerate(demands):
        target = steady.update_target(float(second), demand, running)
        if target != running:
            running = target
            steady.reset()
        targets.append(running)
    return targets


@pytest.mark.parametrize(
    ("demands", "running", "expected"),
    [
        ([3, 3, 3, 3, 3], 1, [1, 1, 1, 3, 3]),
        ([3, 1, 3, 1, 3, 1, 3], 1, [1] * 7),  # it must last
        ([1, 3, 1, 3, 1, 3, 1], 3, [3] * 7),
        ([3, 2, 3, 4, 4], 1, [1, 1, 1, 2, 2]),  # the minimum of the period
        ([1, 1, 1, 1], 3, [3, 3, 3, 1]),
        ([1, 2, 1, 1], 4, [4, 4, 4, 2]),  # the maximum of the period
        ([9, 9, 9, 9], 1, [1, 1, 1, 4]),  # within bounds
        ([0, 0, 0, 0], 2, [2, 2, 2, 1]),
    ],
)
def test_servers_change_only_after_a_steady_demand(demands: list[int], running: int, expected: list[int]) -> None:
    assert simulate_targets(demands, running) == expected


def test_max_servers_below_the_configured_servers_is_refused() -> None:
    run = {"name": "a", "model": {"random": {}}, "rollout": {"servers": 2}}
    assert validate(run, "test").max_servers_at_once == 2
    assert validate(run | {"launch": {"autoscale": {"max_servers": 5}}}, "test").max_servers_at_once == 5
    with pytest.raises(ConfigError, match=r"launch\.autoscale\.max_servers \(1\).*rollout\.servers \(2\)"):
        validate(run | {"launch": {"autoscale": {"max_servers": 1}}}, "test")

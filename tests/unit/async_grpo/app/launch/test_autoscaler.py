"""The hysteresis of the autoscaler."""

from __future__ import annotations

import pytest

from async_grpo.app.launch.autoscaler import SteadyDemand
from async_grpo.config import validate
from async_grpo.errors import ConfigError


def targets(wanted: list[int], running: int, *, least: int = 1, most: int = 4, after_s: float = 3.0) -> list[int]:
    """The targets of each second; the servers follow them."""
    demand, found = SteadyDemand(least, most, after_s), []
    for second, count in enumerate(wanted):
        if (target := demand.target(float(second), count, running)) != running:
            running = target
            demand.forget()
        found.append(running)
    return found


@pytest.mark.parametrize(
    ("wanted", "running", "found"),
    [
        ([3, 3, 3, 3, 3], 1, [1, 1, 1, 3, 3]),
        ([3, 1, 3, 1, 3, 1, 3], 1, [1] * 7),  # it must last
        ([1, 3, 1, 3, 1, 3, 1], 3, [3] * 7),
        ([3, 2, 3, 4, 4], 1, [1, 1, 1, 2, 2]),  # the fewest of that time
        ([1, 1, 1, 1], 3, [3, 3, 3, 1]),
        ([1, 2, 1, 1], 4, [4, 4, 4, 2]),  # the most of that time
        ([9, 9, 9, 9], 1, [1, 1, 1, 4]),  # within bounds
        ([0, 0, 0, 0], 2, [2, 2, 2, 1]),
    ],
)
def test_what_was_wanted_all_the_time_is_done(wanted: list[int], running: int, found: list[int]) -> None:
    assert targets(wanted, running) == found


def test_the_most_are_no_fewer_than_the_fewest() -> None:
    run = {"name": "a", "model": {"random": {}}, "rollout": {"servers": 2}}
    assert validate(run, "test").most_servers == 2
    assert validate(run | {"launch": {"autoscale": {"max_servers": 5}}}, "test").most_servers == 5
    with pytest.raises(ConfigError, match=r"launch\.autoscale\.max_servers \(1\).*rollout\.servers \(2\)"):
        validate(run | {"launch": {"autoscale": {"max_servers": 1}}}, "test")

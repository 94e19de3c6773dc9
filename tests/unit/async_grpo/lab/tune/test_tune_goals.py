"""The point that a goal chooses, and the measured costs of age."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import validate
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.recorded import RecordedRun
from async_grpo.lab.sweep.results import Curve
from async_grpo.lab.sweep.settings import group_by_setting
from async_grpo.lab.tune.goals import CandidateMetrics, Goal, measure_age_cost, measure_ess_decay
from tests.support.recorded_runs import PLAIN
from tests.support.sweep_fakes import figures


def point(
    tokens_per_s: float, age: float, *, max_staleness: int = 4, devices: int = 2, changes: int = 1
) -> CandidateMetrics:
    half = {age - 1: 0.5, age + 1: 0.5} if age else {0.0: 1.0}
    return CandidateMetrics(
        tokens_per_s=tokens_per_s,
        age_mean=age,
        ages=half,
        max_staleness=max_staleness,
        devices=devices,
        changes=changes,
    )


def test_among_equally_fast_points_the_freshest_and_then_the_least_changed_is_chosen() -> None:
    points = [point(50, 0), point(100, 4), point(99, 2.0, changes=3), point(98.5, 2.25), point(94, 1)]
    assert Goal().choose_point(points) == 3


def test_a_larger_staleness_bound_must_gain_more_than_the_error_of_a_simulation() -> None:
    points = [point(90, 0.9, max_staleness=1), point(97, 1.8, max_staleness=2), point(100, 1.7, max_staleness=16)]
    assert Goal().choose_point(points) == 1
    assert Goal().choose_point([*points, point(120, 5.5, max_staleness=16)]) == 3


def test_bounds_may_exclude_the_fastest_point() -> None:
    points = [point(50, 0), point(100, 4), point(80, 2)]
    assert Goal(max_age=3).choose_point(points) == 2
    ess = 0.5 * math.exp(-0.1) + 0.5 * math.exp(-0.3)  # ages 1 and 3, half of the tokens each: 0.82
    assert Goal(ess_decay=0.1).effective_sample_size(points[2]) == pytest.approx(ess)
    assert Goal(min_ess=0.8, ess_decay=0.1).choose_point(points) == 2
    assert Goal(min_ess=0.85, ess_decay=0.1).choose_point(points) == 0
    with pytest.raises(ConfigError, match=r"mean age <= 3.*a mean age of 4\.00"):
        Goal(max_age=3).choose_point([point(100, 4)])


def test_cost_counts_devices_and_reward_discounts_old_tokens() -> None:
    points = [point(100, 4, devices=8), point(70, 1, devices=4)]
    assert Goal("cost").value(points[0]) == 12.5
    assert Goal("cost").choose_point(points) == 1
    worth = 0.5 / 1.3 + 0.5 / 1.5  # ages 3 and 5 at c = 0.1
    assert Goal("reward", age_cost=0.1).value(points[0]) == pytest.approx(100 * worth)
    assert [Goal("reward", age_cost=cost).choose_point(points) for cost in (0.05, 0.3)] == [0, 1]


def run_of(rows: Sequence[dict[str, Any]]) -> RecordedRun:
    config = validate({**PLAIN, "name": "run"}, "test")
    return RecordedRun(Path("run"), config, list(rows), [], [], [], {})


def test_the_decay_of_the_effective_sample_size_is_fitted_over_steps() -> None:
    steps = [{"age_mean": age, "ess": math.exp(-0.05 * age)} for age in (0.0, 1.0, 3.0)]
    assert measure_ess_decay([run_of(steps)]) == pytest.approx(0.05)
    assert measure_ess_decay([run_of(steps[:1])]) is None


def learned(staleness: int, age: float, steps_to_one: int) -> Any:
    """A run whose reward rises linearly from 0 to 1 in `steps_to_one` steps of 100 tokens, and stays there."""
    reward = [min(1.0, (step + 1) / steps_to_one) for step in range(200)]
    curve = Curve(steps=list(range(200)), seconds=[0.0] * 200, reward=reward)
    return figures(staleness, age_mean=age, curve=curve, trained_tokens=20_000, steps_done=200)


def test_the_cost_of_age_is_measured_in_tokens_to_a_reward() -> None:
    runs = [learned(0, 0.0, 40), learned(4, 4.0, 80)]  # twice the tokens at age 4: 1 + 4 c = 2
    assert measure_age_cost(group_by_setting(runs)) == pytest.approx(0.25, rel=0.1)
    with pytest.raises(ConfigError, match="--age-cost"):
        measure_age_cost(group_by_setting(runs[:1]))

"""The search of `async-grpo tune`: the points that it simulates, and the one that it chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from async_grpo.config import load
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import EngineTimings, Timings, TrainerTimings
from async_grpo.lab.tune.advice import Advice, explain_changes, format_value
from async_grpo.lab.tune.goals import Goal
from async_grpo.lab.tune.search import TuningSearch, adapt_timings, find_pareto_front
from async_grpo.lab.tune.space import TuningAxis
from tests.support.recorded_runs import PLAIN

TIMINGS = Timings(
    lengths=LengthModel(mean=30),
    engine=EngineTimings(step_s=0.005, request_s=0.0),
    trainer=TrainerTimings(base_s=0.2, token_s=1e-4, variation=0.0),
)


def axis(key: str, *values: object) -> TuningAxis:
    return TuningAxis(key, tuple({key: str(value)} for value in values))


SLOTS = axis("rollout.max_concurrency", 4, 8, 16)
STALENESS = axis("max_staleness", 0, 1, 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    small = {"group_size": 2, "groups_per_step": 4, "rollout": {"max_concurrency": 4}}
    path.write_text(yaml.safe_dump({**PLAIN, **small, "max_staleness": 0, "name": "run"}))
    return path


def search(file: Path, *axes: TuningAxis, goal: Goal = Goal()) -> TuningSearch:
    return TuningSearch(file, [], axes, TIMINGS, goal, seed=1)


def test_a_small_space_is_simulated_completely_and_its_best_point_chosen(file: Path) -> None:
    tuning = search(file, STALENESS, SLOTS)
    tuning.explore(9)
    assert (len(tuning.points), tuning.size) == (9, 9)
    # A batch is 8 samples, which take 0.15 s in 8 slots and 0.3 s in 4, and 0.28 s in the trainer.
    assert tuning.find_best().overrides == {"max_staleness": "1", "rollout.max_concurrency": "8"}
    bounded = search(file, STALENESS, SLOTS, goal=Goal(max_age=0.1))
    bounded.explore(9)
    assert bounded.find_best().overrides["max_staleness"] == "0"


def test_in_a_large_space_only_proposals_and_neighbours_are_simulated(file: Path) -> None:
    many = axis("rollout.max_concurrency", 4, *range(5, 30))
    tuning = search(file, axis("max_staleness", 0, *range(1, 6)), many)
    tuning.explore(12)
    best = tuning.find_best()
    assert len(tuning.points) < tuning.size / 2
    fastest = tuning.simulate_point((1, 4))  # S = 1 with 8 slots
    assert fastest and best.metrics.tokens_per_s > 0.97 * fastest.metrics.tokens_per_s


def test_the_same_seed_gives_the_same_points(file: Path) -> None:
    many = axis("rollout.max_concurrency", 4, *range(5, 30))
    twice = [search(file, many, STALENESS) for _ in range(2)]
    for tuning in twice:
        tuning.explore(6)
    assert [point.choices for point in twice[0].points] == [point.choices for point in twice[1].points]


def test_invalid_configurations_are_left_out(file: Path) -> None:
    tuning = search(file, axis("rollout.min_concurrency", 0, 9), SLOTS)
    tuning.explore(6)
    assert {"rollout.min_concurrency": "9", "rollout.max_concurrency": "16"} in [
        point.overrides for point in tuning.points
    ]
    assert len(tuning.points) == 4  # at least 9 in flight, and at most 4 or 8


def test_the_front_has_no_point_that_a_fresher_one_matches(file: Path) -> None:
    tuning = search(file, STALENESS, SLOTS)
    tuning.explore(9)
    front = find_pareto_front(tuning.points, Goal())
    ages, speeds = [point.metrics.age_mean for point in front], [point.metrics.tokens_per_s for point in front]
    assert ages == sorted(ages) and speeds == sorted(speeds) and len(front) < 9
    assert all(point.metrics.tokens_per_s <= speeds[-1] * 1.005 for point in tuning.points)


def test_a_chosen_present_point_that_is_not_on_the_front_is_listed_once(file: Path) -> None:
    slots_only = search(file, SLOTS)
    slots_only.explore(3)
    present = slots_only.present
    assert present not in find_pareto_front(slots_only.points, Goal())
    advice = Advice(Goal(), slots_only.points, present, present, {}, {}, [])
    assert advice.front.count(present) == 1


def test_the_reason_for_a_change_states_the_metrics_without_it(file: Path) -> None:
    tuning = search(file, STALENESS, SLOTS)
    tuning.explore(9)
    best, without = tuning.find_best(), tuning.simulate_point((0, 1))
    assert without
    why = explain_changes(tuning, Goal(), best)
    assert set(why) == {"max_staleness", "rollout.max_concurrency"}
    before = f"{format_value(without.metrics.tokens_per_s)} at 0.00"
    assert why["max_staleness"].endswith(f"with max_staleness=0 as before {before}")


def test_more_ranks_reduce_only_the_time_per_token(file: Path) -> None:
    doubled = adapt_timings(TIMINGS, load(file), 2.0).trainer
    assert (doubled.base_s, doubled.token_s) == (0.2, 5e-5)

"""The search of `async-grpo tune`: which points it simulates, and which one it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from async_grpo.config import load
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import EngineTimings, Timings, TrainerTimings
from async_grpo.lab.tune.advice import in_figures, reasons_for
from async_grpo.lab.tune.goals import Goal
from async_grpo.lab.tune.search import TuningSearch, front_of, timings_for
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


def test_a_small_space_is_simulated_whole_and_its_best_kept(file: Path) -> None:
    found = search(file, STALENESS, SLOTS)
    found.explore(9)
    assert (len(found.points), found.size) == (9, 9)
    # A batch is 8 samples, which take 0.15 s in 8 slots and 0.3 s in 4, and 0.28 s in the trainer.
    assert found.best().overrides == {"max_staleness": "1", "rollout.max_concurrency": "8"}
    bounded = search(file, STALENESS, SLOTS, goal=Goal(max_age=0.1))
    bounded.explore(9)
    assert bounded.best().overrides["max_staleness"] == "0"


def test_of_a_large_space_only_proposals_and_neighbours_are_simulated(file: Path) -> None:
    many = axis("rollout.max_concurrency", 4, *range(5, 30))
    found = search(file, axis("max_staleness", 0, *range(1, 6)), many)
    found.explore(12)
    best = found.best()
    assert len(found.points) < found.size / 2
    fastest = found.point((1, 4))  # S = 1 with 8 slots
    assert fastest and best.figures.tokens_per_s > 0.97 * fastest.figures.tokens_per_s


def test_the_same_seed_gives_the_same_points(file: Path) -> None:
    many = axis("rollout.max_concurrency", 4, *range(5, 30))
    twice = [search(file, many, STALENESS) for _ in range(2)]
    for one in twice:
        one.explore(6)
    assert [one.places for one in twice[0].points] == [one.places for one in twice[1].points]


def test_points_that_the_configuration_refuses_are_left_out(file: Path) -> None:
    found = search(file, axis("rollout.min_concurrency", 0, 9), SLOTS)
    found.explore(6)
    assert {"rollout.min_concurrency": "9", "rollout.max_concurrency": "16"} in [one.overrides for one in found.points]
    assert len(found.points) == 4  # at least 9 in flight, and at most 4 or 8


def test_the_front_has_no_point_that_a_fresher_one_equals(file: Path) -> None:
    found = search(file, STALENESS, SLOTS)
    found.explore(9)
    front = front_of(found.points, Goal())
    ages, speeds = [one.figures.age_mean for one in front], [one.figures.tokens_per_s for one in front]
    assert ages == sorted(ages) and speeds == sorted(speeds) and len(front) < 9
    assert all(one.figures.tokens_per_s <= speeds[-1] * 1.005 for one in found.points)


def test_the_reason_of_a_change_is_what_the_point_would_be_without_it(file: Path) -> None:
    found = search(file, STALENESS, SLOTS)
    found.explore(9)
    best, without = found.best(), found.point((0, 1))
    assert without
    why = reasons_for(found, Goal(), best)
    assert set(why) == {"max_staleness", "rollout.max_concurrency"}
    before = f"{in_figures(without.figures.tokens_per_s)} at 0.00"
    assert why["max_staleness"].endswith(f"with max_staleness=0 as before {before}")


def test_more_ranks_take_less_time_for_the_tokens_and_the_same_for_the_rest(file: Path) -> None:
    doubled = timings_for(TIMINGS, load(file), 2.0).trainer
    assert (doubled.base_s, doubled.token_s) == (0.2, 5e-5)

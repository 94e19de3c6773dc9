"""The benchmark of `tune`: its grids, and its comparison of a choice with the best point."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from async_grpo.config import load
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.calibrate import MeasuredMetrics
from async_grpo.lab.tune.space import build_axes, merge_choices
from benchmarks.tuning.__main__ import CALIBRATION, TUNE, TimedRuns, describe_choice, name_point
from benchmarks.tuning.workloads import WORKLOADS, TunedWorkload, TuningBench


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_tune_chooses_among_the_points_of_the_grid(workload: TunedWorkload, tmp_path: Path) -> None:
    bench = TuningBench(tmp_path, workload)
    bench.prepare()
    vary = [option.partition("=")[2] for option in workload.tune_options if option.startswith("--vary")]
    fix = [option.partition("=")[2] for option in workload.tune_options if option.startswith("--fix")]
    first, second = build_axes(load(bench.config_file), vary, fix)
    choices = {name_point(values): values for values in map(merge_choices, product(first.choices, second.choices))}
    grid = {name_point(values) for values in workload.grid}
    assert grid <= choices.keys() and len(grid) >= 12
    for name in choices.keys() - grid:
        with pytest.raises(ConfigError, match=r"min_size \(\d+\).*capacity|selector\.window \(\d+\).*capacity"):
            bench.make_config(name, choices[name])
    config = bench.make_config("point", next(iter(workload.grid)))
    assert (config.max_staleness, config.steps) == (0, 12 + 3)  # S + 3 steps in which the window fills


def test_a_choice_is_compared_with_the_best_point_in_the_grid_and_in_repeats(tmp_path: Path) -> None:
    def speed(tokens_per_s: float) -> MeasuredMetrics:
        return MeasuredMetrics(tokens_per_s=tokens_per_s, trainer_idle=0.0, rollout_idle=0.0, age_mean=1.0)

    runs = TimedRuns(TuningBench(tmp_path, WORKLOADS["tail"]), 0.0)
    runs.seconds = {"a": 60.0, "b": 60.0, "c": 80.0, CALIBRATION: 15.0, TUNE: 4.0, "a-again1": 70.0}
    measured = {"a": speed(100), "b": speed(95), "c": speed(50)}
    repeats = {"a": [speed(96), speed(104)], "b": [speed(105), speed(99)]}
    description = describe_choice(runs, measured, repeats, best="a", chosen="b")
    for numbers in (r" b: -5\.0% .*, a; .* 2 .* \+2\.0%", r" 10\.5%", r" 19 s.* 200 s \(0\.095 "):
        assert re.search(numbers, description)

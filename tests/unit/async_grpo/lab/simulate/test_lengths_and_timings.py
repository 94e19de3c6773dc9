"""Length distributions, and timings as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_grpo.config import validate
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.devices import estimate_timings
from async_grpo.lab.simulate.lengths import LengthModel, tail_ratio
from async_grpo.lab.simulate.timings import EngineTimings, Timings

GENERATOR = np.random.default_rng(7)


@pytest.mark.parametrize(
    ("parameters", "mean", "median", "p99"),
    [
        ({"kind": "lognormal", "median": 100, "sigma": 1.0}, 164.9, 100, 1024),  # exp(1/2), exp(2.326)
        ({"kind": "lognormal", "median": 100, "p99": 1000}, 163.2, 100, 1000),
        ({"kind": "lognormal", "mean": 500, "p99": 2000}, 500, None, 2000),
        ({"kind": "lognormal", "mean": 500, "sigma": 0.8, "cap": 1024}, 500, None, None),
        ({"kind": "constant", "mean": 36}, 36, 36, 36),
    ],
)
def test_a_distribution_has_the_given_moments(
    parameters: dict[str, float], mean: float, median: float | None, p99: float | None
) -> None:
    drawn = LengthModel.model_validate(parameters).draw_groups(GENERATOR, 20_000, 8)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    if median is not None:
        assert np.median(drawn) == pytest.approx(median, rel=0.02)
    if p99 is not None:
        assert np.quantile(drawn, 0.99) == pytest.approx(p99, rel=0.04)


def test_no_length_is_above_the_cap_or_below_one() -> None:
    drawn = LengthModel(kind="lognormal", mean=20, sigma=2.0, cap=64).draw_groups(GENERATOR, 1000, 8)
    assert (drawn.min(), drawn.max()) == (1, 64)


def test_samples_of_a_group_are_alike_if_the_variance_is_between_groups() -> None:
    tails = [
        tail_ratio(LengthModel(kind="lognormal", mean=100, sigma=1.0, within=within).draw_groups(GENERATOR, 4000, 8))
        for within in (0.1, 1.0)
    ]
    assert tails[0] < 1.7 < tails[1]


def test_recorded_groups_repeat_in_their_order() -> None:
    model = LengthModel(kind="recorded", recorded=[[1, 2], [3, 4], [5, 6]])
    assert model.draw_groups(GENERATOR, 5, 2).tolist() == [[1, 2], [3, 4], [5, 6], [1, 2], [3, 4]]


def test_recorded_lengths_are_drawn_singly_if_groups_are_too_small() -> None:
    drawn = LengthModel(kind="recorded", recorded=[[5], [7, 9]]).draw_groups(GENERATOR, 50, 3)
    assert set(drawn.flatten()) == {5, 7, 9}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"kind": "lognormal", "mean": 10}, "exactly two of mean, median, p99 and sigma"),
        ({"kind": "recorded"}, "no recorded lengths"),
        ({"kind": "constant"}, "need `mean`"),
    ],
)
def test_an_underdetermined_distribution_is_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthModel.model_validate(parameters)


def test_timings_survive_a_round_trip_through_a_file(tmp_path: Path) -> None:
    timings = Timings(
        lengths=LengthModel(kind="recorded", recorded=[[3, 4]]), engine=EngineTimings(step_s=0.25), trainer_beside=1.5
    )
    timings.write(tmp_path / "timings.yaml")
    assert Timings.read(tmp_path / "timings.yaml") == timings


@pytest.mark.parametrize(("text", "message"), [("engine: {step: 1}", "engine.step"), ("engine: [", "cannot read")])
def test_an_error_in_a_timings_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "timings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Timings.read(path)


def test_an_estimate_counts_the_ranks_of_several_nodes_once() -> None:
    def token_s(nodes: int) -> float:
        raw = {
            "name": "estimate",
            "model": {"path": "any", "architecture": "qwen2.5-7b"},
            "trainer": {"platform": "npu", "processes": 16, "nodes": nodes},
        }
        return estimate_timings(validate(raw, "test"), "910c").trainer.token_s

    assert token_s(nodes=2) == token_s(nodes=1)

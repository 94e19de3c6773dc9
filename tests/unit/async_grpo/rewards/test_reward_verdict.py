"""From outcomes to the one number that is trained on, and what counts as a score."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from async_grpo.config.rewards import RewardConfig
from async_grpo.rewards.base import RewardFailure, RewardResult, as_score, combine

HUNG, DOWN = RewardFailure("timeout", "it hung"), RewardFailure("http_status", "the judge is down")
FUNCTIONS = [
    RewardConfig(name="a", weight=2.0),
    RewardConfig(name="b", weight=-0.5),
    RewardConfig(name="c", required=False),
]


def test_the_reward_is_the_weighted_sum() -> None:
    assert combine({"a": 1.0, "b": 1.0, "c": 0.25}, FUNCTIONS).reward == 1.75


def test_a_required_reward_that_fails_makes_the_sample_unverifiable_and_the_first_one_says_why() -> None:
    assert combine({"a": 1.0, "b": HUNG, "c": DOWN}, FUNCTIONS) == RewardResult(
        scores={"a": 1.0}, reward=None, failures={"b": HUNG, "c": DOWN}, failure="timeout", reason="b: it hung"
    )


def test_a_reward_that_is_not_required_is_left_out_and_still_counted() -> None:
    verdict = combine({"a": 1.0, "b": 0.0, "c": DOWN}, FUNCTIONS)
    assert (verdict.reward, verdict.failure, verdict.failures) == (2.0, "", {"c": DOWN})


def test_a_sum_that_overflows_is_no_reward() -> None:
    verdict = combine({"a": 1e6}, [RewardConfig(name="a", weight=1e303)])
    assert (verdict.reward, verdict.failure) == (None, "bad_value")


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
        (torch.tensor(0.25), 0.25),
        (1e6, 1e6),
    ],
)
def test_numbers_are_scores(value: object, score: float) -> None:
    assert as_score(value) == score


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "value", ["1", b"1", None, [1.0], np.ones(1), np.ones(2), 1j, float("nan"), float("-inf"), 1e6 + 1, Unspeakable()]
)
def test_anything_else_is_none(value: object) -> None:
    with pytest.raises(ValueError, match=r"not a number|not a finite number"):
        as_score(value)

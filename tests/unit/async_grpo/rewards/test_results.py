"""From outcomes to the one number that is trained on: scores, the weighted sum, samples that ran out of tokens."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.config.rewards import RewardConfig, RewardsConfig
from async_grpo.rewards.base import (
    RewardFailure,
    RewardResult,
    apply_overlong_rule,
    combine_outcomes,
    parse_score,
    soft_length_penalty,
)
from async_grpo.wire import Sample, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from rollout_server.dispatch.outcomes import apply_length_rule, attach_rewards
from tests.support.rollout_fakes import config_of

HUNG, DOWN = RewardFailure("timeout", "it hung"), RewardFailure("http_status", "the judge is down")
FUNCTIONS = [
    RewardConfig(name="a", weight=2.0),
    RewardConfig(name="b", weight=-0.5),
    RewardConfig(name="c", required=False),
]


def test_reward_is_the_weighted_sum() -> None:
    assert combine_outcomes({"a": 1.0, "b": 1.0, "c": 0.25}, FUNCTIONS).reward == 1.75


def test_first_failed_required_reward_makes_the_sample_unverifiable() -> None:
    assert combine_outcomes({"a": 1.0, "b": HUNG, "c": DOWN}, FUNCTIONS) == RewardResult(
        scores={"a": 1.0}, reward=None, failures={"b": HUNG, "c": DOWN}, failure="timeout", reason="b: it hung"
    )


def test_a_failed_optional_reward_is_omitted_and_counted() -> None:
    verdict = combine_outcomes({"a": 1.0, "b": 0.0, "c": DOWN}, FUNCTIONS)
    assert (verdict.reward, verdict.failure, verdict.failures) == (2.0, "", {"c": DOWN})


def test_an_overflowing_sum_is_unverifiable() -> None:
    verdict = combine_outcomes({"a": 1e6}, [RewardConfig(name="a", weight=1e303)])
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
    assert parse_score(value) == score


class RaisesInRepr:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "value", ["1", b"1", None, [1.0], np.ones(1), np.ones(2), 1j, float("nan"), float("-inf"), 1e6 + 1, RaisesInRepr()]
)
def test_other_values_are_not_scores(value: object) -> None:
    with pytest.raises(ValueError, match=r"not a number|not a finite number"):
        parse_score(value)


RIGHT = RewardResult(scores={"gsm8k": 1.0}, reward=1.0)
SOFT = RewardsConfig(overlong="soft", soft_overlong_tokens=20, soft_overlong_factor=0.5)
FILTER = RewardsConfig(overlong="filter")


def apply_rule(
    rule: RewardsConfig, verdict: RewardResult = RIGHT, *, length: int, finish_reason: str = "stop"
) -> RewardResult:
    return apply_overlong_rule(verdict, rule, length=length, finish_reason=finish_reason, max_tokens=100)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (99, -0.475), (100, -0.5), (101, -0.5)],
)
def test_length_penalty_is_linear_and_listed_among_the_scores(length: int, penalty: float) -> None:
    verdict = apply_rule(SOFT, length=length)
    assert verdict.scores == {"gsm8k": 1.0, "overlong": pytest.approx(penalty)}
    assert verdict.reward == pytest.approx(1.0 + penalty)


@given(st.integers(1, 5000), st.integers(2, 4000), st.data(), st.floats(0.01, 10))
def test_length_penalty_matches_the_dapo_paper(
    length: int, max_tokens: int, data: st.DataObject, factor: float
) -> None:
    last = data.draw(st.integers(1, max_tokens - 1))
    expected = max_tokens - last
    paper = 0.0 if length <= expected else max(-1.0, (expected - length) / last)
    assert soft_length_penalty(length, max_tokens=max_tokens, last_tokens=last, factor=factor) == pytest.approx(
        factor * paper
    )


def test_filter_masks_and_counts_cut_samples() -> None:
    verdict = apply_rule(FILTER, length=100, finish_reason="length")
    assert (verdict.reward, verdict.failure, verdict.scores) == (None, "overlong", {"gsm8k": 1.0})
    assert verdict.failures["overlong"].kind == "overlong"
    assert re.search(r"100 tokens\b.*sampling\.max_tokens", verdict.reason)


@pytest.mark.parametrize(("rule", "finish_reason"), [(FILTER, "stop"), (RewardsConfig(), "length")])
def test_finished_completions_pass_the_filter(rule: RewardsConfig, finish_reason: str) -> None:
    assert apply_rule(rule, length=100, finish_reason=finish_reason) is RIGHT


@pytest.mark.parametrize("rule", [SOFT, FILTER])
def test_an_unverifiable_sample_keeps_its_reason(rule: RewardsConfig) -> None:
    crashed = RewardResult(failure="crashed", reason="its process ended")
    assert apply_rule(rule, crashed, length=100, finish_reason="length") is crashed


@pytest.mark.parametrize(
    ("rewards", "reward", "unverifiable"),
    [
        ({"overlong": "soft", "soft_overlong_tokens": 4}, 0.0, ""),
        ({"overlong": "filter"}, None, "overlong: the completion was cut at 8 tokens. Raise sampling.max_tokens"),
    ],
)
def test_the_overlong_rule_is_applied_to_samples(
    rewards: dict[str, Any], reward: float | None, unverifiable: str
) -> None:
    sample = Sample(
        tokens=tokens_to_bytes([1] * 8),
        logprobs=logprobs_to_bytes([-1.0] * 8),
        spans=[VersionSpan(0, 0, 8)],
        finish_reason="length",
    )
    finished = attach_rewards(sample, apply_length_rule(sample, RIGHT, config_of(rewards=rewards)))
    assert (finished.reward, finished.unverifiable) == (reward, unverifiable)

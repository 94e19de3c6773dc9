"""Samples that ran out of tokens: the formula of the punishment, the mask, and what reaches the sample."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.config.rewards import RewardsConfig
from async_grpo.rewards.base import RewardResult, soft_punishment, unverifiable, with_length
from async_grpo.wire import Sample, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from rollout_server.dispatch.outcomes import apply_length_rule, with_rewards
from tests.support.rollout_fakes import config_of

RIGHT = RewardResult(scores={"gsm8k": 1.0}, reward=1.0)
SOFT = RewardsConfig(overlong="soft", soft_overlong_tokens=20, soft_overlong_factor=0.5)
FILTER = RewardsConfig(overlong="filter")


def judged(
    rule: RewardsConfig, verdict: RewardResult = RIGHT, *, length: int, finish_reason: str = "stop"
) -> RewardResult:
    return with_length(verdict, rule, length=length, finish_reason=finish_reason, max_tokens=100)


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(1, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (99, -0.475), (100, -0.5), (101, -0.5)],
)
def test_the_punishment_is_linear_over_the_last_tokens(length: int, punishment: float) -> None:
    assert soft_punishment(length, max_tokens=100, last=20, factor=0.5) == pytest.approx(punishment)


@given(st.integers(1, 5000), st.integers(2, 4000), st.data(), st.floats(0.01, 10))
def test_the_punishment_is_that_of_the_paper(length: int, max_tokens: int, data: st.DataObject, factor: float) -> None:
    last = data.draw(st.integers(1, max_tokens - 1))
    expected = max_tokens - last
    if length <= expected:
        paper = 0.0
    elif length <= max_tokens:
        paper = (expected - length) / last
    else:
        paper = -1.0
    assert soft_punishment(length, max_tokens=max_tokens, last=last, factor=factor) == pytest.approx(factor * paper)


def test_the_punishment_is_added_to_the_reward_and_stands_among_the_scores() -> None:
    assert judged(SOFT, length=90) == RewardResult(scores={"gsm8k": 1.0, "overlong": -0.25}, reward=0.75)
    assert judged(SOFT, length=10) == RewardResult(scores={"gsm8k": 1.0, "overlong": 0.0}, reward=1.0)


def test_a_sample_that_was_cut_is_masked_and_counted_by_the_filter() -> None:
    verdict = judged(FILTER, length=100, finish_reason="length")
    assert (verdict.reward, verdict.failure, verdict.scores) == (None, "overlong", {"gsm8k": 1.0})
    assert verdict.failures["overlong"].kind == "overlong"
    assert verdict.reason == "the completion was cut at 100 tokens. Raise sampling.max_tokens"


def test_a_sample_that_ended_by_itself_passes_the_filter_however_long() -> None:
    assert judged(FILTER, length=100, finish_reason="stop") is RIGHT


def test_without_a_rule_length_does_not_matter() -> None:
    assert judged(RewardsConfig(), length=100, finish_reason="length") is RIGHT


@pytest.mark.parametrize("rule", [SOFT, FILTER])
def test_what_is_unverifiable_stays_so_for_its_own_reason(rule: RewardsConfig) -> None:
    crashed = unverifiable("crashed", "its process ended")
    assert judged(rule, crashed, length=100, finish_reason="length") is crashed


@pytest.mark.parametrize(
    ("rewards", "reward", "unverifiable"),
    [
        ({"overlong": "soft", "soft_overlong_tokens": 4}, 0.0, ""),
        ({"overlong": "filter"}, None, "overlong: the completion was cut at 8 tokens. Raise sampling.max_tokens"),
    ],
)
def test_the_rule_reaches_the_sample(rewards: dict[str, Any], reward: float | None, unverifiable: str) -> None:
    sample = Sample(
        tokens=tokens_to_bytes([1] * 8),
        logprobs=logprobs_to_bytes([-1.0] * 8),
        spans=[VersionSpan(0, 0, 8)],
        finish_reason="length",
    )
    finished = with_rewards(sample, apply_length_rule(sample, RIGHT, config_of(rewards=rewards)))
    assert (finished.reward, finished.unverifiable) == (reward, unverifiable)

"""What every sample guarantees, and how old a group is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from async_grpo.wire import Group, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from tests.support.buffer_cases import mixed_sample, sample, tasks


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(1, 0, 3)],
        [(1, 0, 5)],
        [(1, 1, 4)],
        [(1, 0, 2), (2, 3, 4)],
        [(1, 0, 3), (2, 2, 4)],
        [(1, 0, 4), (2, 4, 4)],
        [(2, 0, 2), (1, 2, 4)],
    ],
    ids=["none", "short", "long", "late", "gap", "overlap", "empty", "version decreases"],
)
def test_spans_that_do_not_cover_the_tokens_in_order_of_version_are_refused(spans: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="version spans"):
        replace(sample(1, 4), spans=[VersionSpan(*span) for span in spans]).validate()


def test_a_sample_has_tokens_and_as_many_log_probabilities() -> None:
    mixed_sample(1, 3, 4).validate()
    with pytest.raises(ValueError, match="no tokens"):
        replace(sample(1, 4), tokens=tokens_to_bytes([])).validate()
    with pytest.raises(ValueError, match=r"4 tokens .*3 log-prob"):
        replace(sample(1, 4), logprobs=logprobs_to_bytes([-0.5] * 3)).validate()


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf"), 0.25])
def test_a_log_probability_is_finite_and_at_most_0(logprob: float) -> None:
    with pytest.raises(ValueError, match=f"token 2 of 4 .* {logprob}"):
        replace(sample(1, 4), logprobs=logprobs_to_bytes([-0.5, -0.5, logprob, -0.5])).validate()


def test_rounding_of_float32_may_lift_a_log_probability_above_0() -> None:
    replace(sample(1, 4), logprobs=logprobs_to_bytes([1e-6, 0.0, -0.0, -100.0])).validate()


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    group = Group(seq=0, attempt=1, task=tasks(0, 1)[0], samples=[sample(3), mixed_sample(2, 5)])
    assert (group.oldest_version, group.newest_version) == (2, 5)

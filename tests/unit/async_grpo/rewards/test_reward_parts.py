"""The small parts of the reward pool: what verifiers see, where a judge's score stands, pauses between attempts."""

from __future__ import annotations

import pytest

from async_grpo.config.rewards import HttpRewardConfig
from async_grpo.rewards.base import RewardFailure
from async_grpo.rewards.http_judge import look_up, read_score, retry_delay_s
from async_grpo.rewards.workers.client import worker_environment


def test_verifiers_get_basic_and_named_variables() -> None:
    outside = {"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET": "s", "NAMED": "n", "MKL_NUM_THREADS": "4"}
    assert worker_environment(outside, ["NAMED"]) == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "NAMED": "n",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "1",
    }


DOCUMENT = {"score": 1, "list": [{"": 2}, {"a/b": 3, "m~n": 4}], "0": 5}


@pytest.mark.parametrize(
    ("pointer", "value"),
    [("", DOCUMENT), ("/score", 1), ("/list/0/", 2), ("/list/1/a~1b", 3), ("/list/1/m~0n", 4), ("/0", 5)],
)
def test_a_json_pointer_finds_its_value(pointer: str, value: object) -> None:
    assert look_up(DOCUMENT, pointer) == value


@pytest.mark.parametrize("pointer", ["/none", "/list/2", "/list/-1", "/list/x", "/score/x"])
def test_a_dangling_json_pointer_is_an_error(pointer: str) -> None:
    with pytest.raises(LookupError):
        look_up(DOCUMENT, pointer)


@pytest.mark.parametrize("reply", [b"", b"\xff\xfe", b"nan", b'{"score": 1e999}', b'{"score": [1]}', b"[" * 10_000])
def test_a_reply_without_a_finite_number_is_a_bad_reply(reply: bytes) -> None:
    outcome = read_score(reply, "/score")
    assert isinstance(outcome, RewardFailure) and outcome.kind == "http_bad_reply"


def test_retry_delays_double_with_full_jitter_up_to_the_limit() -> None:
    config = HttpRewardConfig(url="http://judge/", backoff_s=0.5, backoff_max_s=3.0)
    assert [retry_delay_s(config, attempt, 0.0) for attempt in (1, 2, 3, 4, 5000)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert retry_delay_s(config, 1, 0.75) == 0.25

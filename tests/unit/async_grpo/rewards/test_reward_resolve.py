"""From a name to a reward function, and what it is called with."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from async_grpo.config.rewards import HttpRewardConfig
from async_grpo.errors import ConfigError
from async_grpo.rewards.base import RewardFailure, RewardInput
from async_grpo.rewards.http_judge import look_up, pause_s, score_of
from async_grpo.rewards.registry import load_verifier
from async_grpo.rewards.workers.client import worker_environment

NOT_A_FUNCTION = 3
ITEM = RewardInput("completion", "answer", "prompt", {"key": "value"}, 2)


def two(completion: str, answer: str) -> object:
    return (completion, answer)


def named(text: str, gold: str, *, prompt: str) -> object:
    return (text, gold, prompt)


def with_metadata(completion: str, answer: str, metadata: Mapping[str, str], more: int = 1) -> object:
    return (completion, answer, metadata)


def anything(*arguments: object, **extras: object) -> object:
    return (*arguments, extras)


class Stateful:
    def __call__(self, completion: str, answer: str) -> object:
        return (self.__class__.__name__, completion)

    @staticmethod
    def inner(completion: str, answer: str) -> object:
        return completion


def prompt_first(prompt: str, completion: str) -> float:
    return 0.0


def one(completion: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("name", "called_with"),
    [
        ("two", ("completion", "answer")),
        ("named", ("completion", "answer", "prompt")),
        ("with_metadata", ("completion", "answer", {"key": "value"})),
        ("anything", ("completion", "answer", {"prompt": "prompt", "metadata": {"key": "value"}, "tool_calls": 2})),
        ("Stateful", ("Stateful", "completion")),
        ("Stateful.inner", "completion"),
    ],
)
def test_a_function_is_called_with_what_it_names(name: str, called_with: object) -> None:
    assert load_verifier(f"{__name__}:{name}")(ITEM) == called_with


def test_built_in_verifiers_are_found_by_name() -> None:
    assert load_verifier("gsm8k")(RewardInput("#### 18", "18")) == 1.0
    assert load_verifier("format")(RewardInput("18", "18")) == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gms8k", r"no verifier 'gms8k'.*answer_tag, format, gsm8k"),
        ("module:", "no verifier 'module:'"),
        ("no_such_module:score", r"cannot be imported \(ModuleNotFoundError"),
        ("async_grpo.rewards.verifiers.answers:scores", r"cannot be imported \(AttributeError"),
        (f"{__name__}:NOT_A_FUNCTION", "is a int, not a function"),
        (f"{__name__}:one", r"has the signature \(completion: 'str'\).*too many positional"),
        (f"{__name__}:prompt_first", r"cannot be called.*multiple values for argument 'prompt'"),
    ],
)
def test_a_verifier_that_cannot_be_had_is_an_error_that_says_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_verifier(name)


def test_verifiers_see_what_python_needs_and_what_is_named() -> None:
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
def test_a_json_pointer_into_nothing_is_an_error(pointer: str) -> None:
    with pytest.raises(LookupError):
        look_up(DOCUMENT, pointer)


@pytest.mark.parametrize("reply", [b"", b"\xff\xfe", b"nan", b'{"score": 1e999}', b'{"score": [1]}', b"[" * 10_000])
def test_a_reply_without_a_finite_number_is_a_bad_reply(reply: bytes) -> None:
    outcome = score_of(reply, "/score")
    assert isinstance(outcome, RewardFailure) and outcome.kind == "http_bad_reply"


def test_pauses_grow_twofold_with_full_jitter_up_to_their_limit() -> None:
    config = HttpRewardConfig(url="http://judge/", backoff_s=0.5, backoff_max_s=3.0)
    assert [pause_s(config, attempt, 0.0) for attempt in (1, 2, 3, 4, 5000)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert pause_s(config, 1, 0.75) == 0.25

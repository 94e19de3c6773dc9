"""From a name to a reward function: what it is called with, and which answer it takes a completion to give."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest

from async_grpo.errors import ConfigError
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.registry import BUILTIN, load_verifier

NOT_A_FUNCTION = 3
ITEM = RewardInput("completion", "answer", "prompt", {"key": "value"}, 2)
FORM_ONLY = {"format", "format_reward", "strict_format", "step"}
NEEDS_THE_PROMPT = {"kk_reward"}
EXTRACTING = sorted(BUILTIN.keys() - FORM_ONLY - NEEDS_THE_PROMPT)

COMPLETIONS = [
    "<think>9 + 9</think><answer>18</answer>",
    "<answer> 18 </answer>",
    "<answer>17</answer><answer>18</answer>",
    "#### 18",
    "#### $18.00",
    "so it is 18.",
    r"\boxed{18}",
    r"<think>a</think><answer>\boxed{18}</answer>",
    r"<think>a</think><answer>\boxed{+18}</answer>",
    r"\boxed{1,800}",
    r"\boxed{1800}",
    r"$\boxed{\frac{36}{2}}$",
    "Answer: 18",
    "Answer: $x = 18$",
    "Answer: 17",
    "Answer: 1,800",
    "eighteen",
    "Eighteen",
    "",
]


class ScoresInUpperCase:
    def __call__(self, completion: str, answer: str) -> object:
        return (self.__class__.__name__, completion)

    def extract(self, completion: str) -> str | None:
        return completion.upper() or None

    @staticmethod
    def inner(completion: str, answer: str) -> object:
        return completion


def takes_completion_and_answer(completion: str, answer: str) -> object:
    return (completion, answer)


def named(text: str, gold: str, *, prompt: str) -> object:
    return (text, gold, prompt)


def with_metadata(completion: str, answer: str, metadata: Mapping[str, str], more: int = 1) -> object:
    return (completion, answer, metadata)


def takes_anything(*arguments: object, **extras: object) -> object:
    return (*arguments, extras)


def prompt_first(prompt: str, completion: str) -> float:
    return 0.0


def one(completion: str) -> float:
    return 0.0


def with_invalid_extract(completion: str, answer: str) -> float:
    return 0.0


with_invalid_extract.extract = 3


@pytest.mark.parametrize(
    ("name", "called_with"),
    [
        ("takes_completion_and_answer", ("completion", "answer")),
        ("named", ("completion", "answer", "prompt")),
        ("with_metadata", ("completion", "answer", {"key": "value"})),
        (
            "takes_anything",
            ("completion", "answer", {"prompt": "prompt", "metadata": {"key": "value"}, "tool_calls": 2}),
        ),
        ("ScoresInUpperCase", ("ScoresInUpperCase", "completion")),
        ("ScoresInUpperCase.inner", "completion"),
    ],
)
def test_a_function_gets_the_keywords_that_it_accepts(name: str, called_with: object) -> None:
    assert load_verifier(f"{__name__}:{name}")[0](ITEM) == called_with


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gms8k", "'gms8k'.*answer_tag.*gsm8k"),
        ("module:", "no verifier 'module:'"),
        ("no_such_module:score", "ModuleNotFoundError"),
        ("async_grpo.rewards.verifiers.answers:scores", "AttributeError"),
        (f"{__name__}:NOT_A_FUNCTION", "type int"),
        (f"{__name__}:one", r"\(completion: 'str'\)"),
        (f"{__name__}:prompt_first", "multiple values .*'prompt'"),
        (f"{__name__}:with_invalid_extract", "`extract`.*int"),
    ],
)
def test_an_unusable_verifier_is_an_error_with_its_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_verifier(name)


def test_a_custom_function_extracts_with_its_extract_attribute() -> None:
    _, extract = load_verifier(f"{__name__}:ScoresInUpperCase")
    assert extract("yes") == "YES"
    assert load_verifier(f"{__name__}:takes_completion_and_answer")[1] is None


def test_every_verifier_that_compares_answers_can_extract_them() -> None:
    assert [name for name in sorted(BUILTIN) if load_verifier(name)[1] is not None] == EXTRACTING


@pytest.mark.parametrize("name", EXTRACTING)
@pytest.mark.parametrize("reference", ["18", "1800"])
def test_equal_extracted_answers_have_equal_scores(name: str, reference: str) -> None:
    judge, extract = load_verifier(name)
    graded = [(extract(text), judge(RewardInput(text, reference))) for text in COMPLETIONS]
    assert reference != "18" or any(score == 1.0 for _, score in graded)
    for (one, first), (other, second) in combinations(graded, 2):
        if one is not None and one == other:
            assert first == second, (one, name)
    without = [score for answer, score in graded if not answer]
    assert without and max(without) < 1.0


@pytest.mark.parametrize(
    ("name", "completion", "answer"),
    [
        ("answer_tag", "<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("answer_tag", "<answer>1", None),
        ("gsm8k", "#### 1,800.00 dollars", "1800"),
        ("gsm8k", "half: #### .5", "1/2"),
        ("gsm8k", "nothing", None),
        ("accuracy_reward", "3 * 600 = 1,800", "1800"),
        ("accuracy_reward", "No Number", "no number"),
        ("qwen_accuracy_reward", r"\boxed{18}, not 17", "18"),
        ("acc_for_dapo", "Answer: $x = 1/2$", "1/2"),
        ("acc_for_dapo", "it is 1/2", None),
        ("math_17k_acc", r"\boxed{1,800}", "1800"),
        ("math_17k_acc", "1,800", None),
        ("acc_for_ppo", r"\boxed{18\text{ cm}}", "18"),
        ("retool_reward", r"\boxed{17} \boxed{ 18}", " 18"),
        ("base_acc", r"\boxed{18}", None),
        ("acc", r"$\boxed 12$", "12"),
        ("math_verify", "so it is $0.5$", "1/2"),
        ("math_verify_reward", "so it is $0.5$", None),
    ],
)
def test_the_extracted_answer_is_the_compared_one(name: str, completion: str, answer: str | None) -> None:
    _, extract = load_verifier(name)
    assert extract(completion) == answer

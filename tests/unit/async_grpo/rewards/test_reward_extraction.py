"""What verifiers take for the answer of a completion: two completions with the same answer have the same score."""

from __future__ import annotations

from itertools import combinations

import pytest

from async_grpo.errors import ConfigError
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.registry import BUILTIN, EXTRACTIONS, load_with_extraction

FORM_ONLY = {"format", "format_reward", "strict_format", "step"}
NEEDS_THE_PROMPT = {"kk_reward"}

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


class Shouting:
    """Scores and extracts, as a class of a user's own."""

    def __call__(self, completion: str, answer: str) -> float:
        return float(self.extract(completion) == answer)

    def extract(self, completion: str) -> str | None:
        return completion.upper() or None


def with_a_number_for_a_function(completion: str, answer: str) -> float:
    return 0.0


with_a_number_for_a_function.extract = 3  # type: ignore[attr-defined]


def plain(completion: str, answer: str) -> float:
    return 0.0


def test_every_verifier_that_looks_at_the_answer_says_which_it_is() -> None:
    assert set(EXTRACTIONS) == set(BUILTIN) - FORM_ONLY - NEEDS_THE_PROMPT


@pytest.mark.parametrize("name", sorted(EXTRACTIONS))
@pytest.mark.parametrize("reference", ["18", "1800"])
def test_the_same_answer_has_the_same_score(name: str, reference: str) -> None:
    judge, extract = load_with_extraction(name)
    assert extract is not None
    graded = [(extract(text), judge(RewardInput(text, reference))) for text in COMPLETIONS]
    assert reference != "18" or any(score == 1.0 for _, score in graded)
    for (one, first), (other, second) in combinations(graded, 2):
        if one is not None and one == other:
            assert first == second, (one, name)


@pytest.mark.parametrize("name", sorted(EXTRACTIONS))
def test_a_completion_that_gives_no_answer_is_not_right(name: str) -> None:
    judge, extract = load_with_extraction(name)
    assert extract is not None
    without = [text for text in COMPLETIONS if not extract(text)]
    assert without
    assert all(judge(RewardInput(text, "18")) < 1.0 for text in without)


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
def test_the_answer_is_the_one_that_is_compared(name: str, completion: str, answer: str | None) -> None:
    _, extract = load_with_extraction(name)
    assert extract is not None
    assert extract(completion) == answer


@pytest.mark.parametrize("name", sorted(FORM_ONLY))
def test_a_rule_for_the_form_knows_no_answer(name: str) -> None:
    assert load_with_extraction(name)[1] is None


def test_a_function_of_ones_own_extracts_if_it_has_an_attribute_of_that_name() -> None:
    _, extract = load_with_extraction(f"{__name__}:Shouting")
    assert extract is not None and extract("yes") == "YES"
    assert load_with_extraction(f"{__name__}:plain")[1] is None


def test_an_attribute_that_cannot_be_called_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="`extract` that is a int"):
        load_with_extraction(f"{__name__}:with_a_number_for_a_function")

"""Verifiers under the names that other trainers give them: the same scores."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.registry import BUILTIN, NEED_PACKAGES, load_verifier
from async_grpo.rewards.verifiers import boxed
from async_grpo.rewards.verifiers.answers import answer_tag, format_tags, gsm8k
from async_grpo.rewards.verifiers.symbolic import acc, equal
from async_grpo.rewards.verifiers.text import acc_for_dapo, accuracy_reward, qwen_accuracy_reward
from tests.support.bait import baits

BOXED = r"<think>3+15</think><answer>\boxed{18}</answer>"
KNIGHT = "Zoe is a knight"
SCORES = {
    # (completion, reference): scores by name
    (BOXED, "18"): {
        "accuracy_reward": 1.0,
        "qwen_accuracy_reward": 1.0,
        "format_reward": 1.0,
        "format": 1.0,
        "acc": 1.0,
        "strict_format": 1.0,
        "step": 0.0,
        "base_acc": 1.0,
        "math_17k_acc": 1.0,
        "acc_for_ppo": 1.0,
        "acc_for_dapo": -1.0,
        "retool_reward": 1.0,
        "math_verify": 1.0,
        "math_verify_reward": 1.0,
        "gsm8k": 1.0,
        "answer_tag": 0.0,
    },
    (BOXED, "19"): {
        "accuracy_reward": 0.0,
        "qwen_accuracy_reward": 0.0,
        "acc": -0.5,
        "strict_format": 1.0,
        "base_acc": 0.0,
        "math_17k_acc": 0.0,
        "math_verify": 0.0,
        "math_verify_reward": 0.0,
        "gsm8k": 0.0,
    },
    ("First, 3 + 15. Answer: 18", "18"): {
        "accuracy_reward": 1.0,
        "qwen_accuracy_reward": 0.0,
        "format_reward": 0.0,
        "acc": -1.0,
        "strict_format": -0.5,
        "step": 1 / 3,
        "base_acc": 0.0,
        "math_17k_acc": 0.0,
        "acc_for_dapo": 1.0,
        "math_verify": 1.0,
        "math_verify_reward": 0.0,
        "gsm8k": 1.0,
    },
    (r"so \boxed{\frac{36}{2}}", "18"): {
        "accuracy_reward": 0.0,
        "qwen_accuracy_reward": 0.0,
        "acc": 1.0,
        "base_acc": 0.0,
        "math_17k_acc": 0.0,  # where the reference is a whole number, the answer must be one
        "math_verify": 1.0,
        "math_verify_reward": 0.0,
        "gsm8k": 1.0,
    },
    ("", KNIGHT): {"kk_reward": -3.0},
    ("", "18"): {
        "accuracy_reward": 0.0,
        "qwen_accuracy_reward": 0.0,
        "format_reward": 0.0,
        "acc": -1.0,
        "strict_format": -0.5,
        "step": 0.0,
        "base_acc": 0.0,
        "math_17k_acc": 0.0,
        "acc_for_dapo": -1.0,
        "math_verify": 0.0,
        "math_verify_reward": 0.0,
        "gsm8k": 0.0,
        "answer_tag": 0.0,
    },
}


@pytest.mark.parametrize("case", SCORES, ids=lambda case: case[0][:24] + "|" + case[1])
def test_every_name_has_its_score(case: tuple[str, str]) -> None:
    scores = {name: load_verifier(name)[0](RewardInput(*case)) for name in SCORES[case]}
    assert scores == pytest.approx(SCORES[case])


def test_the_table_above_names_every_verifier_there_is() -> None:
    assert set(SCORES[BOXED, "18"]) | set(SCORES["", KNIGHT]) == set(BUILTIN)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("it is 1,800", "1,800", 1.0),
        ("3 then 18", "18 of 20", 1.0),  # the last of the completion, the first of the reference
        ("18.", "18", 0.0),
        ("18.0", "18", 0.0),
        ("-18", "18", 0.0),
        ("+18", "18", 0.0),
        ("YES", "yes", 1.0),
        ("yes!", "yes", 0.0),
        ("1,2,3", "12", 0.0),  # a digit belongs to one comma only: "12,3", whose last number is 3
        ("1,2,3", "3", 1.0),
    ],
)
def test_accuracy_reward_compares_the_last_number_as_a_text(completion: str, answer: str, score: float) -> None:
    assert accuracy_reward(completion, answer) == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("boxed{18}", 1.0),
        (r"\boxed{18} 19", 1.0),
        (r"\boxed{1} \boxed{18}", 1.0),
        (r"\boxed{18} \boxed{eggs}", 1.0),
        (r"\boxed{18.}", 0.0),
        (r"\boxed{ 18}", 0.0),
        (r"\boxed{18", 0.0),
        ("18", 1.0),  # no number in a box: the whole text is compared
        ("18 ", 0.0),
    ],
)
def test_qwen_accuracy_reward_takes_numbers_from_boxes_only(completion: str, score: float) -> None:
    assert qwen_accuracy_reward(completion, "18") == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (r"\boxed{18}", 1.0),
        (r"\boxed{17} \boxed{18}", 1.0),
        (r"\boxed{18} \boxed{17}", -0.5),
        (r"$\boxed 18$", 1.0),
        (r"\boxed{18", 1.0),
        (r"\boxed{}", -1.0),
        ("boxed", -1.0),
        ("#### 18", -1.0),
    ],
)
def test_acc_tells_wrong_answers_from_none(completion: str, score: float) -> None:
    assert acc(completion, "18") == score


@pytest.mark.parametrize(
    ("given", "answer", "same"),
    [
        ("1,800", "1800", True),
        ("+18", "18", True),
        ("018", "18", True),
        ("-18", "18", False),
        ("18.0", "18", True),
        ("36/2", "18", True),
        ("1 800", "1800", True),
        ("Even", "even", True),
        ("20001", "20000", False),
        ("1800", "18", False),
        ("0.5", "\\frac12", True),
        ("18", "3 * 6 = 18 #### 18", True),
    ],
)
def test_answers_are_equal_as_texts_as_whole_numbers_or_symbolically(given: str, answer: str, same: bool) -> None:
    assert equal(given, answer) == same


def test_acc_scores_0_where_comparing_takes_too_long_or_fails() -> None:
    assert acc(r"\boxed{9^{9^{9^{9}}}}", "18") == 0.0
    assert acc(r"\boxed{18}", "") == 0.0


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (r"<think>a</think> <answer>so \boxed{1}</answer>", 1.0),
        (r"<think>a</think><answer>\boxed{1} \boxed{2}</answer>", -0.5),
        (r"<think>\boxed{1}</think><answer>1</answer>", -0.5),
        (r"<think>a</think><answer>\boxed{1}</answer> ", -0.5),
        (r"<think>a<think></think><answer>\boxed{1}</answer>", -0.5),
        ("<think>a</think><answer>\\boxed{\n1}</answer>", -0.5),
    ],
)
def test_strict_format_wants_everything_once_and_in_order(completion: str, score: float) -> None:
    assert boxed.strict_format(completion, "") == score


@pytest.mark.parametrize(
    ("completion", "markers"),
    [("Step 1: a\nStep 2: b", 2), ("1. a\n2. b", 1), ("a\n- b\n* c", 2), ("- a", 0), ("First, a. first, b", 1)],
)
def test_step_counts_markers_up_to_three(completion: str, markers: int) -> None:
    assert boxed.step(completion, "") == markers / 3
    assert boxed.step(completion + "\n-\n-\n-", "") == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Answer: 18", "18"),
        ("answer :\n18", "18"),
        ("Answer: 17\nAnswer: 18", "18"),
        ("Answer: $18$.", "18"),
        ("Answer: x = 18 dollars", "18"),
        ("Answer: 1,800", "1800"),
        (r"Answer: \boxed{18}", "18"),
        (r"Answer: $\frac12$", r"\frac{1}{2}"),
        ("x" * 1000 + "Answer: 18", "18"),
    ],
)
def test_dapo_takes_the_last_answer_line_in_minervas_normal_form(completion: str, answer: str) -> None:
    assert acc_for_dapo(completion, answer) == 1.0


@pytest.mark.parametrize("completion", ["18", "Answer: 18" + " " * 300, "Answer: 18\nAnswer: 19", "Answer:"])
def test_dapo_scores_minus_1_for_anything_else(completion: str) -> None:
    assert acc_for_dapo(completion, "18") == -1.0


def test_dapo_refuses_a_reference_that_is_no_answer() -> None:
    with pytest.raises(ValueError, match="5000 characters"):
        acc_for_dapo("Answer: 18", "1" * 5000)


tag_soup = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "boxed{", "{", "}", "1", ".", "-", "\n", " "]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(tag_soup)
def test_rules_that_search_agree_with_the_expressions_that_define_them(text: str) -> None:
    loose = re.match(r"^<think>.*?</think>\s*<answer>.*?</answer>$", text, re.DOTALL | re.MULTILINE)
    assert format_tags(text, "") == float(loose is not None)
    whole = re.fullmatch(r"<think>.*</think>.*<answer>.*\\boxed\{.*\}.*</answer>", text, re.DOTALL)
    assert boxed.is_whole(text) == (whole is not None)
    closed = [match.start() for match in re.finditer(r"\\boxed\{.*?\}", text)]
    assert boxed.closed_boxes(text, most=100) == closed
    numbers = re.findall(r"boxed{([-+]?\d*\.?\d+)}", text)
    assert qwen_accuracy_reward(text, "1") == float((numbers[-1] if numbers else text) == "1")
    assert boxed.last_boxed(text) == last_boxed_slowly(text)


def last_boxed_slowly(text: str) -> str | None:
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
    return None


HARD = list(baits(60, seed=1))
NO_ALGEBRA = sorted(BUILTIN.keys() - NEED_PACKAGES)
REFERENCES = {"kk_reward": KNIGHT}
RANGES = {
    "strict_format": (-0.5, 1.0),
    "acc_for_dapo": (-1.0, 1.0),
    "retool_reward": (-1.0, 1.0),
    "kk_reward": (-3.0, 3.0),
}


@pytest.mark.parametrize("name", NO_ALGEBRA)
@settings(max_examples=80, deadline=None)
@given(completion=st.one_of(st.text(), tag_soup, st.text(alphabet="0123456789.,-+$/\\{}boxedAnswer: #=\n²٣")))
def test_no_text_makes_a_rule_fail_or_leave_its_range(name: str, completion: str) -> None:
    low, high = RANGES.get(name, (0.0, 1.0))
    assert low <= load_verifier(name)[0](RewardInput(completion, REFERENCES.get(name, "18"))) <= high


@pytest.mark.parametrize("name", NO_ALGEBRA)
def test_texts_that_are_made_to_be_hard_are_scored_like_any_other(name: str) -> None:
    verifier, _ = load_verifier(name)
    scores = {verifier(RewardInput(completion, REFERENCES.get(name, "18"))) for completion in HARD}
    assert scores <= {-3.0, -1.0, -0.5, 0.0, 1 / 3, 2 / 3, 1.0}


@settings(max_examples=200, deadline=None)
@given(reference=st.text(max_size=300))
def test_no_reference_makes_a_comparison_of_texts_fail(reference: str) -> None:
    for verifier in (accuracy_reward, qwen_accuracy_reward, acc_for_dapo, answer_tag):
        assert verifier("<answer>18</answer>", reference) in (-1.0, 0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(value=st.integers(-(10**12), 10**12), other=st.integers(-(10**12), 10**12))
def test_gsm8k_tells_any_two_whole_numbers_apart(value: int, other: int) -> None:
    assert gsm8k(f"so it is {value:,}.", str(value)) == 1.0
    assert gsm8k(f"so it is {value:,}.", str(other)) == float(value == other)

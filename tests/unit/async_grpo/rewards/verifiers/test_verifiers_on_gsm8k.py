"""Every gold answer of the published GSM8K test set against itself, and against a number that it is not."""

from __future__ import annotations

import pytest

from async_grpo.data.prepare.formats import extract_reference
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.registry import load_verifier
from async_grpo.rewards.verifiers.answers import gsm8k
from tests.support.gsm8k import TEST, answers, needs_gsm8k

pytestmark = needs_gsm8k

FORMS = {
    # name: (how a completion gives its answer, score if it is wrong)
    "gsm8k": ("So it is {0}.", 0.0),
    "accuracy_reward": ("So it is {0}", 0.0),
    "qwen_accuracy_reward": ("So it is \\boxed{{{0}}}.", 0.0),
    "acc": ("So it is \\boxed{{{0}}}.", -0.5),
    "math_17k_acc": ("So it is \\boxed{{{0}}}.", 0.0),
    "math_verify": ("So it is \\boxed{{{0}}}.", 0.0),
    "base_acc": ("<think>.</think><answer>\\boxed{{{0}}}</answer>", 0.0),
    "math_verify_reward": ("<think>.</think><answer>\\boxed{{{0}}}</answer>", 0.0),
    "answer_tag": ("<answer>{0}</answer>", 0.0),
    "acc_for_dapo": ("Answer: {0}", -1.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_gold_answer_scores_1_against_itself_and_not_against_its_neighbour(name: str) -> None:
    form, wrong = FORMS[name]
    verifier, _ = load_verifier(name)
    golds = [extract_reference(answer) for answer in answers(TEST)]
    assert len(golds) == 1319
    for gold in golds:
        other = str(int(gold) + 1)
        assert (verifier(RewardInput(form.format(gold), gold)), verifier(RewardInput(form.format(other), gold))) == (
            1.0,
            wrong,
        ), gold


def test_every_published_solution_is_right_by_its_own_reference() -> None:
    for answer in answers(TEST):
        assert gsm8k(answer, answer) == 1.0, answer

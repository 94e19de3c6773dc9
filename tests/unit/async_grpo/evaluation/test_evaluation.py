"""pass@k, maj@k, their means and intervals, against brute force and independent formulas."""

from __future__ import annotations

import math
import random
from itertools import combinations, product

import numpy as np
import pytest

from async_grpo.evaluation.estimators import GradedAnswer, GradedPrompt, estimate_ratios, majority_score, pass_at
from async_grpo.evaluation.summary import (
    OTHERS,
    compute_metrics,
    compute_metrics_by_source,
    estimates_by_name,
    format_estimate,
)
from async_grpo.wire.board import Estimate, EvalMetrics


def prompt(*scores: float | None, source: str = "", answers: str = "", greedy: float | None = None) -> GradedPrompt:
    given = answers or "x" * len(scores)
    sampled = [GradedAnswer(score, answer) for score, answer in zip(scores, given, strict=True)]
    return GradedPrompt(sampled, [] if greedy is None else [GradedAnswer(greedy)], source)


def figures(*prompts: GradedPrompt, samples: int, votes: bool = True, right_at: float = 1.0) -> EvalMetrics:
    return compute_metrics(prompts, samples=samples, right_at=right_at, votes=votes)


@pytest.mark.parametrize("made", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_completion(made: int) -> None:
    for right in range(made + 1):
        completions = [True] * right + [False] * (made - right)
        for k in range(1, made + 1):
            subsets = [any(subset) for subset in combinations(completions, k)]
            assert pass_at(k, made=made, right=right) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_agrees_with_the_product_of_the_paper_where_factorials_would_overflow() -> None:
    made, right, k = 1000, 3, 100
    product_of_the_paper = 1.0 - float(np.prod(1.0 - k / np.arange(made - right + 1, made + 1)))
    assert pass_at(k, made=made, right=right) == pytest.approx(product_of_the_paper, rel=1e-12)


@pytest.mark.parametrize(("k", "made", "right"), [(0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1)])
def test_pass_at_k_is_refused_where_it_is_not_defined(k: int, made: int, right: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at(k, made=made, right=right)


def test_the_majority_is_the_mean_over_the_most_frequent_answers_by_brute_force() -> None:
    """Every sequence of four votes for a (right), b, c (wrong) or nothing: ties broken at random, counted out."""
    for votes in product("abc-", repeat=4):
        grades = [GradedAnswer(float(vote == "a"), None if vote == "-" else vote) for vote in votes]
        cast = [vote for vote in votes if vote != "-"]
        winners = [vote for vote in set(cast) if cast.count(vote) == max(map(cast.count, cast))]
        expected = winners.count("a") / len(winners) if winners else 0.0
        assert majority_score(grades, right_at=1.0) == pytest.approx(expected)


def test_right_is_what_scores_at_least_the_threshold() -> None:
    halves = prompt(0.5, 0.4)
    assert figures(halves, samples=2).pass_at["1"].value == 0.0
    assert figures(halves, samples=2, right_at=0.5).pass_at["1"].value == 0.5


def test_the_mean_is_over_the_completions_and_pass_at_k_over_the_prompts() -> None:
    found = figures(prompt(1.0, 1.0, greedy=1.0), prompt(0.0, 1.0, greedy=0.0), samples=2)
    assert {name: estimate.value for name, estimate in estimates_by_name(found, 2).items()} == {
        "mean@2": 0.75,
        "pass@1": 0.75,
        "pass@2": 1.0,
        "maj@2": 0.75,
        "greedy": 0.5,
    }


def test_what_cannot_be_judged_is_left_out_and_counted() -> None:
    found = figures(prompt(1.0, None), prompt(None, None), prompt(0.0, 0.0), samples=2)
    assert (found.prompts, found.completions, found.unjudged) == (2, 3, 3)
    assert found.mean.value == pytest.approx(1 / 3)
    assert found.pass_at["1"].value == 0.5
    assert found.pass_at["2"].value == 0.0  # of the only prompt with two judged completions
    assert found.majority.value == 0.5


def test_completions_that_a_workflow_failed_to_make_are_left_out_and_counted_apart() -> None:
    failed = GradedAnswer(None, failed=True)
    found = figures(GradedPrompt([GradedAnswer(1.0), failed], [failed]), prompt(0.0, None), samples=2)
    assert (found.completions, found.failed, found.unjudged) == (2, 2, 1)
    assert (found.mean.value, found.greedy) == (0.5, None)


def test_a_completion_in_which_looking_for_the_answer_failed_has_no_vote_and_is_counted() -> None:
    broken = GradedPrompt([GradedAnswer(1.0, unextracted=True), GradedAnswer(0.0, "5")], [GradedAnswer(1.0)])
    found = figures(broken, prompt(1.0, 1.0), samples=2)
    assert (found.unextracted, found.unjudged) == (1, 0)
    assert found.majority.value == 0.5  # of the first prompt only the wrong one votes
    assert found.mean.value == 0.75


def test_there_is_no_majority_without_answers_and_no_figure_at_all_without_a_judgement() -> None:
    found = figures(prompt(1.0, 0.0), samples=2, votes=False)
    assert found.majority is None and found.greedy is None
    assert list(estimates_by_name(found, 2)) == ["mean@2", "pass@1", "pass@2"]
    assert estimates_by_name(figures(prompt(None, None), samples=2), 2) == {}
    assert estimates_by_name(figures(samples=2), 2) == {}


def test_the_interval_is_as_wide_as_the_normal_one_over_prompts() -> None:
    generator = random.Random(7)
    values = [generator.random() for _ in range(400)]
    totals = np.array(values)[:, None]
    (found,) = estimate_ratios(totals, np.ones_like(totals))
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    assert found.value == pytest.approx(math.fsum(values) / len(values), abs=1e-15)
    assert found.low == pytest.approx(found.value - half, abs=half / 8)
    assert found.high == pytest.approx(found.value + half, abs=half / 8)


def test_completions_of_one_prompt_count_as_one() -> None:
    """Eight equal completions a prompt say no more than one: the interval must not shrink."""
    scores = [float(index % 2) for index in range(40)]
    one = figures(*(prompt(score) for score in scores), samples=1).mean
    eight = figures(*(prompt(*[score] * 8) for score in scores), samples=8).mean
    assert one == eight


def test_the_interval_of_prompts_that_are_all_alike_is_a_point() -> None:
    found = figures(*[prompt(1.0)] * 10, samples=1).mean
    assert found == Estimate(1.0, 1.0, 1.0)
    assert format_estimate(found) == "1.000 [1.000, 1.000]"


def test_many_prompts_are_resampled_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(float(index % 4 == 0)) for index in range(30)]
    whole = figures(*prompts, samples=1).mean
    assert whole == figures(*prompts, samples=1).mean
    monkeypatch.setattr("async_grpo.evaluation.estimators._MAX_DRAWS_PER_PART", 30 * 7)
    pieces = figures(*prompts, samples=1).mean
    assert whole is not None and pieces is not None
    assert (pieces.value, pieces.low, pieces.high) == (whole.value, whole.low, whole.high)


def test_every_source_has_its_figures_unless_there_is_one() -> None:
    prompts = [prompt(1.0, source="easy"), prompt(0.0, source="hard"), prompt(1.0, source="hard")]
    found = compute_metrics_by_source(prompts, samples=1, right_at=1.0, votes=False)
    assert {source: part.mean.value for source, part in found.items()} == {"easy": 1.0, "hard": 0.5}
    assert compute_metrics_by_source(prompts[:1], samples=1, right_at=1.0, votes=False) == {}


def test_of_very_many_sources_the_smallest_are_put_together() -> None:
    prompts = [prompt(1.0, source=f"s{number}") for number in range(100)] + [prompt(0.0, source="s7")]
    found = compute_metrics_by_source(prompts, samples=1, right_at=1.0, votes=False)
    assert len(found) == 16 and OTHERS in found and "s7" in found
    assert sum(part.prompts for part in found.values()) == 101

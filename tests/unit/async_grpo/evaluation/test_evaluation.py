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
    letters = answers or "x" * len(scores)
    sampled = [GradedAnswer(score, answer) for score, answer in zip(scores, letters, strict=True)]
    return GradedPrompt(sampled, [] if greedy is None else [GradedAnswer(greedy)], source)


def metrics_of(*prompts: GradedPrompt, samples: int, votes: bool = True, right_at: float = 1.0) -> EvalMetrics:
    return compute_metrics(prompts, samples=samples, right_at=right_at, votes=votes)


@pytest.mark.parametrize("made", range(1, 8))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_right_completion(made: int) -> None:
    for right in range(made + 1):
        completions = [True] * right + [False] * (made - right)
        for k in range(1, made + 1):
            subsets = [any(subset) for subset in combinations(completions, k)]
            assert pass_at(k, made=made, right=right) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_equals_the_product_of_the_paper_for_large_numbers() -> None:
    made, right, k = 1000, 3, 100
    product_of_the_paper = 1.0 - float(np.prod(1.0 - k / np.arange(made - right + 1, made + 1)))
    assert pass_at(k, made=made, right=right) == pytest.approx(product_of_the_paper, rel=1e-12)


@pytest.mark.parametrize(("k", "made", "right"), [(0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1)])
def test_pass_at_k_is_refused_if_undefined(k: int, made: int, right: int) -> None:
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


def test_completions_are_right_from_the_threshold_on() -> None:
    halves = prompt(0.5, 0.4)
    assert metrics_of(halves, samples=2).pass_at["1"].value == 0.0
    assert metrics_of(halves, samples=2, right_at=0.5).pass_at["1"].value == 0.5


def test_the_mean_is_over_the_completions_and_pass_at_k_over_the_prompts() -> None:
    metrics = metrics_of(prompt(1.0, 1.0, greedy=1.0), prompt(0.0, 1.0, greedy=0.0), samples=2)
    assert {name: estimate.value for name, estimate in estimates_by_name(metrics, 2).items()} == {
        "mean@2": 0.75,
        "pass@1": 0.75,
        "pass@2": 1.0,
        "maj@2": 0.75,
        "greedy": 0.5,
    }


def test_unjudged_completions_are_left_out_and_counted() -> None:
    metrics = metrics_of(prompt(1.0, None), prompt(None, None), prompt(0.0, 0.0), samples=2)
    assert (metrics.prompts, metrics.completions, metrics.unjudged) == (2, 3, 3)
    assert metrics.mean.value == pytest.approx(1 / 3)
    assert metrics.pass_at["1"].value == 0.5
    assert metrics.pass_at["2"].value == 0.0  # from the only prompt with two judged completions
    assert metrics.majority.value == 0.5


def test_failed_completions_are_left_out_and_counted_separately() -> None:
    failed = GradedAnswer(None, failed=True)
    metrics = metrics_of(GradedPrompt([GradedAnswer(1.0), failed], [failed]), prompt(0.0, None), samples=2)
    assert (metrics.completions, metrics.failed, metrics.unjudged) == (2, 2, 1)
    assert (metrics.mean.value, metrics.greedy) == (0.5, None)


def test_a_completion_without_an_extracted_answer_has_no_vote_and_is_counted() -> None:
    broken = GradedPrompt([GradedAnswer(1.0, unextracted=True), GradedAnswer(0.0, "5")], [GradedAnswer(1.0)])
    metrics = metrics_of(broken, prompt(1.0, 1.0), samples=2)
    assert (metrics.unextracted, metrics.unjudged) == (1, 0)
    assert metrics.majority.value == 0.5  # in the first prompt, only the wrong completion votes
    assert metrics.mean.value == 0.75


def test_estimates_without_observations_are_missing() -> None:
    metrics = metrics_of(prompt(1.0, 0.0), samples=2, votes=False)
    assert metrics.majority is None and metrics.greedy is None
    assert list(estimates_by_name(metrics, 2)) == ["mean@2", "pass@1", "pass@2"]
    assert estimates_by_name(metrics_of(prompt(None, None), samples=2), 2) == {}
    assert estimates_by_name(metrics_of(samples=2), 2) == {}


def test_the_interval_is_as_wide_as_the_normal_interval_over_prompts() -> None:
    generator = random.Random(7)
    values = [generator.random() for _ in range(400)]
    totals = np.array(values)[:, None]
    (estimate,) = estimate_ratios(totals, np.ones_like(totals))
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    assert estimate.value == pytest.approx(math.fsum(values) / len(values), abs=1e-15)
    assert estimate.low == pytest.approx(estimate.value - half, abs=half / 8)
    assert estimate.high == pytest.approx(estimate.value + half, abs=half / 8)


def test_equal_completions_of_a_prompt_do_not_shrink_the_interval() -> None:
    """Eight equal completions per prompt have no more information than one."""
    scores = [float(index % 2) for index in range(40)]
    one = metrics_of(*(prompt(score) for score in scores), samples=1).mean
    eight = metrics_of(*(prompt(*[score] * 8) for score in scores), samples=8).mean
    assert one == eight


def test_the_interval_of_equal_prompts_is_a_point() -> None:
    estimate = metrics_of(*[prompt(1.0)] * 10, samples=1).mean
    assert estimate == Estimate(1.0, 1.0, 1.0)
    assert format_estimate(estimate) == "1.000 [1.000, 1.000]"


def test_resampling_in_parts_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(float(index % 4 == 0)) for index in range(30)]
    whole = metrics_of(*prompts, samples=1).mean
    assert whole == metrics_of(*prompts, samples=1).mean
    monkeypatch.setattr("async_grpo.evaluation.estimators._MAX_DRAWS_PER_PART", 30 * 7)
    pieces = metrics_of(*prompts, samples=1).mean
    assert whole is not None and pieces is not None
    assert (pieces.value, pieces.low, pieces.high) == (whole.value, whole.low, whole.high)


def test_metrics_by_source_need_several_sources() -> None:
    prompts = [prompt(1.0, source="easy"), prompt(0.0, source="hard"), prompt(1.0, source="hard")]
    by_source = compute_metrics_by_source(prompts, samples=1, right_at=1.0, votes=False)
    assert {source: part.mean.value for source, part in by_source.items()} == {"easy": 1.0, "hard": 0.5}
    assert compute_metrics_by_source(prompts[:1], samples=1, right_at=1.0, votes=False) == {}


def test_the_smallest_of_many_sources_are_combined() -> None:
    prompts = [prompt(1.0, source=f"s{number}") for number in range(100)] + [prompt(0.0, source="s7")]
    by_source = compute_metrics_by_source(prompts, samples=1, right_at=1.0, votes=False)
    assert len(by_source) == 16 and OTHERS in by_source and "s7" in by_source
    assert sum(part.prompts for part in by_source.values()) == 101

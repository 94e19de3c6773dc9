"""Metrics over seeds, and the setting that is recommended."""

from __future__ import annotations

import math

import pytest

from async_grpo.lab.sweep.recommend import ACCURACY, DEFAULT_TOLERANCE, GRADED, REWARD, Candidate, choose, recommend
from async_grpo.lab.sweep.results import FAILED, Curve
from async_grpo.lab.sweep.settings import format_values, group_by_setting, reward_band, sort_values
from tests.support.sweep_fakes import figures


def candidate(label: str, learning: float, speed: float, error: float | None = 0.01, **changes: float) -> Candidate:
    return Candidate(label=label, learning=learning, error=error, samples_per_s=speed, **changes)


def test_the_fastest_setting_within_one_standard_error_of_the_best_is_recommended() -> None:
    choice = choose(
        [candidate("s0", 0.95, 5), candidate("s2", 0.941, 9), candidate("s4", 0.942, 8), candidate("s8", 0.939, 20)],
        ACCURACY,
        None,
    )
    assert (choice.label, choice.within, choice.margin) == ("s2", ["s0", "s2", "s4"], 0.01)
    for words in ("fastest of the 3", "one standard error", "s0 with 0.950"):
        assert words in choice.reason


NEAR = 0.95 - DEFAULT_TOLERANCE / 2


@pytest.mark.parametrize(
    ("candidates", "tolerance", "label", "words"),
    [
        ([candidate("best", 0.95, 5, 0.001), candidate("noisy", 0.9, 9, 0.2)], None, "best", "learned most"),
        ([candidate("s0", 0.95, 5), candidate("s8", 0.90, 9)], 0.1, "s8", "stated tolerance"),
        ([candidate("s0", 0.95, 5), candidate("s8", 0.90, 9)], 0.0, "s0", "stated tolerance"),
        ([candidate("s0", 0.95, 5, None), candidate("s2", NEAR, 9, None)], None, "s2", "gives no standard error"),
        ([candidate("a", 0.945, 9), candidate("b", 0.95, 9)], None, "b", "fastest of the 2"),
        ([candidate("s0", 0.95, 5)], None, "s0", "nothing was compared"),
    ],
    ids=["margin of the best", "tolerance", "no tolerance", "no error known", "equal speed", "one setting"],
)
def test_the_margin_and_the_reason(
    candidates: list[Candidate], tolerance: float | None, label: str, words: str
) -> None:
    choice = choose(candidates, ACCURACY, tolerance)
    assert choice.label == label and words in choice.reason


def test_the_reason_mentions_that_nothing_was_learned() -> None:
    flat = [candidate("s0", 0.405, 5, before=0.4), candidate("s2", 0.40, 9, before=0.4)]
    assert "learned anything" in choose(flat, ACCURACY, None).reason
    assert "learned anything" not in choose([candidate("s0", 0.9, 5, before=0.4)], ACCURACY, None).reason


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"state": FAILED, "error": "boom"}, "seed 2: failed"),
        ({"balanced": False}, "do not balance"),
        ({"balanced": None}, "not known"),
        ({"age_max": 5, "age_bound": 4}, "above the bound 4"),
    ],
)
def test_a_failed_run_or_a_broken_invariant_excludes_the_setting(broken: dict[str, object], why: str) -> None:
    fast = [figures(4, samples_per_s=50.0), figures(4, 2, samples_per_s=50.0, **broken)]
    choice = recommend(group_by_setting([figures(0), figures(0, 2), *fast]))
    assert choice.label == "max_staleness=0"
    assert why in choice.excluded["max_staleness=4"]


def test_a_setting_is_not_recommended_for_the_speed_of_its_head_start() -> None:
    quick = [figures(0, steps=6), figures(4, steps=6, samples_per_s=100.0)]
    choice = recommend(group_by_setting(quick))
    assert choice.label == "" and "14 steps too short" in choice.reason
    enough = [figures(0, steps=20), figures(4, steps=20, samples_per_s=100.0)]
    assert recommend(group_by_setting(enough)).label == "max_staleness=4"


def test_short_runs_of_a_slower_setting_do_not_prevent_a_recommendation() -> None:
    choice = recommend(group_by_setting([figures(0, steps=6), figures(4, steps=6, samples_per_s=1.0)]))
    assert choice.label == "max_staleness=0"


def test_without_finished_points_there_is_a_reason_but_no_recommendation() -> None:
    choice = recommend(group_by_setting([figures(0, state=FAILED)]))
    assert choice.label == "" and "finished" in choice.reason


def test_the_error_is_the_larger_of_seeds_and_evaluation() -> None:
    share = (0.9 * 256 + 1) / 258
    of_evaluation = math.sqrt(share * (1 - share) / 256)
    alike = recommend(group_by_setting([figures(0), figures(0, 2), figures(2)]))
    assert alike.margin == pytest.approx(of_evaluation / math.sqrt(2))
    apart = recommend(group_by_setting([figures(0, accuracy_after=0.8), figures(0, 2, accuracy_after=1.0)]))
    assert apart.margin == pytest.approx(0.1)


def test_an_accuracy_of_one_still_has_an_error() -> None:
    choice = recommend(
        group_by_setting([figures(0, accuracy_after=1.0), figures(2, accuracy_after=0.999, samples_per_s=20.0)])
    )
    assert choice.label == "max_staleness=2" and choice.margin is not None and choice.margin > 0


def test_learning_is_the_mean_reward_if_an_accuracy_is_missing() -> None:
    points = [figures(0, accuracy_after=None), figures(2, accuracy_after=0.99, reward_mean=0.1)]
    choice = recommend(group_by_setting(points))
    assert (choice.measure, choice.label) == (REWARD, "max_staleness=0")


def test_seeds_of_one_combination_make_one_setting_with_numbers_in_order() -> None:
    made = group_by_setting([figures(8), figures(0, 2, samples_per_s=20.0), figures(0), figures(2)])
    assert [setting.label for setting in made] == ["max_staleness=0", "max_staleness=2", "max_staleness=8"]
    assert [point.seed for point in made[0].points] == [1, 2]
    assert made[0].values_of("samples_per_s") == [10.0, 20.0] and made[0].mean("samples_per_s") == 15.0
    [setting] = group_by_setting([figures(0), figures(0, 2, state=FAILED, samples_per_s=99.0)])
    assert setting.values_of("samples_per_s") == [10.0]  # only finished seeds count


def test_numbers_are_sorted_words_keep_their_order_and_labels_are_unique() -> None:
    assert sort_values(["grpo", "areal"]) == ["grpo", "areal"]
    assert sort_values(["1e1", "9", "-1"]) == ["-1", "9", "1e1"]
    [setting] = group_by_setting([figures(0, values={"a.kind": "x", "b.kind": "y"})])
    assert setting.label == "a.kind=x, b.kind=y"


def test_values_are_shown_resolved_and_without_unset_keys() -> None:
    config = {"a": {"on": True, "none": None, "list": [{"kind": "geo_rs", "cap": None, "low": 0.5}]}, "n": 3}
    keys = ["a.on", "a.none", "a.list", "n", "not.there"]
    shown = ["true", "null", '[{"kind": "geo_rs", "low": 0.5}]', "3", "null"]
    assert list(format_values(config, keys).values()) == shown


def test_a_band_spans_all_seeds_over_their_common_range() -> None:
    first = Curve(steps=[1, 2, 3], seconds=[1.0, 2.0, 3.0], reward=[0.0, 1.0, 2.0])
    second = Curve(steps=[1, 2], seconds=[2.0, 4.0], reward=[2.0, 3.0])
    by_step = reward_band([first, second], over_seconds=False)
    assert by_step is not None
    assert (by_step.xs, by_step.mean, by_step.low, by_step.high) == ([1, 2], [1.0, 2.0], [0.0, 1.0], [2.0, 3.0])
    by_time = reward_band([first, second], over_seconds=True)
    assert by_time is not None
    assert (by_time.xs[0], by_time.xs[-1]) == (2.0, 3.0)
    assert (by_time.mean[0], by_time.mean[-1]) == (1.5, 2.25)


def test_long_curves_are_smoothed_over_a_tenth_of_their_steps() -> None:
    steps = list(range(1, 41))
    zigzag = Curve(steps=steps, seconds=[float(step) for step in steps], reward=[float(step % 2) for step in steps])
    smoothed = reward_band([zigzag], over_seconds=False)
    assert smoothed is not None and {round(mean, 3) for mean in smoothed.mean[1:-1]} == {0.333, 0.667}  # 3 steps


def test_disjoint_or_empty_curves_give_no_band() -> None:
    apart = [Curve(steps=[1], seconds=[1.0], reward=[0.0]), Curve(steps=[5], seconds=[9.0], reward=[0.0])]
    assert reward_band(apart, over_seconds=False) is None
    assert reward_band([Curve()], over_seconds=True) is None


def test_graded_answers_are_compared_by_their_mean_reward_and_its_interval() -> None:
    graded = {"held_out_score": "reward", "eval_error": 0.3}
    settings = group_by_setting(
        [figures(0, accuracy_after=1.5, **graded), figures(2, accuracy_after=1.25, samples_per_s=20.0, **graded)]
    )
    choice = recommend(settings)
    assert (choice.measure, choice.margin, choice.label) == (GRADED, 0.3, "max_staleness=2")
    assert "held-out reward" in choice.reason and "1.250" in choice.reason

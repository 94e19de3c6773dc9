"""The rules about who waits: one threshold for all who ask."""

from __future__ import annotations

import re

import pytest

from async_grpo.telemetry.bottleneck import (
    WAITS,
    Bottleneck,
    Cause,
    describe_bottleneck,
    find_bottleneck,
    find_main_cause,
)


@pytest.mark.parametrize(
    ("trainer", "rollout", "found", "words"),
    [
        (0.55, 0.02, Bottleneck.GENERATION, "generation was"),
        (0.11, 0.0, Bottleneck.GENERATION, "generation was"),
        (0.14, 0.08, Bottleneck.GENERATION, "generation was"),
        (0.0, 0.4, Bottleneck.TRAINING, "training was"),
        (0.08, 0.6, Bottleneck.TRAINING, "training was"),
        (0.04, 0.06, Bottleneck.BALANCED, "balanced"),
        (WAITS, WAITS, Bottleneck.BALANCED, "balanced"),
        (0.2, 0.2, Bottleneck.TURNS, "same time"),
        (0.6, 0.4, Bottleneck.TURNS, "generation took longer"),
        (0.14, 0.6, Bottleneck.TURNS, "training took longer"),
    ],
)
def test_the_verdict_agrees_with_the_shares_that_it_names(
    trainer: float, rollout: float, found: Bottleneck, words: str
) -> None:
    sentence = describe_bottleneck(trainer, rollout)
    assert find_bottleneck(trainer, rollout) is found
    assert words in sentence
    assert re.search(rf"trainer .*\b{trainer:.0%}.* servers? .*\b{rollout:.0%}", sentence)
    assert ("max_staleness" in sentence) == (found is Bottleneck.TURNS)


def test_servers_are_not_recommended_without_a_look_at_what_was_waited_for() -> None:
    """Idle shares cannot tell slow verifiers, tasks or weights from too few servers."""
    assert "async-grpo why" in describe_bottleneck(0.55, 0.02)


def test_no_side_is_blamed_where_one_share_is_unknown() -> None:
    assert describe_bottleneck(None, 0.5) == ""
    assert "is not known" in describe_bottleneck(0.3, None)


def test_no_larger_staleness_is_recommended_where_the_selector_makes_both_sides_take_turns() -> None:
    assert "max_staleness" not in describe_bottleneck(0.6, 0.4, selector="exact_age")


def test_evaluations_that_kept_servers_busy_are_named() -> None:
    assert re.search("Evaluations .*16%", describe_bottleneck(0.55, 0.02, 0.16))
    assert "Evaluations" not in describe_bottleneck(0.55, 0.02, 0.01)


@pytest.mark.parametrize(
    ("trainer", "waits", "cause", "share"),
    [
        ({Cause.COMPUTING: 88.0}, {Cause.ENGINE: 8.0, Cause.WINDOW: 4.0}, Cause.ENGINE, 0.08),
        ({Cause.COMPUTING: 92.0}, {Cause.ENGINE: 8.0}, Cause.COMPUTING, 0.92),
        ({Cause.COMPUTING: 50.0, Cause.CHECKPOINTS: 30.0}, {Cause.ENGINE: 20.0}, Cause.CHECKPOINTS, 0.3),
        ({Cause.COMPUTING: 10.0, Cause.CPU: 60.0}, {Cause.ENGINE: 30.0}, Cause.ENGINE, 0.3),
        ({Cause.COMPUTING: 10.0, Cause.CPU: 60.0}, {Cause.ENGINE: 20.0, Cause.CPU: 10.0}, Cause.CPU, 0.7),
    ],
    ids=["waits", "hardly waits", "checkpoints", "only the trainer lacks processors", "both lack processors"],
)
def test_computing_is_the_cause_only_where_the_trainer_does_not_wait(
    trainer: dict[Cause, float], waits: dict[Cause, float], cause: Cause, share: float
) -> None:
    assert find_main_cause(trainer, waits, 100.0) == (cause, pytest.approx(share))

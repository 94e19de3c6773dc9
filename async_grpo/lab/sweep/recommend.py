"""The rule that recommends a setting, and its reason in words. Pure.

    1. A setting counts if every seed has finished, its group counts balance and its age bound was kept.
    2. `learning` is the held-out accuracy (or mean reward, where answers are graded) at the end, sampled, mean over
       seeds; where it was not measured for all of them, the mean training reward.
    3. `margin` is the caller's tolerance; without one it is one standard error of the best setting, the larger of the
       spread over its seeds and the sampling error of the evaluation; without either it is DEFAULT_TOLERANCE.
    4. Among the settings whose learning is within the margin of the best, the one that trains most samples per second.
       If its runs are too short to have a usual pace, none is recommended: its speed is that of its head start.

This is the one-standard-error rule: speed is not given up for a difference that the seeds do not support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from async_grpo.lab.sweep.results import least_steps
from async_grpo.lab.sweep.settings import GridSetting

DEFAULT_TOLERANCE = 0.02
"""Margin of the learning measure if neither seeds nor an evaluation give an error."""

ACCURACY, REWARD = "held-out accuracy at the end (sampled)", "mean training reward"
GRADED = "held-out reward at the end (sampled)"
_LEARNING = {ACCURACY: "accuracy_after", GRADED: "accuracy_after", REWARD: "reward_mean"}
"""Learning measure -> field of PointMetrics."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a setting that the rule uses."""

    label: str
    learning: float
    error: float | None
    """Standard error of `learning`; None if unknown."""
    samples_per_s: float
    before: float | None = None
    """The learning measure before training, where it was measured."""
    missing_steps: int = 0
    """Steps that its shortest run lacks for its speed to mean something."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended setting and the reason. `label` is "" if none is recommended; the reason then says why."""

    label: str
    reason: str
    measure: str = ""
    margin: float | None = None
    within: list[str] = []
    """Labels of the settings whose learning is within the margin of the best."""
    excluded: dict[str, str] = {}
    """Label of a setting -> why it does not count."""


def recommend(settings: Sequence[GridSetting], tolerance: float | None = None) -> Recommendation:
    """The setting to use by the rule above; `tolerance` replaces the margin."""
    excluded = {setting.label: why for setting in settings if (why := _why_not(setting))}
    eligible = [setting for setting in settings if setting.label not in excluded]
    measure = learning_measure(eligible)
    candidates = [found for setting in eligible if (found := candidate(setting, measure)) is not None]
    if not candidates:
        return Recommendation(label="", reason="No setting has finished all of its seeds yet.", excluded=excluded)
    return choose(candidates, measure, tolerance, excluded)


def choose(
    candidates: Sequence[Candidate], measure: str, tolerance: float | None, excluded: dict[str, str] | None = None
) -> Recommendation:
    """The fastest of the candidates within the margin of the best. `candidates` must not be empty."""
    best = max(candidates, key=lambda one: one.learning)
    margin, because = _margin(best, tolerance)
    within = [one for one in candidates if best.learning - one.learning <= margin]
    chosen = max(within, key=lambda one: (one.samples_per_s, one.learning))
    reason = _in_words(chosen, best, within, len(candidates), (margin, because), measure)
    is_chosen_by_speed = len(within) > 1
    if chosen.missing_steps and is_chosen_by_speed:
        reason = (
            f"{chosen.label} trains most samples per second of the {len(within)} settings that learned equally well "
            f"({chosen.samples_per_s:.3g}), but its runs are {chosen.missing_steps} steps too short to tell: most of "
            "what they trained was generated before their first step. Sweep with more steps."
        )
    return Recommendation(
        label="" if chosen.missing_steps and is_chosen_by_speed else chosen.label,
        reason=reason,
        measure=measure,
        margin=margin,
        within=[one.label for one in within],
        excluded=excluded or {},
    )


def learning_measure(settings: Sequence[GridSetting]) -> str:
    """ACCURACY if every finished point has it (GRADED if answers are not just right or wrong), otherwise REWARD."""
    points = [point for setting in settings for point in setting.finished]
    if not points or any(point.accuracy_after is None for point in points):
        return REWARD
    return GRADED if any(point.held_out_score == "reward" for point in points) else ACCURACY


def candidate(setting: GridSetting, measure: str) -> Candidate | None:
    """The setting as a candidate; None if its learning or its speed is not known."""
    key = _LEARNING[measure]
    learning, speed = setting.mean(key), setting.mean("samples_per_s")
    if learning is None or speed is None:
        return None
    errors = [setting.standard_error(key), _evaluation_error(setting) if measure != REWARD else None]
    return Candidate(
        label=setting.label,
        learning=learning,
        error=max((error for error in errors if error is not None), default=None),
        samples_per_s=speed,
        before=setting.mean("accuracy_before") if measure != REWARD else None,
        missing_steps=max((max(0, least_steps(point) - point.steps) for point in setting.finished), default=0),
    )


def _evaluation_error(setting: GridSetting) -> float | None:
    """Standard error of a share of `eval.prompts` prompts, over all seeds: samples of one prompt count as one.

    One right and one wrong answer are added (Laplace), so that all right or all wrong is not taken for certain. That of
    graded answers comes from their interval; None if a seed has none.
    """
    if any(point.held_out_score == "reward" for point in setting.finished):
        errors = [point.eval_error for point in setting.finished]
        known = [error for error in errors if error is not None]
        return math.sqrt(sum(error**2 for error in known)) / len(known) if len(known) == len(errors) else None
    measured = [(point.accuracy_after, point.eval_prompts) for point in setting.finished]
    added = [((share * n + 1) / (n + 2), n) for share, n in measured if share is not None and n]
    variances = [share * (1 - share) / n for share, n in added]
    return math.sqrt(sum(variances)) / len(variances) if variances else None


def _why_not(setting: GridSetting) -> str:
    """Why a setting cannot be recommended; "" if it can."""
    for point in setting.points:
        if point not in setting.finished:
            return f"seed {point.seed}: {point.state}"
        if point.balanced is False:
            return f"seed {point.seed}: its group counts do not balance"
        if point.balanced is None:
            return f"seed {point.seed}: it is not known if its group counts balance"
        if point.age_max is not None and point.age_bound is not None and point.age_max > point.age_bound:
            ages = f"a trained token was {point.age_max} steps old, above the bound {point.age_bound}"
            return f"seed {point.seed}: {ages}"
    return ""


def _margin(best: Candidate, tolerance: float | None) -> tuple[float, str]:
    """The margin below the best that counts as equally good, and where it comes from."""
    if tolerance is not None:
        return tolerance, "the stated tolerance"
    if best.error is not None:
        return best.error, "one standard error of the best"
    return DEFAULT_TOLERANCE, "a fixed tolerance, because one seed without an evaluation gives no standard error"


def _in_words(
    chosen: Candidate, best: Candidate, within: Sequence[Candidate], total: int, margin: tuple[float, str], measure: str
) -> str:
    before = "" if chosen.before is None else f" (before: {chosen.before:.3f})"
    lead = (
        f"{chosen.label} trains {chosen.samples_per_s:.3g} samples per second; its {measure} is {chosen.learning:.3f}"
    )
    width = f"{margin[0]:.3g}, which is {margin[1]}"
    if total == 1:
        compared = "It is the only setting that counts, so nothing was compared."
    elif len(within) == 1:
        compared = f"It learned most, and no other setting is within {width}."
    elif chosen is best:
        compared = f"It learned most and is the fastest of the {len(within)} settings within {width}."
    else:
        of = f"of the best, {best.label} with {best.learning:.3f}"
        compared = f"It is the fastest of the {len(within)} settings within {margin[0]:.3g} {of}; that is {margin[1]}."
    caution = ""
    if best.before is not None and best.learning - best.before <= (best.error or 0.0):
        caution = " No setting learned anything that the evaluation shows, so this compares their speed only."
    return f"{lead}{before}. {compared}{caution}"

"""The rule that recommends a setting, and its reason in words. Pure.

    1. A setting is eligible if every seed has finished, its group counts balance and its age bound was kept.
    2. `learning` is the sampled held-out accuracy at the end (or mean reward, where answers are graded), mean over
       seeds. If it was not measured for all of them, it is the mean training reward.
    3. `margin` is the caller's tolerance. Without one it is one standard error of the best setting: the larger of the
       spread over its seeds and the sampling error of the evaluation. Without either it is DEFAULT_TOLERANCE.
    4. Among the settings whose learning is within the margin of the best, the one that trains most samples per second
       is recommended. If its runs are too short to reach a steady pace, none is: its speed is that of its head start.

This is the one-standard-error rule: speed is not given up for a difference that the seeds do not support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from async_grpo.lab.sweep.results import min_steady_steps
from async_grpo.lab.sweep.settings import GridSetting

DEFAULT_TOLERANCE = 0.02
"""Margin of the learning measure if neither seeds nor an evaluation give an error."""

ACCURACY, REWARD = "held-out accuracy at the end (sampled)", "mean training reward"
GRADED = "held-out reward at the end (sampled)"
_FIELDS = {ACCURACY: "accuracy_after", GRADED: "accuracy_after", REWARD: "reward_mean"}
"""Learning measure -> field of PointMetrics."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a setting that the rule uses."""

    label: str
    learning: float
    error: float | None
    """Standard error of `learning`; None if unknown."""
    samples_per_s: float
    before: float | None = None
    """The learning measure before training, if it was measured."""
    missing_steps: int = 0
    """Steps by which its shortest run is too short for a meaningful speed."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended setting and the reason. `label` is "" if none is recommended; the reason then says why."""

    label: str
    reason: str
    measure: str = ""
    margin: float | None = None
    within: list[str] = []
    """Labels of the settings whose learning is within the margin of the best."""
    excluded: dict[str, str] = {}
    """Label of a setting -> why it is not eligible."""


@dataclass(frozen=True, slots=True)
class _Margin:
    """The difference in learning that counts as equally good."""

    width: float
    source: str
    """Where it comes from, in words."""


def recommend(settings: Sequence[GridSetting], tolerance: float | None = None) -> Recommendation:
    """Return the setting to use by the rule above; `tolerance` replaces the margin."""
    excluded: dict[str, str] = {}
    eligible = []
    for setting in settings:
        reason = _find_exclusion(setting)
        if reason:
            excluded[setting.label] = reason
        else:
            eligible.append(setting)

    measure = learning_measure(eligible)
    candidates = make_candidates(eligible, measure)
    if not candidates:
        return Recommendation(label="", reason="No setting has finished all of its seeds yet.", excluded=excluded)
    return choose(candidates, measure, tolerance, excluded)


def choose(
    candidates: Sequence[Candidate], measure: str, tolerance: float | None, excluded: dict[str, str] | None = None
) -> Recommendation:
    """Return the fastest of the candidates within the margin of the best. `candidates` must not be empty."""
    best = max(candidates, key=lambda candidate: candidate.learning)
    margin = _make_margin(best, tolerance)
    within = [candidate for candidate in candidates if best.learning - candidate.learning <= margin.width]
    chosen = max(within, key=lambda candidate: (candidate.samples_per_s, candidate.learning))

    # A setting that is alone within the margin wins by learning, so the length of its runs does not matter.
    is_chosen_by_speed = len(within) > 1
    label = chosen.label
    reason = _explain_choice(chosen, best, within, len(candidates), margin, measure)
    if chosen.missing_steps and is_chosen_by_speed:
        label = ""
        reason = (
            f"{chosen.label} trains most samples per second of the {len(within)} settings that learned equally well "
            f"({chosen.samples_per_s:.3g}), but its runs are {chosen.missing_steps} steps too short to be sure: most "
            "of what they trained was generated before their first step. Sweep with more steps."
        )
    return Recommendation(
        label=label,
        reason=reason,
        measure=measure,
        margin=margin.width,
        within=[candidate.label for candidate in within],
        excluded=excluded or {},
    )


def learning_measure(settings: Sequence[GridSetting]) -> str:
    """Return ACCURACY if every finished point has it (GRADED if answers are not just right or wrong), else REWARD."""
    points = [point for setting in settings for point in setting.finished]
    if not points or any(point.accuracy_after is None for point in points):
        return REWARD
    return GRADED if any(point.held_out_score == "reward" for point in points) else ACCURACY


def make_candidates(settings: Sequence[GridSetting], measure: str) -> list[Candidate]:
    """Return the settings whose learning and speed are known as candidates."""
    candidates = [make_candidate(setting, measure) for setting in settings]
    return [candidate for candidate in candidates if candidate is not None]


def make_candidate(setting: GridSetting, measure: str) -> Candidate | None:
    """Return the setting as a candidate; None if its learning or its speed is unknown."""
    key = _FIELDS[measure]
    learning = setting.mean(key)
    speed = setting.mean("samples_per_s")
    if learning is None or speed is None:
        return None

    errors = [setting.standard_error(key)]
    before = None
    if measure != REWARD:
        errors.append(_evaluation_error(setting))
        before = setting.mean("accuracy_before")
    missing_steps = [max(0, min_steady_steps(point) - point.steps) for point in setting.finished]
    return Candidate(
        label=setting.label,
        learning=learning,
        error=max((error for error in errors if error is not None), default=None),
        samples_per_s=speed,
        before=before,
        missing_steps=max(missing_steps, default=0),
    )


def _evaluation_error(setting: GridSetting) -> float | None:
    """Return the sampling error of the evaluation, over all seeds; None if it is unknown.

    For accuracies it is the standard error of a share of `eval.prompts` prompts; several samples of one prompt count as
    one. For graded answers it comes from their interval.
    """
    if any(point.held_out_score == "reward" for point in setting.finished):
        errors = [point.eval_error for point in setting.finished]
        measured = [error for error in errors if error is not None]
        if len(measured) < len(errors):
            return None
        return math.sqrt(sum(error**2 for error in measured)) / len(measured)

    variances = []
    for point in setting.finished:
        if point.accuracy_after is not None and point.eval_prompts:
            n = point.eval_prompts
            # Add one right and one wrong answer (Laplace). Otherwise all right or all wrong would have no error.
            share = (point.accuracy_after * n + 1) / (n + 2)
            variances.append(share * (1 - share) / n)
    return math.sqrt(sum(variances)) / len(variances) if variances else None


def _find_exclusion(setting: GridSetting) -> str:
    """Return why a setting cannot be recommended; "" if it can."""
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


def _make_margin(best: Candidate, tolerance: float | None) -> _Margin:
    if tolerance is not None:
        return _Margin(tolerance, "the stated tolerance")
    if best.error is not None:
        return _Margin(best.error, "one standard error of the best")
    return _Margin(
        DEFAULT_TOLERANCE, "a fixed tolerance, because one seed without an evaluation gives no standard error"
    )


def _explain_choice(
    chosen: Candidate, best: Candidate, within: Sequence[Candidate], total: int, margin: _Margin, measure: str
) -> str:
    result = (
        f"{chosen.label} trains {chosen.samples_per_s:.3g} samples per second; its {measure} is {chosen.learning:.3f}"
    )
    if chosen.before is not None:
        result += f" (before: {chosen.before:.3f})"

    width = f"{margin.width:.3g}, which is {margin.source}"
    if total == 1:
        comparison = "It is the only eligible setting, so nothing was compared."
    elif len(within) == 1:
        comparison = f"It learned most, and no other setting is within {width}."
    elif chosen is best:
        comparison = f"It learned most and is the fastest of the {len(within)} settings within {width}."
    else:
        comparison = (
            f"It is the fastest of the {len(within)} settings within {margin.width:.3g} of the best, {best.label} with "
            f"{best.learning:.3f}; that is {margin.source}."
        )

    caution = ""
    if best.before is not None and best.learning - best.before <= (best.error or 0.0):
        caution = " No setting learned anything that the evaluation shows, so this compares their speed only."
    return f"{result}. {comparison}{caution}"

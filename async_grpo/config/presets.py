"""Defaults of the objective's dials, by loss, by correction, and by preset.

    explicit key  >  defaults of a loss that differs from the preset's  >  preset  >  defaults of its loss

Everything is filled in when the configuration is read, so the resolved copy beside a run shows what it used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "opob", "lite_ppo")
WHOLE_BATCH_ADVANTAGES = ("reinforce_pp_baseline", "lite_ppo")
"""Advantages that look beyond the group."""
WEIGHED_ADVANTAGES = ("opob",)
"""Advantages that count a sample by its importance weight, which the policy before the step has to be asked for."""
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "token_sum", "seq_mean_token_sum")

DIALS = (
    *("clip_low", "clip_high", "dual_clip"),
    *("behaviour_cap", "behaviour_cap_mode"),
    *("sapo_tau_positive", "sapo_tau_negative"),
)
"""Dials that only some losses know; None for the others."""

CORRECTION_DIALS = ("cap", "low", "high", "limit")

REWEIGHTING = ("token_tis", "seq_tis", "icepop")
"""Corrections that multiply by an importance weight; the others only reject."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """Dials and choices that a policy loss allows."""

    dials: Mapping[str, float | str]
    optional: tuple[str, ...] = ()
    """Dials that are off (None) unless set."""
    prox: tuple[str, ...] = ("behaviour", "recompute", "loglinear")
    """Sources of pi_prox that it allows; the first is the default."""
    aggregation: str = ""
    """The only one that the formula allows; "": any."""
    weighted: bool = False
    """The loss has the importance weight of the whole way from the behaviour policy in itself."""

    @property
    def known(self) -> tuple[str, ...]:
        """Dials that the loss looks at."""
        return (*self.dials, *self.optional)


LOSSES: dict[str, LossRule] = {
    "ppo_clip": LossRule({"clip_low": 0.2, "clip_high": 0.28}, optional=("dual_clip",)),
    "decoupled": LossRule(
        {"clip_low": 0.2, "clip_high": 0.28, "behaviour_cap": 5.0, "behaviour_cap_mode": "mask"},
        optional=("dual_clip",),
        prox=("recompute", "loglinear"),
        weighted=True,
    ),
    "gspo": LossRule({"clip_low": 3e-4, "clip_high": 4e-4}, aggregation="seq_mean_token_mean"),
    "cispo": LossRule({"clip_high": 4.0}, optional=("clip_low",)),
    "sapo": LossRule({"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}),
    "gmpo": LossRule({"clip_low": 0.4, "clip_high": 0.4}, aggregation="seq_mean_token_mean"),
    "dppo_tv": LossRule({"clip_low": 0.2, "clip_high": 0.2, "behaviour_cap": 20.0}, prox=("behaviour",), weighted=True),
    "topr": LossRule({}, prox=("behaviour",), weighted=True),
}

CORRECTIONS: dict[str, dict[str, float]] = {
    "token_tis": {"cap": 2.0},
    "seq_tis": {"cap": 2.0},
    "seq_mis": {"low": 0.5, "high": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "geo_rs": {"low": 0.999, "high": 1.002},
    "m2po": {"limit": 0.04},
    "opsm": {"limit": 1e-4},
    "ess_lr": {},
}
"""Dials of each correction, with their defaults."""

_CORRECTED = {"advantage": "grpo", "aggregation": "token_mean", "loss": "ppo_clip", "prox": "recompute"}
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "loss": "ppo_clip", "clip_high": 0.2},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm", "loss": "ppo_clip", "clip_high": 0.2},
    "dapo": {"advantage": "grpo", "aggregation": "token_mean", "loss": "ppo_clip", "clip_high": 0.28},
    "gspo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "loss": "gspo"},
    "cispo": {"advantage": "grpo", "aggregation": "token_mean", "loss": "cispo"},
    "areal": {"advantage": "grpo", "aggregation": "token_mean", "loss": "decoupled"},
    "tis": {**_CORRECTED, "corrections": ["token_tis"]},
    "icepop": {**_CORRECTED, "corrections": ["icepop"]},
    "m2po": {"advantage": "grpo", "aggregation": "token_mean", "loss": "ppo_clip", "corrections": ["m2po"]},
    "vcpo": {
        **_CORRECTED,
        "advantage": "opob",
        "aggregation": "seq_mean_token_mean",
        "corrections": [{"kind": "seq_tis", "cap": 8.0}, "ess_lr"],
    },
}
DEFAULT_PRESET = "areal"


def is_own(name: str) -> bool:
    """True if a name is `module:attribute`, a function of the user's own."""
    return ":" in name


def fill(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The objective's section with every key that follows from the others; what is wrong is left as it is."""
    name = raw.get("preset", DEFAULT_PRESET)
    preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
    loss = raw.get("loss", preset.get("loss"))
    rule = LOSSES.get(loss) if isinstance(loss, str) else None
    of_loss: dict[str, Any] = {"prox": "behaviour"}
    if rule is not None:
        of_loss = {"prox": rule.prox[0], **dict.fromkeys(DIALS), **rule.dials}
    if loss != preset.get("loss"):
        preset = {key: preset[key] for key in ("advantage", "aggregation") if key in preset}
        if rule is not None and rule.aggregation:
            preset["aggregation"] = rule.aggregation
    return {**of_loss, **preset, **raw}


def fill_quantized(raw: Any) -> Any:
    """The objective's section for an engine of 8-bit matrices, which samples from another distribution than the trainer
    computes: `token_tis`, if no correction is named and neither the loss nor its ratio carries the weight pi_prox / mu.
    """
    if not isinstance(raw, Mapping):
        return raw
    filled = fill(raw)
    rule = LOSSES.get(str(filled.get("loss")))
    if filled.get("corrections") is not None or rule is None or rule.weighted or filled.get("prox") == "behaviour":
        return raw
    return {**raw, "corrections": ["token_tis"]}


def fill_correction(raw: Any) -> Any:
    """`token_tis` or {kind: token_tis, ...} -> with the defaults of its kind."""
    given = {"kind": raw} if isinstance(raw, str) else raw
    if not isinstance(given, dict) or not isinstance(given.get("kind"), str):
        return given
    return {**CORRECTIONS.get(given["kind"], {}), **given}

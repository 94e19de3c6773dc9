"""Defaults of the objective's settings, per loss, per correction and per preset.

    explicit key  >  defaults of a loss that differs from the preset's  >  preset  >  defaults of its loss

Defaults are filled in when the configuration is loaded, so the run's config.yaml shows the values that were used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp_baseline",
    "opo",
    "opob",
    "lite_ppo",
    "maxrl",
    "reinforce_pp",
    "gdpo",
)
WHOLE_BATCH_ADVANTAGES = ("reinforce_pp_baseline", "lite_ppo")
"""Advantages that depend on the rewards of the whole batch, not only of their group."""
IMPORTANCE_WEIGHTED_ADVANTAGES = ("opob",)
"""Advantages that weight samples by their importance weight. They need a forward pass before the step."""
AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
    "token_sum",
    "seq_mean_token_sum",
    "prompt_mean",
)

LOSS_SETTINGS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "behaviour_cap",
    "behaviour_cap_mode",
    "sapo_tau_positive",
    "sapo_tau_negative",
)
"""Settings that only some losses use; None for the others."""

CORRECTION_SETTINGS = ("level", "action", "estimator", "cap", "low", "high", "limit")
"""Settings that only some corrections use; None for the others."""

REWEIGHTING = ("weight", "token_tis", "seq_tis", "icepop")
"""Corrections that multiply by an importance weight; the others only reject."""
REPEATABLE = ("reject",)
"""Corrections that may be listed several times, with different settings."""
LEVELS = {"weight": ("token", "seq", "geo"), "reject": ("token", "seq_sum", "seq_mean", "seq_max")}
"""Levels of the corrections that have several."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """Settings and choices of a policy loss."""

    defaults: Mapping[str, float | str]
    """Required settings and their defaults."""
    optional: tuple[str, ...] = ()
    """Settings that are off (None) by default."""
    prox: tuple[str, ...] = ("behaviour", "recompute", "loglinear")
    """Allowed sources of pi_prox; the first is the default."""
    aggregation: str | None = None
    """The only aggregation that the formula allows. None: any."""
    has_importance_weight: bool = False
    """True if the formula already contains the full importance weight pi / mu."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of all settings that the loss uses."""
        return (*self.defaults, *self.optional)


LOSSES: dict[str, LossRule] = {
    "ppo_clip": LossRule({"clip_low": 0.2, "clip_high": 0.28}, optional=("dual_clip",)),
    "decoupled": LossRule(
        {"clip_low": 0.2, "clip_high": 0.28, "behaviour_cap": 5.0, "behaviour_cap_mode": "mask"},
        optional=("dual_clip",),
        prox=("recompute", "loglinear"),
        has_importance_weight=True,
    ),
    "gspo": LossRule({"clip_low": 3e-4, "clip_high": 4e-4}, aggregation="seq_mean_token_mean"),
    "cispo": LossRule({"clip_high": 4.0}, optional=("clip_low",)),
    "sapo": LossRule({"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}),
    "gmpo": LossRule({"clip_low": 0.4, "clip_high": 0.4}, aggregation="seq_mean_token_mean"),
    "dppo_tv": LossRule(
        {"clip_low": 0.2, "clip_high": 0.2, "behaviour_cap": 20.0},
        prox=("behaviour",),
        has_importance_weight=True,
    ),
    "topr": LossRule({}, prox=("behaviour",), has_importance_weight=True),
}

CORRECTIONS: dict[str, dict[str, float | str]] = {
    "weight": {"level": "token", "action": "clamp", "high": 2.0},
    "token_tis": {"cap": 2.0},
    "seq_tis": {"cap": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "reject": {"level": "seq_mean", "estimator": "k3", "high": 0.01},
    "seq_mis": {"low": 0.5, "high": 2.0},
    "geo_rs": {"low": 0.999, "high": 1.002},
    "m2po": {"limit": 0.04},
    "opsm": {"limit": 1e-4},
    "kpop": {"limit": 0.1},
    "ess_lr": {},
}
"""Settings of each correction, with their defaults."""
OPTIONAL_SETTINGS = {"weight": ("low",), "reject": ("low",)}
"""Settings of a correction that are off (None) by default."""
SHORTHANDS: dict[str, dict[str, str]] = {
    "token_tis": {"level": "token", "action": "clamp"},
    "seq_tis": {"level": "seq", "action": "clamp"},
    "icepop": {"level": "token", "action": "mask"},
    "seq_mis": {"level": "seq_sum", "estimator": "k1"},
    "geo_rs": {"level": "seq_mean", "estimator": "k1"},
}
"""Established names for settings of `weight` and `reject`."""

_CORRECTED_PPO = {"advantage": "grpo", "aggregation": "token_mean", "loss": "ppo_clip", "prox": "recompute"}
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "loss": "ppo_clip", "clip_high": 0.2},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm", "loss": "ppo_clip", "clip_high": 0.2},
    "dapo": {"advantage": "grpo", "aggregation": "token_mean", "loss": "ppo_clip", "clip_high": 0.28},
    "gspo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "loss": "gspo"},
    "cispo": {"advantage": "grpo", "aggregation": "token_mean", "loss": "cispo"},
    "areal": {"advantage": "grpo", "advantage_norm": "batch", "aggregation": "token_mean", "loss": "decoupled"},
    "tis": {**_CORRECTED_PPO, "corrections": ["token_tis"]},
    "icepop": {**_CORRECTED_PPO, "corrections": ["icepop"]},
    "m2po": {"advantage": "grpo", "aggregation": "token_mean", "loss": "ppo_clip", "corrections": ["m2po"]},
    "vcpo": {
        **_CORRECTED_PPO,
        "advantage": "opob",
        "aggregation": "seq_mean_token_mean",
        "corrections": [{"kind": "seq_tis", "cap": 8.0}, "ess_lr"],
    },
    "prime_rl": {
        "advantage": "dr_grpo",
        "aggregation": "token_mean",
        "loss": "dppo_tv",
        # prime-rl adds tau (log rho)^2 with tau = 1e-3, which is 2 tau times k2.
        "kl_beta": 2e-3,
        "kl_estimator": "k2",
        "kl_to": "behaviour",
    },
    "scale_rl": {"advantage": "lite_ppo", "aggregation": "prompt_mean", "loss": "cispo"},
}
DEFAULT_PRESET = "areal"


def is_custom(name: str) -> bool:
    """True if the name is `module:attribute`, a function of the user."""
    return ":" in name


def fill_objective(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objective's section with the defaults of its preset and its loss.

    This runs before validation, so invalid values are passed through: pydantic reports them with their key.
    """
    name = raw.get("preset", DEFAULT_PRESET)
    preset = dict(PRESETS.get(name, {})) if isinstance(name, str) else {}

    loss = raw.get("loss", preset.get("loss"))
    rule = LOSSES.get(loss) if isinstance(loss, str) else None
    loss_defaults: dict[str, Any] = {"prox": "behaviour"}
    if rule is not None:
        loss_defaults = {"prox": rule.prox[0], **dict.fromkeys(LOSS_SETTINGS), **rule.defaults}

    if loss != preset.get("loss"):
        # The preset's clip range, prox and corrections were chosen for its own loss. Under another loss they may be
        # wrong by orders of magnitude (gspo clips at 4e-4), so only the parts independent of the loss remain.
        independent = ("advantage", "advantage_norm", "aggregation")
        preset = {key: preset[key] for key in independent if key in preset}
        if rule is not None and rule.aggregation is not None:
            preset["aggregation"] = rule.aggregation

    # The preset normalises its own advantage. The resolved configuration of a run that was made before the key existed
    # names the advantage, too, and the run must resume without normalisation.
    if "advantage" in raw:
        preset.pop("advantage_norm", None)
    return {**loss_defaults, **preset, **raw}


def leave_out_batch_norm(raw: Any) -> Any:
    """Return the objective's section without the preset's normalisation over the batch, for a trainer that streams: it
    trains the first groups before the batch is complete."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping) or "advantage_norm" in raw:
        return raw
    return {**raw, "advantage_norm": "none"}


def add_quantization_correction(raw: Any) -> Any:
    """Return the objective's section with the correction `token_tis`, for an engine with 8-bit matrices.

    Such an engine samples from a slightly different distribution (mu) than the trainer computes, so tokens need the
    importance weight pi_prox / mu. The section stays as it is if it sets corrections, or if the loss or its ratio
    already contains that weight.
    """
    if not isinstance(raw, Mapping):
        return raw

    resolved = fill_objective(raw)
    rule = LOSSES.get(str(resolved.get("loss")))
    if resolved.get("corrections") is not None or rule is None:
        return raw
    if rule.has_importance_weight or resolved.get("prox") == "behaviour":
        return raw
    return {**raw, "corrections": ["token_tis"]}


def fill_correction_defaults(raw: Any) -> Any:
    """Return a correction, `token_tis` or {kind: token_tis, ...}, as a mapping with the defaults of its kind."""
    section = {"kind": raw} if isinstance(raw, str) else raw
    if not isinstance(section, dict) or not isinstance(section.get("kind"), str):
        return section
    kind = section["kind"]
    return {**CORRECTIONS.get(kind, {}), **SHORTHANDS.get(kind, {}), **section}

"""The trainer's objective: advantages, loss, corrections and aggregation. docs/algorithms.md has the formulas."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from async_grpo.config.base import StrictModel
from async_grpo.config.presets import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTION_SETTINGS,
    CORRECTIONS,
    IMPORTANCE_WEIGHTED_ADVANTAGES,
    LEVELS,
    LOSS_SETTINGS,
    LOSSES,
    OPTIONAL_SETTINGS,
    REPEATABLE,
    REWEIGHTING,
    SHORTHANDS,
    WHOLE_BATCH_ADVANTAGES,
    LossRule,
    fill_correction_defaults,
    fill_objective,
    is_custom,
)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Options = dict[str, float | int | str | bool]


def _choice_of(names: Iterable[str], *, allow_custom: bool) -> Any:
    """Return a field whose description lists its allowed names."""
    choices = ", ".join(f"`{name}`" for name in names)
    ending = ", or `module:attribute`." if allow_custom else "."
    return Field(description=choices + ending)


class CorrectionConfig(StrictModel):
    """One correction for tokens sampled by an older policy or a different engine: its name, or a mapping with its
    settings."""

    kind: Annotated[str, _choice_of(CORRECTIONS, allow_custom=True)]
    level: Literal["token", "seq", "geo", "seq_sum", "seq_mean", "seq_max"] | None = None
    """weight: per `token`, product over the sequence (`seq`) or geometric mean (`geo`). reject: per `token`, or the
    sum, mean or maximum of the divergence over the sequence."""
    action: Literal["clamp", "mask"] | None = None
    """weight: outside the bounds, `clamp` the weight to them or `mask` the token."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """reject: divergence of a token, with d = log rho. `k1`: d, whose bounds are given as bounds of rho. `k2`: d^2 / 2.
    `k3`: rho - 1 - d."""
    cap: Positive | None = None
    """token_tis, seq_tis: maximum importance weight."""
    low: Positive | None = None
    """Lower bound of the weight (weight, icepop) or of rho (reject with k1, seq_mis, geo_rs)."""
    high: Positive | None = None
    """Upper bound of the weight (weight, icepop), of rho (seq_mis, geo_rs, reject with k1) or of the divergence (reject
    with k2, k3)."""
    limit: Positive | None = None
    """m2po: maximum mean (log rho)^2; opsm: maximum mean KL of a sequence with A < 0; kpop: maximum KL of a token."""
    whole_batch: bool = False
    """Custom corrections: pass all tokens of the batch in one call, which costs a forward pass before the step."""
    options: Options = {}
    """Custom corrections: your own settings."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        return fill_correction_defaults(raw)

    def find_problems(self) -> Iterator[str]:
        if is_custom(self.kind):
            return
        _check_name("correction", self.kind, CORRECTIONS)
        required = {**CORRECTIONS[self.kind], **SHORTHANDS.get(self.kind, {})}
        allowed = (*required, *OPTIONAL_SETTINGS.get(self.kind, ()))
        owner = f"correction {self.kind}"
        yield from _find_wrong_settings(self, owner, CORRECTION_SETTINGS, required=required, allowed=allowed)
        yield from self._find_conflicts_with_kind()
        if self.options or self.whole_batch:
            yield f"options and whole_batch are for custom corrections and have no effect on {self.kind}. Drop them"
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield (
                f"correction {self.kind}: low ({self.low:g}) is not below high ({self.high:g}), so it would reject "
                "everything. Lower low or raise high"
            )

    def _find_conflicts_with_kind(self) -> Iterator[str]:
        levels = LEVELS.get(self.kind)
        if levels is not None and self.level not in levels:
            yield f"correction {self.kind} has no level {self.level}. Set level to {' or '.join(levels)}"
        for setting, value in SHORTHANDS.get(self.kind, {}).items():
            if getattr(self, setting) != value:
                general = "weight" if self.kind in REWEIGHTING else "reject"
                yield f"correction {self.kind} has {setting} {value}. For another one use kind {general}"
        if self.kind == "reject" and self.estimator != "k1" and self.low is not None:
            yield f"low has no effect on reject with {self.estimator}, which is never negative. Drop low"

    @property
    def upper(self) -> float | None:
        """Upper bound of the weight or the divergence: `high`, or `cap` where it has that name."""
        return self.high if self.cap is None else self.cap

    @property
    def needs_whole_batch(self) -> bool:
        """True if it needs the log-probabilities of all tokens of the batch before the step."""
        return self.whole_batch or self.kind == "m2po"


class ObjectiveConfig(StrictModel):
    """Advantages, policy loss, corrections and aggregation. A preset sets all of them; explicit keys take
    precedence."""

    preset: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "areal",
        "tis",
        "icepop",
        "m2po",
        "vcpo",
        "prime_rl",
        "scale_rl",
    ] = "areal"
    """Sets advantage, aggregation, loss, corrections and their settings. `areal`: decoupled GRPO for asynchronous
    training."""
    advantage: Annotated[str, _choice_of(ADVANTAGES, allow_custom=True)] = "grpo"
    advantage_norm: Literal["none", "batch"] = "none"
    """`batch`: after the group's rule, subtract the mean and divide by the standard deviation over the trained tokens
    of the batch."""
    aggregation: Annotated[str, _choice_of(AGGREGATIONS, allow_custom=False)] = "token_mean"
    loss: Annotated[str, _choice_of(LOSSES, allow_custom=True)] = "decoupled"
    prox: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    """Source of pi_prox: the weights just before the step, their approximation by token version (A-3PO), or the policy
    that sampled the token (plain PPO)."""
    clip_low: Positive | None = None
    """Width of the trust region below the old policy; see clip_high."""
    clip_high: Positive | None = None
    """Width of the trust region above the old policy. The ratio stays in [1 - clip_low, 1 + clip_high]. gmpo: the log
    ratio stays in [-clip_low, clip_high]. dppo_tv: pi - pi_behaviour does. cispo: no lower bound without clip_low."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """ppo_clip, decoupled: for A < 0, limit the loss to dual_clip * |A|; usually 3. None: off."""
    behaviour_cap: Positive | None = None
    """decoupled: cap of w = pi_prox / pi_behaviour. dppo_tv: cap of rho = pi / pi_behaviour."""
    behaviour_cap_mode: Literal["mask", "clamp"] | None = None
    """decoupled: drop tokens whose w is above the cap (mask), or train them with w = behaviour_cap (clamp)."""
    sapo_tau_positive: Positive | None = None
    """sapo: temperature of the gate for A >= 0; higher closes it faster."""
    sapo_tau_negative: Positive | None = None
    """sapo: temperature of the gate for A < 0; higher closes it faster."""
    corrections: list[CorrectionConfig] = []
    """Corrections, applied together, for example [geo_rs, {kind: token_tis, cap: 3}]."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence."""
    kl_to: Literal["reference", "behaviour"] = "reference"
    """`reference`: divergence from the policy of trainer.reference. `behaviour`: from the policy that sampled the
    token, which needs no other model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "unbiased_k3"] = "k3+"
    """Estimator of the KL divergence per token (docs/algorithms.md). `k3+`: the value of k3 with the gradient of k2.
    `unbiased_k3`: rho * k3, unbiased also for tokens of older policies."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: add beta * KL to the loss of each token. `reward`: subtract it from the sample's reward."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    options: Options = {}
    """Custom losses: your own settings."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        return fill_objective(raw) if isinstance(raw, dict) else raw

    @field_validator("advantage", "aggregation", "loss")
    @classmethod
    def _check_names(cls, value: str, info: Any) -> str:
        names = {"advantage": ADVANTAGES, "aggregation": AGGREGATIONS, "loss": LOSSES}[info.field_name]
        if info.field_name == "aggregation" or not is_custom(value):
            _check_name(info.field_name, value, names)
        return value

    def find_problems(self) -> Iterator[str]:
        if not is_custom(self.loss):
            yield from self._find_conflicts_with_loss(LOSSES[self.loss])
        yield from self._find_duplicate_weights()
        yield from self._find_wrong_divergence()

    def _find_conflicts_with_loss(self, rule: LossRule) -> Iterator[str]:
        owner = f"loss {self.loss}"
        yield from _find_wrong_settings(self, owner, LOSS_SETTINGS, required=rule.defaults, allowed=rule.settings)
        if self.clip_low is not None and self.clip_low >= 1 and self.loss not in ("gmpo", "cispo"):
            yield (
                f"clip_low ({self.clip_low:g}) is not below 1: 1 - clip_low is the lower bound of the ratio of "
                f"{self.loss}, and a ratio is never negative, so nothing would be clipped. Lower clip_low"
            )
        if self.options:
            yield f"options are for custom losses and have no effect on {self.loss}. Drop trainer.objective.options"
        if self.prox not in rule.prox:
            yield f"loss {self.loss} with prox {self.prox}: {_explain_prox_conflict(self.loss, rule.prox)}"
        if rule.aggregation is not None and self.aggregation != rule.aggregation:
            yield (
                f"loss {self.loss} has one ratio per sequence, and its formula is the mean over sequences: with "
                f"aggregation {self.aggregation} long sequences would count more. Set aggregation to {rule.aggregation}"
            )

    def _find_duplicate_weights(self) -> Iterator[str]:
        kinds = [correction.kind for correction in self.corrections]
        duplicates = sorted({kind for kind in kinds if kinds.count(kind) > 1 and kind not in REPEATABLE})
        if duplicates:
            yield f"correction {duplicates[0]} is given twice. Keep one of them"

        weights = [kind for kind in kinds if kind in REWEIGHTING]
        if len(weights) > 1:
            yield (
                f"corrections {weights[0]} and {weights[1]} both multiply by the importance weight, which would count "
                "it twice. Keep one of them; corrections that only reject (seq_mis, geo_rs, m2po, opsm) may be added"
            )
        reason = self._explain_included_weight()
        if weights and reason is not None:
            yield (
                f"{reason}, and correction {weights[0]} would multiply by it again. Drop {weights[0]}, or set "
                "loss to ppo_clip and prox to recompute"
            )

    def _find_wrong_divergence(self) -> Iterator[str]:
        if self.kl_in != "reward":
            return
        if self.kl_to == "behaviour" and self.kl_beta > 0:
            yield (
                "kl_in reward with kl_to behaviour subtracts the divergence of the sampling policy from itself, which "
                "is 0. Set kl_in to loss, or kl_to to reference"
            )
        if self.kl_estimator == "unbiased_k3":
            yield (
                "kl_estimator unbiased_k3 weighs the divergence in the loss by rho. With kl_in reward the "
                "divergence is already that of the policy that sampled, where rho is 1. Set kl_estimator to k3"
            )

    @property
    def needs_reference(self) -> bool:
        """True if the KL divergence is from the policy of trainer.reference."""
        return self.kl_beta > 0 and self.kl_to == "reference"

    @property
    def custom_functions(self) -> list[str]:
        """All functions named as `module:attribute`."""
        names = [self.advantage, self.loss, *(correction.kind for correction in self.corrections)]
        return [name for name in names if is_custom(name)]

    @property
    def summary(self) -> str:
        """The resolved values in one line."""
        settings = [f"prox {self.prox}"]
        for name in LOSS_SETTINGS:
            value = getattr(self, name)
            if value is not None:
                settings.append(f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}")
        corrections = "".join(f" + {correction.kind}" for correction in self.corrections)
        loss = f"{self.loss} ({', '.join(settings)}){corrections}"
        norm = " over the batch" if self.advantage_norm == "batch" else ""
        return f"{self.preset}: {self.advantage} advantages{norm}, {loss}, {self.aggregation}"

    @property
    def whole_batch_advantage(self) -> str | None:
        """The setting that needs the rewards of the whole batch; None if groups can be trained as they arrive."""
        if self.advantage_norm == "batch":
            return "advantage_norm batch"
        if self.advantage in WHOLE_BATCH_ADVANTAGES or is_custom(self.advantage):
            return f"advantage {self.advantage}"
        return None

    @property
    def needs_forward_pass(self) -> bool:
        """True if every step needs a forward pass over the batch before its first update.

        Advantages or corrections then depend on importance weights of the whole batch. With several updates a step
        needs one anyway, for pi_prox.
        """
        return self.advantages_use_weights or any(correction.needs_whole_batch for correction in self.corrections)

    @property
    def subtracts_kl_from_rewards(self) -> bool:
        """True if the KL divergence of a sample is subtracted from its reward."""
        return self.needs_reference and self.kl_in == "reward" and self.advantage != "reinforce_pp"

    @property
    def subtracts_kl_from_advantages(self) -> bool:
        """True if the KL divergence is subtracted from the advantage of each token, as in REINFORCE++."""
        return self.needs_reference and self.kl_in == "reward" and self.advantage == "reinforce_pp"

    @property
    def advantages_use_weights(self) -> bool:
        """True if the advantages depend on the importance weights of the samples."""
        return self.advantage in IMPORTANCE_WEIGHTED_ADVANTAGES

    @property
    def scales_learning_rate(self) -> bool:
        """True if the learning rate of a step depends on its importance weights."""
        return any(correction.kind == "ess_lr" for correction in self.corrections)

    def _explain_included_weight(self) -> str | None:
        """Return why the loss already contains the importance weight; None if it does not."""
        if is_custom(self.loss):
            return None
        if LOSSES[self.loss].has_importance_weight:
            return f"loss {self.loss} already contains the importance weight"
        if self.prox == "behaviour":
            return f"with prox behaviour the ratio of {self.loss} already is the importance weight"
        return None


def _check_name(field: str, name: str, names: Collection[str]) -> None:
    if name in names:
        return
    similar = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    hint = f"Did you mean {similar[0]!r}?" if similar else f"Use one of {', '.join(names)}"
    raise ValueError(f"there is no {field} {name!r}. {hint}")


def _find_wrong_settings(
    section: StrictModel, owner: str, names: Collection[str], *, required: Collection[str], allowed: Collection[str]
) -> Iterator[str]:
    """Find settings (out of `names`) that have no effect on `owner`, and required ones that are None."""
    present = [name for name in names if getattr(section, name) is not None]
    for name in present:
        if name not in allowed:
            choices = f"its settings are {', '.join(allowed)}" if allowed else "it has no settings"
            yield f"{name} has no effect on {owner}: {choices}. Drop {name}"
    for name in required:
        if name not in present:
            yield f"{owner} needs {name}. Leave the key out to get its default"


def _explain_prox_conflict(loss: str, allowed: tuple[str, ...]) -> str:
    if allowed == ("behaviour",):
        return "it only compares with the policy that sampled the tokens. Set trainer.objective.prox to behaviour"
    return f"then w is 1 and {loss} is ppo_clip. Set prox to {' or '.join(allowed)}, or loss to ppo_clip"

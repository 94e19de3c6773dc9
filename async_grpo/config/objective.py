"""Objective of the trainer: advantages, loss, corrections, aggregation. docs/algorithms.md has the formulas."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from async_grpo.config.base import StrictModel
from async_grpo.config.presets import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTION_DIALS,
    CORRECTIONS,
    DIALS,
    LOSSES,
    REWEIGHTING,
    WEIGHED_ADVANTAGES,
    LossRule,
    fill,
    fill_correction,
    is_own,
)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Options = dict[str, float | int | str | bool]


def _choice_of(names: Iterable[str], *, own: bool) -> Any:
    """A field's description: the names that it may have, and `module:attribute` if it may be the user's own."""
    return Field(description=", ".join(f"`{name}`" for name in names) + (", or `module:attribute`." if own else "."))


class CorrectionConfig(StrictModel):
    """One correction for tokens of another policy or another engine: its name alone, or with its dials."""

    kind: Annotated[str, _choice_of(CORRECTIONS, own=True)]
    cap: Positive | None = None
    """token_tis, seq_tis: the weight is at most this."""
    low: Positive | None = None
    """seq_mis, icepop, geo_rs: below this is rejected."""
    high: Positive | None = None
    """seq_mis, icepop, geo_rs: above this is rejected."""
    limit: Positive | None = None
    """m2po: bound of the mean (log rho)^2; opsm: largest mean KL of a sequence with A < 0."""
    whole_batch: bool = False
    """Your own correction needs all tokens of the batch at once, which costs a forward pass."""
    options: Options = {}
    """Settings of your own correction."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, raw: Any) -> Any:
        return fill_correction(raw)

    def problems(self) -> Iterator[str]:
        if is_own(self.kind):
            return
        _known_name("correction", self.kind, CORRECTIONS)
        wanted = CORRECTIONS[self.kind]
        yield from _wrong_dials(self, f"correction {self.kind}", CORRECTION_DIALS, needed=wanted, known=wanted)
        if self.options or self.whole_batch:
            yield f"options and whole_batch are for corrections of your own, not for {self.kind}. Drop them"
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield (
                f"correction {self.kind}: low ({self.low:g}) is not below high ({self.high:g}), so it would reject "
                "everything. Lower low or raise high"
            )

    @property
    def needs_whole_batch(self) -> bool:
        """True if it must see the log-probabilities of all tokens of the batch before the step."""
        return self.whole_batch or self.kind == "m2po"


class ObjectiveConfig(StrictModel):
    """Advantages, policy loss, corrections and aggregation. A preset sets them together; explicit keys win."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "areal", "tis", "icepop", "m2po", "vcpo"] = "areal"
    """Sets advantage, aggregation, loss, corrections and their dials together. `areal`: decoupled GRPO for asynchronous
    training."""
    advantage: Annotated[str, _choice_of(ADVANTAGES, own=True)] = "grpo"
    aggregation: Annotated[str, _choice_of(AGGREGATIONS, own=False)] = "token_mean"
    loss: Annotated[str, _choice_of(LOSSES, own=True)] = "decoupled"
    prox: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    """Source of pi_prox: the weights just before the step, their approximation by token version (A-3PO), or
    the policy that sampled the token (plain PPO)."""
    clip_low: Positive | None = None
    """Lower edge of the trust region; see clip_high."""
    clip_high: Positive | None = None
    """Trust region: [1 - clip_low, 1 + clip_high] of a ratio; of its logarithm (gmpo); of pi - mu (dppo_tv).
    cispo: without clip_low (the default) there is no lower bound."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """ppo_clip, decoupled: where A < 0 the loss is at most dual_clip * |A|; usually 3. None: off."""
    behaviour_cap: Positive | None = None
    """decoupled: cap of w = pi_prox / pi_behaviour. dppo_tv: cap of rho = pi / pi_behaviour."""
    behaviour_cap_mode: Literal["mask", "clamp"] | None = None
    """decoupled: tokens whose w is above the cap are left out (mask), or trained with w = behaviour_cap (clamp)."""
    sapo_tau_positive: Positive | None = None
    """sapo: how fast the gate closes, for A >= 0."""
    sapo_tau_negative: Positive | None = None
    """sapo: how fast the gate closes, for A < 0."""
    corrections: list[CorrectionConfig] = []
    """Corrections to apply together, for example [geo_rs, {kind: token_tis, cap: 3}]."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the policy of trainer.reference."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3+"
    """Estimate of the divergence at a token (docs/algorithms.md); `k3+`: the value of k3 with the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: beta * KL is added to the loss of each token. `reward`: it is subtracted from the sample's reward."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    options: Options = {}
    """Settings of your own loss."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, raw: Any) -> Any:
        return fill(raw) if isinstance(raw, dict) else raw

    @field_validator("advantage", "aggregation", "loss")
    @classmethod
    def _name(cls, value: str, info: Any) -> str:
        known = {"advantage": ADVANTAGES, "aggregation": AGGREGATIONS, "loss": LOSSES}[info.field_name]
        if info.field_name == "aggregation" or not is_own(value):
            _known_name(info.field_name, value, known)
        return value

    def problems(self) -> Iterator[str]:
        if not is_own(self.loss):
            yield from self._clashes_with_the_loss(LOSSES[self.loss])
        yield from self._weights_counted_twice()

    def _clashes_with_the_loss(self, rule: LossRule) -> Iterator[str]:
        yield from _wrong_dials(self, f"loss {self.loss}", DIALS, needed=rule.dials, known=rule.known)
        if self.clip_low is not None and self.clip_low >= 1 and self.loss not in ("gmpo", "cispo"):
            yield (
                f"clip_low ({self.clip_low:g}) is not below 1: 1 - clip_low is the least ratio of {self.loss}, and no "
                "ratio is negative. Lower clip_low"
            )
        if self.options:
            yield f"options are for a loss of your own, not for {self.loss}. Drop trainer.objective.options"
        if self.prox not in rule.prox:
            yield f"loss {self.loss} with prox {self.prox}: {_why_not_prox(self.loss, rule.prox)}"
        if rule.aggregation and self.aggregation != rule.aggregation:
            yield (
                f"loss {self.loss} has one ratio a sequence, and its formula is the mean over sequences: with "
                f"aggregation {self.aggregation} long sequences would count more. Set aggregation to {rule.aggregation}"
            )

    def _weights_counted_twice(self) -> Iterator[str]:
        kinds = [correction.kind for correction in self.corrections]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            yield f"correction {twice[0]} is given twice. Keep one of them"
        weights = [kind for kind in kinds if kind in REWEIGHTING]
        if len(weights) > 1:
            yield (
                f"corrections {weights[0]} and {weights[1]} both multiply by the importance weight, which would count "
                "it twice. Keep one of them; corrections that only reject (seq_mis, geo_rs, m2po, opsm) may be added"
            )
        carrier = self._carries_weight()
        if weights and carrier:
            yield (
                f"{carrier}, and correction {weights[0]} would multiply by it once more. Drop {weights[0]}, or set "
                "loss to ppo_clip and prox to recompute"
            )

    @property
    def own_functions(self) -> list[str]:
        """Every `module:attribute` that is named."""
        names = [self.advantage, self.loss, *(correction.kind for correction in self.corrections)]
        return [name for name in names if is_own(name)]

    @property
    def summary(self) -> str:
        """The resolved values in a line."""
        dials = {dial: getattr(self, dial) for dial in DIALS if getattr(self, dial) is not None}
        texts = (f"{dial} {value if isinstance(value, str) else f'{value:g}'}" for dial, value in dials.items())
        shown = ", ".join([f"prox {self.prox}", *texts])
        added = "".join(f" + {correction.kind}" for correction in self.corrections)
        return f"{self.preset}: {self.advantage} advantages, {self.loss} ({shown}){added}, {self.aggregation}"

    @property
    def needs_pass(self) -> bool:
        """True if a forward pass over the batch must come before the step."""
        return self.weighs_samples or any(correction.needs_whole_batch for correction in self.corrections)

    @property
    def penalises_rewards(self) -> bool:
        """True if the divergence is subtracted from the rewards."""
        return self.kl_beta > 0 and self.kl_in == "reward"

    @property
    def weighs_samples(self) -> bool:
        """True if the advantages depend on the importance weights of the samples."""
        return self.advantage in WEIGHED_ADVANTAGES

    @property
    def scales_step(self) -> bool:
        """True if the learning rate of a step depends on its importance weights."""
        return any(correction.kind == "ess_lr" for correction in self.corrections)

    def _carries_weight(self) -> str:
        """Reason why the loss contains the importance weight; "" if it does not."""
        if is_own(self.loss):
            return ""
        if LOSSES[self.loss].weighted:
            return f"loss {self.loss} already carries the importance weight"
        if self.prox == "behaviour":
            return f"with prox behaviour the ratio of {self.loss} already is the importance weight"
        return ""


def _known_name(role: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(known)}"
        raise ValueError(f"there is no {role} {name!r}. {hint}")


def _wrong_dials(
    section: StrictModel, owner: str, dials: Collection[str], *, needed: Collection[str], known: Collection[str]
) -> Iterator[str]:
    """The dials that are set in vain, and those that are missing."""
    given = [dial for dial in dials if getattr(section, dial) is not None]
    for dial in given:
        if dial not in known:
            usable = f"it knows {', '.join(known)}" if known else "it has no dials"
            yield f"{dial} has no effect on {owner}: {usable}. Drop {dial}"
    for dial in needed:
        if dial not in given:
            yield f"{owner} needs {dial}. Leave the key out to get its default"


def _why_not_prox(loss: str, usable: tuple[str, ...]) -> str:
    if usable == ("behaviour",):
        return "it compares with the policy that sampled and knows no other. Set trainer.objective.prox to behaviour"
    return f"then w is 1 and {loss} is ppo_clip. Set prox to {' or '.join(usable)}, or loss to ppo_clip"

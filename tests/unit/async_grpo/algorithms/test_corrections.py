"""Corrections and pi_prox equal their formulas, written as loops over sequences and tokens, and hold their edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from async_grpo.algorithms import CORRECTIONS, PROXIMALS, ess_scale, ess_sums
from async_grpo.config.objective import CorrectionConfig
from async_grpo.config.presets import CORRECTIONS as NAMES
from tests.support.objective_cases import Row, joined, log_ratio, random_rows, tensor, tokens_of

torch.set_num_threads(1)
SEEDS = range(12)

Reference = Callable[[list[Row], CorrectionConfig], list[list[float]]]


def log_w(row: Row) -> list[float]:
    return [log_ratio(prox, old) for prox, old in zip(row.prox, row.behaviour, strict=True)]


def log_rho(row: Row) -> list[float]:
    return [log_ratio(now, old) for now, old in zip(row.logprobs, row.behaviour, strict=True)]


def product(logs: list[float]) -> float:
    return math.exp(log_ratio(math.fsum(logs), 0.0))


def each(row: Row, value: float) -> list[float]:
    return [float(value)] * len(row)


def token_tis(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    return [[min(math.exp(value), settings.cap) for value in log_w(row)] for row in rows]


def seq_tis(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    return [each(row, min(product(log_w(row)), settings.cap)) for row in rows]


def icepop(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    weights = [[math.exp(value) for value in log_w(row)] for row in rows]
    return [[weight if settings.low <= weight <= settings.high else 0.0 for weight in row] for row in weights]


def seq_mis(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    return [each(row, settings.low <= product(log_rho(row)) <= settings.high) for row in rows]


def geo_rs(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    return [each(row, settings.low <= math.exp(math.fsum(log_rho(row)) / len(row)) <= settings.high) for row in rows]


def m2po(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    """Drop the largest one after another, until the mean of what is left is below the limit."""
    left = sorted(value**2 for row in rows for value in log_rho(row))
    while left and math.fsum(left) / len(left) >= settings.limit:
        left.pop()
    bound = left[-1] if left else -1.0
    return [[float(value**2 <= bound) for value in log_rho(row)] for row in rows]


def opsm(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    return [each(row, not (row.advantage < 0 and -math.fsum(log_rho(row)) / len(row) > settings.limit)) for row in rows]


def weight(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    def corrected(value: float) -> float:
        low = -math.inf if settings.low is None else settings.low
        if settings.action == "clamp":
            return min(max(value, low), settings.high)
        return value if low <= value <= settings.high else 0.0

    by_level = {
        "token": lambda row: [math.exp(value) for value in log_w(row)],
        "seq": lambda row: each(row, product(log_w(row))),
        "geo": lambda row: each(row, math.exp(math.fsum(log_w(row)) / len(row))),
    }
    return [[corrected(value) for value in by_level[settings.level](row)] for row in rows]


def reject(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    divergence = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(d) - 1 - d,
    }[settings.estimator]
    low = -math.inf if settings.low is None else settings.low

    def is_kept(value: float) -> float:
        if settings.estimator == "k1":
            value = math.exp(max(-20.0, min(20.0, value)))
        return float(low <= value <= settings.high)

    reduce = {"seq_sum": math.fsum, "seq_mean": lambda values: math.fsum(values) / len(values), "seq_max": max}
    kept = []
    for row in rows:
        values = [divergence(d) for d in log_rho(row)]
        if settings.level == "token":
            kept.append([is_kept(value) for value in values])
        else:
            kept.append(each(row, is_kept(reduce[settings.level](values))))
    return kept


def kpop(rows: list[Row], settings: CorrectionConfig) -> list[list[float]]:
    def divergence(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    kept = []
    for row in rows:
        pairs = [(math.exp(now), math.exp(old)) for now, old in zip(row.logprobs, row.behaviour, strict=True)]
        kept.append([float(max(divergence(p, q), divergence(q, p)) <= settings.limit) for p, q in pairs])
    return kept


REFERENCES: dict[str, Reference] = {
    one.__name__: one for one in (weight, token_tis, seq_tis, icepop, reject, seq_mis, geo_rs, m2po, opsm, kpop)
}
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
CASES = [
    *({"kind": kind} for kind in REFERENCES),
    *({"kind": "weight", "level": level, "low": 0.7, "high": 1.4} for level in ("token", "seq", "geo")),
    *({"kind": "weight", "action": "mask", "level": level, "high": 1.2} for level in ("token", "seq", "geo")),
    *({"kind": "reject", "estimator": "k1", "level": level, "low": 0.7, "high": 1.4} for level in LEVELS),
    *({"kind": "reject", "estimator": estimator, "level": level} for estimator in ("k2", "k3") for level in LEVELS),
    {"kind": "token_tis", "cap": 1.1},
    {"kind": "geo_rs", "low": 0.9, "high": 1.2},
    {"kind": "m2po", "limit": 0.1},
    {"kind": "opsm", "limit": 0.2},
]


def test_every_correction_of_the_configuration_exists() -> None:
    assert {*CORRECTIONS, "ess_lr"} == NAMES.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_multipliers_equal_the_formula(case: dict[str, float], seed: int) -> None:
    settings, rows = CorrectionConfig.model_validate(case), random_rows(seed)
    found = CORRECTIONS[settings.kind](tokens_of(rows).detached(), settings)
    assert torch.allclose(found, joined(REFERENCES[settings.kind](rows, settings)), rtol=1e-6, atol=0)
    assert not found.requires_grad


@pytest.mark.parametrize("kind", ["icepop", "reject", "seq_mis", "geo_rs", "m2po", "opsm", "kpop"])
def test_random_batches_have_rejected_and_accepted_tokens(kind: str) -> None:
    wider = {"geo_rs": {"low": 0.9, "high": 1.2}, "reject": {"high": 0.05}, "kpop": {"limit": 0.02}}
    settings = CorrectionConfig.model_validate({"kind": kind, **wider.get(kind, {})})
    found = torch.cat([CORRECTIONS[kind](tokens_of(random_rows(seed)).detached(), settings) for seed in SEEDS])
    assert 0 < (found == 0).sum() < len(found)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_micro_batch_without_trained_tokens_has_no_multipliers(kind: str) -> None:
    assert CORRECTIONS[kind](tokens_of([]).detached(), CorrectionConfig(kind=kind)).shape == (0,)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_multipliers_stay_finite_for_very_different_policies(kind: str) -> None:
    far = tensor([-1e-3, -800.0, -1e-3])
    tokens = replace(tokens_of(random_rows(0, sequences=1, longest=1)), logprobs_N=far, prox_N=far)
    tokens = replace(
        tokens,
        behaviour_N=tensor([-800.0, -1e-3, -1e-3]),
        advantages_N=tensor([-1.0, -1.0, 1.0]),
        segment_N=torch.tensor([0, 0, 1]),
        segments=2,
    )
    found = CORRECTIONS[kind](tokens, CorrectionConfig(kind=kind))
    assert found.isfinite().all()
    assert found[2] == 1.0


def test_m2po_rejects_nothing_below_the_limit_and_may_reject_everything() -> None:
    tokens = tokens_of(random_rows(0)).detached()
    assert CORRECTIONS["m2po"](tokens, CorrectionConfig(kind="m2po", limit=100.0)).all()
    far = replace(tokens, behaviour_N=tokens.logprobs_N - 9.0)
    assert not CORRECTIONS["m2po"](far, CorrectionConfig(kind="m2po")).any()


def test_m2po_rejects_equal_tokens_together() -> None:
    """Two of the three equal ones would fit under the limit; which of them must not be left to their order."""
    logs = tensor([0.0, 0.3, -0.3, 0.3])
    tokens = replace(
        tokens_of([]), logprobs_N=logs, prox_N=logs, behaviour_N=0 * logs, segment_N=torch.arange(4), segments=4
    )
    found = CORRECTIONS["m2po"](tokens, CorrectionConfig(kind="m2po", limit=0.065))
    assert found.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_ess_scale_is_the_root_of_ess_over_sequences(seed: int) -> None:
    rows = random_rows(seed)
    weights = [product(log_rho(row)) for row in rows]
    ess = math.fsum(weights) ** 2 / math.fsum(weight**2 for weight in weights)
    found = ess_scale(*ess_sums(tokens_of(rows).detached()).tolist())
    assert found == pytest.approx(math.sqrt(ess / len(rows)), rel=1e-9)
    assert 0 < found <= 1


def test_ess_scale_is_one_on_policy_and_without_trained_tokens() -> None:
    tokens = tokens_of(random_rows(0))
    on_policy = replace(tokens, behaviour_N=tokens.logprobs_N.detach()).detached()
    assert ess_scale(*ess_sums(on_policy).tolist()) == pytest.approx(1.0, rel=1e-12)
    assert ess_scale(*ess_sums(tokens_of([]).detached()).tolist()) == 1.0


@pytest.mark.parametrize("age", range(5))
def test_loglinear_moves_with_age_from_sampling_to_current_policy(age: int) -> None:
    """v_theta = 9, v_prox = 8, v_behaviour = 9 - age."""
    alpha = (8 - (9 - age)) / (9 - (9 - age)) if age else 1.0
    found = PROXIMALS["loglinear"](tensor([-1.0, -0.2]), tensor([-3.0, -0.1]), torch.tensor([age, age]))
    assert found.tolist() == pytest.approx([-3.0 + alpha * 2.0, -0.1 - alpha * 0.1], rel=1e-12)


def test_loglinear_uses_the_age_of_each_token() -> None:
    found = PROXIMALS["loglinear"](tensor([-1.0] * 3), tensor([-3.0] * 3), torch.tensor([0, 1, 4]))
    assert found.tolist() == [-1.0, -3.0, -1.5]


@pytest.mark.parametrize("choice", PROXIMALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pi_prox_is_constant_and_as_precise_as_the_log_probabilities(choice: str, dtype: torch.dtype) -> None:
    present = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True)
    found = PROXIMALS[choice](present, present.detach() - 1, torch.tensor([2, 3]))
    assert (found.requires_grad, found.dtype) == (False, dtype)


def test_recompute_is_the_current_policy_and_behaviour_the_sampling_one() -> None:
    present, sampling, age = tensor([-1.0]), tensor([-2.0]), torch.tensor([3])
    assert PROXIMALS["recompute"](present, sampling, age).item() == -1.0
    assert PROXIMALS["behaviour"](present, sampling, age).item() == -2.0

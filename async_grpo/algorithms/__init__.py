"""Objectives as pure torch functions: advantages -> per-token loss -> weights that aggregate it.

rewards_BG --advantages--> A_BG                    one number a sample
log-probs_N, A_N --losses, corrections--> loss_N   one number a trained token
sum(weight_N * loss_N)                             aggregation: the weights are known before the step,
                                                   so micro-batches and ranks only ever add up

They see the model through log-probabilities and entropies alone. docs/algorithms.md has every row.
"""

from async_grpo.algorithms.advantages import ADVANTAGES
from async_grpo.algorithms.aggregation import AGGREGATIONS, denominator
from async_grpo.algorithms.corrections import CORRECTIONS, PROXIMALS, ess_scale, ess_sums, sequence_weights
from async_grpo.algorithms.custom import advantage_of, check_objective
from async_grpo.algorithms.losses import LOSSES, TokenLoss
from async_grpo.algorithms.objective import (
    Objective,
    correction_multiplier,
    rewards_less_kl,
    token_kl,
    token_objective,
)
from async_grpo.algorithms.tokens import Tokens

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "LOSSES",
    "PROXIMALS",
    "Objective",
    "TokenLoss",
    "Tokens",
    "advantage_of",
    "check_objective",
    "correction_multiplier",
    "denominator",
    "ess_scale",
    "ess_sums",
    "rewards_less_kl",
    "sequence_weights",
    "token_kl",
    "token_objective",
]

"""Objectives as pure torch functions: advantages -> per-token loss -> weights that aggregate it.

rewards_BG --advantages--> A_BG                    one number per sample
log-probs_N, A_N --losses, corrections--> loss_N   one number per trained token
sum(weight_N * loss_N)                             aggregation: the weights are known before the step,
                                                   so micro-batches and ranks only add up

The functions read log-probabilities and entropies, never the model. docs/algorithms.md lists all of them.
"""

from async_grpo.algorithms.advantages import ADVANTAGES, gdpo, normalise_over_batch
from async_grpo.algorithms.aggregation import AGGREGATIONS, aggregation_denominator
from async_grpo.algorithms.corrections import CORRECTIONS, PROXIMALS, ess_scale, ess_sums, sequence_weights
from async_grpo.algorithms.custom import check_objective, load_advantage
from async_grpo.algorithms.losses import LOSSES, TokenLoss
from async_grpo.algorithms.objective import (
    Objective,
    advantages_less_kl,
    correction_multiplier,
    penalise_rewards,
    policy_kl,
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
    "advantages_less_kl",
    "aggregation_denominator",
    "check_objective",
    "correction_multiplier",
    "ess_scale",
    "ess_sums",
    "gdpo",
    "load_advantage",
    "normalise_over_batch",
    "penalise_rewards",
    "policy_kl",
    "sequence_weights",
    "token_kl",
    "token_objective",
]

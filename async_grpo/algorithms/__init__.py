"""Objectives as pure torch functions: advantages -> per-token loss -> weights that aggregate it.

rewards_BG --advantages--> A_BG          (one number a sample)
log-probs_N, A_N --losses--> loss_N      (one number a trained token)
sum(weight_N * loss_N)                   (aggregation: the weights are known before the step,
                                          so micro-batches and ranks only ever add up)
"""

from async_grpo.algorithms.advantages import ADVANTAGES
from async_grpo.algorithms.aggregation import AGGREGATIONS
from async_grpo.algorithms.losses import TokenLoss, decoupled, importance_weight, ppo_clip

__all__ = ["ADVANTAGES", "AGGREGATIONS", "TokenLoss", "decoupled", "importance_weight", "ppo_clip"]

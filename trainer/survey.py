"""A pass over the whole batch before the step, for corrections that must see all of it.

    micro-batches --forward--> log-probabilities --sum over ranks--> those of the whole batch, on every rank
                                                                         |
    micro-batches with their part of it  <-------- multiplier <----------+

Every rank fills in the places of its own tokens and leaves 0 elsewhere, so the sum is exact, and then computes the same
multiplier: it depends on neither micro-batches nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from megatron.core import parallel_state
from torch import Tensor

from async_grpo.algorithms import PROXIMALS, Tokens, whole_batch_multiplier
from async_grpo.config.objective import ObjectiveConfig
from trainer.parallel import sum_over_ranks
from trainer.policy import Policy
from trainer.sequences import MicroBatch, Targets


def survey(
    policy: Policy, packed: Many[MicroBatch], whole: Targets, objective: ObjectiveConfig, version: int
) -> list[MicroBatch]:
    """`packed` with the multipliers of `whole_batch_multiplier`; `whole`: all trained tokens of the batch, in order."""
    found = policy.run(packed, lambda logprobs_N, _entropy, _batch: (logprobs_N.sum(), logprobs_N), train=False)
    logprobs_N = torch.zeros_like(whole.behaviour_N)
    if parallel_state.get_tensor_model_parallel_rank() == 0:  # the others have the same numbers
        for batch, values_N in zip(packed, found, strict=False):  # nothing is found but on the last pipeline stage
            logprobs_N[batch.index_N] = values_N
    multiplier_N = whole_batch_multiplier(tokens_of(sum_over_ranks(logprobs_N), whole, objective, version), objective)
    return [replace(batch, given_N=multiplier_N[batch.index_N]) for batch in packed]


def tokens_of(
    logprobs_N: Tensor, targets: Targets, objective: ObjectiveConfig, version: int, entropy_N: Tensor | None = None
) -> Tokens:
    """What the objective sees, evaluated by the weights of `version`."""
    age_N = version - targets.versions_N
    return Tokens(
        logprobs_N=logprobs_N,
        prox_N=PROXIMALS[objective.prox](logprobs_N, targets.behaviour_N, age_N),
        behaviour_N=targets.behaviour_N,
        advantages_N=targets.advantages_N,
        segment_N=targets.segment_N,
        segments=targets.segments,
        entropy_N=entropy_N,
    )

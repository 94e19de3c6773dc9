"""What must be computed for all tokens of a batch before its first update.

    micro-batches --forward, reference's weights--> log pi_ref                 if there is a reference model
    micro-batches --forward, policy's weights-----> log pi before the step     if something needs it:
                                                        - several updates, and pi_prox is the policy before the step
                                                        - several updates, and corrections, which are of that policy
                                                        - a correction that needs the whole batch
                                                        - an advantage that counts samples by importance weight
    --sum over ranks--> of all tokens, on every rank --> advantages (then packed again)
                                                     --> multipliers, scale of the learning rate

Every rank fills in the places of its own tokens and leaves 0 elsewhere, so the sum is exact. Every rank then computes
the same numbers: they depend on neither micro-batches nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_grpo.algorithms import PROXIMALS, Tokens, ess_scale, ess_sums, every_multiplier, sequence_weights
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.telemetry.timeline import PhaseTimer
from trainer.batch.packing import Packed
from trainer.batch.sequences import MicroBatch, Sequence, Targets, targets_of
from trainer.distributed import is_counting_rank, sum_over_ranks
from trainer.model.policy import Policy
from trainer.model.reference import Reference


@dataclass(frozen=True, slots=True)
class PrecomputedTokens:
    """Values of all trained tokens of the batch; None where nothing needs them."""

    logprobs_N: Tensor | None = None
    """log pi of the policy before the step."""
    prox_N: Tensor | None = None
    multiplier_N: Tensor | None = None
    """Product of all corrections."""
    reference_N: Tensor | None = None
    lr_scale: float | None = None

    def attach_to(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with the values of its tokens."""

        def part(values_N: Tensor | None) -> Tensor | None:
            return None if values_N is None else values_N[batch.index_N]

        return replace(
            batch, prox_N=part(self.prox_N), given_N=part(self.multiplier_N), reference_N=part(self.reference_N)
        )


def precompute(
    policy: Policy,
    packed: Packed,
    objective: ObjectiveConfig,
    *,
    updates: int,
    reference: Reference | None,
    phases: PhaseTimer,
) -> PrecomputedTokens:
    """Make the passes that a step of `updates` updates needs; `resolve` finds what follows from them."""
    precomputed = PrecomputedTokens()
    if reference is not None:
        with phases.span("reference"), reference.active() as weights:
            precomputed = PrecomputedTokens(reference_N=whole_logprobs(weights, packed))
    several = updates > 1 and bool(objective.prox == "recompute" or objective.corrections)
    if not several and not objective.needs_pass:
        return precomputed
    with phases.span("prox"):
        return replace(precomputed, logprobs_N=whole_logprobs(policy, packed))


def squared_weights(
    precomputed: PrecomputedTokens, members: Many[Sequence], objective: ObjectiveConfig, version: int
) -> list[float]:
    """The squared importance weight of every sample; 0 for those without a trained token."""
    assert precomputed.logprobs_N is not None
    squares_M = sequence_weights(tokens_of(precomputed.logprobs_N, targets_of(members), objective, version)).square()
    found = iter(squares_M.tolist())
    return [next(found) if member.trained_tokens else 0.0 for member in members]


def resolve(
    precomputed: PrecomputedTokens, members: Many[Sequence], objective: ObjectiveConfig, version: int, updates: int
) -> PrecomputedTokens:
    """With all that follows from the log-probabilities before the step, if there are any. `version`: that of the
    present weights."""
    if precomputed.logprobs_N is None:
        return precomputed
    tokens = tokens_of(precomputed.logprobs_N, targets_of(members), objective, theta_version(version, updates))
    return replace(
        precomputed,
        prox_N=precomputed.logprobs_N if objective.prox == "recompute" else None,
        multiplier_N=every_multiplier(tokens, objective),
        lr_scale=ess_scale(*ess_sums(tokens).tolist()) if objective.scales_step else None,
    )


def whole_logprobs(policy: Policy, packed: Packed) -> Tensor:
    """log pi of all trained tokens of the batch, in order, on every rank."""
    found = policy.run(packed.micro_batches, lambda values_N, _entropy, _batch: (values_N.sum(), values_N), train=False)
    logprobs_N = torch.zeros(sum(member.trained_tokens for member in packed.members))
    if is_counting_rank():
        for batch, values_N in zip(packed.micro_batches, found, strict=False):  # only the last pipeline stage finds any
            logprobs_N[batch.index_N] = values_N
    return sum_over_ranks(logprobs_N)


def theta_version(version: int, updates: int) -> int:
    """The version of the policy that is trained, for `prox: loglinear`, whose pi_prox is one version behind it.

    In a step of several updates that is the policy before it, of `version`, and the one in the making is the next.
    """
    return version + 1 if updates > 1 else version


def tokens_of(
    logprobs_N: Tensor, targets: Targets, objective: ObjectiveConfig, theta: int, entropy_N: Tensor | None = None
) -> Tokens:
    """The tokens as the objective sees them, evaluated by the weights of version `theta`."""
    age_N = theta - targets.versions_N
    return Tokens(
        logprobs_N=logprobs_N,
        prox_N=PROXIMALS[objective.prox](logprobs_N, targets.behaviour_N, age_N),
        behaviour_N=targets.behaviour_N,
        advantages_N=targets.advantages_N,
        segment_N=targets.segment_N,
        segments=targets.segments,
        entropy_N=entropy_N,
    )

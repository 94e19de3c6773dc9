"""One step from one batch: version v -> v + 1, in one optimizer update or several.

    groups -> sequences -> micro-batches --(precompute)--> what must be known of the whole batch first
                                |
       for every mini-batch:    +--> forward, backward --> gradients --optimizer--> next weights

All ranks see the whole batch, so advantages, loss weights and packing need no communication; gradients and a few
statistics do. A step makes `num_iterations` passes over the batch of `mini_batches` updates each. The loss weights are
those of the mini-batch, the advantages those of the whole batch, and pi_prox, corrections and reference are of the
policy before the step. `precompute` makes an extra pass only if something needs it.

A streamed step begins with the groups that are there, while others are still being generated:

    some groups --add--> forward, backward --> gradients, not yet divided, not yet summed over ranks
       ^                        |
       +--- some are missing ---+--- none is --close--> sum over ranks, divide, optimizer --> next weights

The loss is a sum over sequences of (own weight / D), and D (tokens or sequences of the batch, by `aggregation`) is
known only when all groups are there. Gradients are therefore accumulated without it and divided once, before the
optimizer sees them: up to rounding, the step equals the one that waits for the whole batch. Advantages are relative to
the group. The configuration refuses objectives that need the whole batch before the first micro-batch.

Each part is packed by itself and trained at once, whether it fills its micro-batches or not: otherwise the trainer
would be idle, and while it computes, more groups gather for the next part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from async_grpo.algorithms import denominator, ess_scale, rewards_less_kl, token_objective
from async_grpo.config import RunConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import NonFiniteStep
from async_grpo.telemetry.metrics import StepTotals
from async_grpo.telemetry.timeline import PhaseTimer
from async_grpo.wire import Batch
from trainer.batch.packing import Packed, pack, pack_for_rank, sequences_in, split_groups
from trainer.batch.sequences import MicroBatch, Sequence, reweighed, targets_of
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.step.precompute import PrecomputedTokens, precompute, resolve, squared_weights, theta_version, tokens_of
from trainer.step.results import TRAINING, TRAINING_ADAPTERS, StepValues, model_cost
from trainer.step.statistics import StepSums, gap_sums, micro_batch_sums, reduce_sums


class PreparedBatch(NamedTuple):
    """A batch, or a part of one, with what had to be precomputed."""

    members: list[Sequence]
    packed: Packed
    precomputed: PrecomputedTokens


def train_step(
    policy: Policy,
    batch: Batch,
    config: RunConfig,
    *,
    lr: float,
    phases: PhaseTimer,
    reference: Reference | None = None,
) -> StepValues:
    """Turn version `batch.version` into the next one.

    The result does not depend on the number of micro-batches or ranks (up to rounding). Raises NonFiniteStep if the
    loss or the gradient of an update is not finite: that update changes nothing, and those before it stand.
    """
    step = Step(policy, config, batch.version, phases, reference)
    prepared = step.prepare(batch)
    for number, packed in enumerate(step.mini_batches(prepared, len(batch.groups))):
        loss = MicroBatchLoss(config.trainer.objective, batch.version, config.trainer.updates, first=number == 0)
        with phases.span("train", micro_batches=len(packed.micro_batches)):
            policy.zero_grad()
            found = step.run(packed, prepared.precomputed, loss)
            sums, maxima = reduce_sums(found)
        step.update(sums, maxima, lr, prepared.precomputed.lr_scale)
    return step.totals.values()


@dataclass(slots=True)
class Step:
    """The parts of the step `version` -> `version + 1`. All calls are collective."""

    policy: Policy
    config: RunConfig
    version: int
    phases: PhaseTimer
    reference: Reference | None = None
    totals: StepTotals = field(init=False)

    def __post_init__(self) -> None:
        self.totals = StepTotals(with_entropy=self._with_entropy, with_reference=self.reference is not None)

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Make and pack the sequences of a batch or a part of one, and make the passes that must come before the first
        update."""
        objective, updates = self.config.trainer.objective, self.config.trainer.updates
        members, packed = self._packed(batch)
        precomputed = precompute(
            self.policy, packed, objective, updates=updates, reference=self.reference, phases=self.phases
        )
        if objective.weighs_samples or objective.penalises_rewards:
            squares = None
            if objective.weighs_samples:
                squares = squared_weights(precomputed, members, objective, self.version)
            if objective.penalises_rewards:
                batch = _penalised(batch, members, precomputed, objective)
            members, packed = self._packed(batch, squares)
        precomputed = resolve(precomputed, members, objective, self.version, updates)
        self.totals.advantages += [member.advantage for member in members if member.counted]
        self.totals.overlong += sum(member.overlong for member in members)
        return PreparedBatch(members, packed, precomputed)

    def mini_batches(self, prepared: PreparedBatch, groups: int) -> Iterator[Packed]:
        """The packed mini-batch of each update, in order."""
        trainer = self.config.trainer
        if trainer.updates == 1:
            yield prepared.packed
            return
        for iteration in range(trainer.num_iterations):
            parts = split_groups(
                groups, trainer.mini_batches, seed=self.config.seed, version=self.version, iteration=iteration
            )
            for part in parts:
                with self.phases.span("pack"):
                    members = [member for member in prepared.members if member.group in part]
                    weighed = reweighed(members, trainer.objective, self.config.sampling.max_tokens)
                    packed = pack(weighed, self.config, model_cost(self.policy.hf).quadratic)
                yield packed

    def run(
        self, packed: Packed, precomputed: PrecomputedTokens, loss: MicroBatchLoss, *, total: bool = True
    ) -> list[StepSums]:
        """Accumulate the gradient of the micro-batches; returns their statistics. `total`: as in `Policy.run`."""
        batches = [precomputed.attach_to(batch) for batch in packed.micro_batches]
        found: list[StepSums] = self.policy.run(batches, loss, train=True, entropy=self._with_entropy, total=total)
        totals = self.totals
        totals.lengths += packed.lengths
        totals.slots += packed.slots
        totals.micro_batches += len(batches)
        totals.balances.append(packed.balance)
        passes = TRAINING if self.policy.adapters is None else TRAINING_ADAPTERS
        totals.flops += passes * model_cost(self.policy.hf).forward(packed.lengths)
        return found

    def update(self, sums: dict[str, float], maxima: dict[str, float], lr: float, lr_scale: float | None) -> None:
        """Change the weights by the gradient that was accumulated. Raises NonFiniteStep before it does.

        `lr_scale`: of the whole batch, where it was precomputed.
        """
        if not math.isfinite(sums["loss"]):
            raise NonFiniteStep(
                f"the loss of the step {self.version} -> {self.version + 1} is {sums['loss']}. The weights before it "
                "are intact. Lower trainer.optimizer.lr, or the caps of trainer.objective"
            )
        if self.config.trainer.objective.scales_step:
            of_this = ess_scale(sums["sequence_weight"], sums["sequence_weight_squared"], sums["sequences"])
            self.totals.lr_scale = of_this if lr_scale is None else lr_scale
        with self.phases.span("optimizer"):
            self.totals.norms.append(self.policy.update(lr * self.totals.lr_scale))
        self.totals.add(sums, maxima)

    @property
    def _with_entropy(self) -> bool:
        return self.config.trainer.objective.entropy_coef > 0

    def _packed(self, batch: Batch, squares: list[float] | None = None) -> tuple[list[Sequence], Packed]:
        with self.phases.span("pack"):
            members = sequences_in(batch, self.config, squares)
            return members, pack(members, self.config, model_cost(self.policy.hf).quadratic)


def measure_gap(policy: Policy, batch: Batch, config: RunConfig) -> dict[str, float]:
    """Measure |behaviour - trainer| of tokens that `batch.version`, the present weights, sampled; rewards do not
    matter. Without such tokens there is no gap, only their number."""
    groups = [
        structs.replace(group, samples=[structs.replace(one, reward=0.0) for one in group.samples])
        for group in batch.groups
    ]
    packed = pack_for_rank(structs.replace(batch, groups=groups), config)

    def gap(logprobs_N: Tensor, _entropy_N: Tensor | None, targets: MicroBatch) -> tuple[Tensor, StepSums]:
        return logprobs_N.sum(), gap_sums(logprobs_N, targets, batch.version)

    sums, maxima = reduce_sums(policy.run(packed.micro_batches, gap, train=False))
    tokens = int(sums["gap_tokens"])
    found = {"logprob_gap_mean": sums["gap"] / tokens, "logprob_gap_max": maxima["gap"]} if tokens else {}
    return {**found, "gap_tokens": tokens}


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """The loss function of a micro-batch; hands back its statistics."""

    objective: ObjectiveConfig
    version: int
    """Version of the weights before the step."""
    updates: int = 1
    """Updates of the whole step."""
    first: bool = True
    """Whether the weights are still those before the step."""
    scale: float = 1.0
    """Factor on the weights of the tokens."""

    def __call__(self, logprobs_N: Tensor, entropy_N: Tensor | None, batch: MicroBatch) -> tuple[Tensor, StepSums]:
        objective, theta = self.objective, theta_version(self.version, self.updates)
        tokens = tokens_of(logprobs_N, batch, objective, theta, entropy_N)
        if batch.prox_N is not None:
            tokens = replace(tokens, prox_N=batch.prox_N)
        tokens = replace(tokens, reference_N=batch.reference_N)
        if batch.given_N is not None:  # of all corrections: none is left to be found here
            objective = objective.model_copy(update={"corrections": []})
        found = token_objective(tokens, objective, batch.given_N)
        loss = (found.loss_N * batch.weights_N).sum() * self.scale
        return loss, micro_batch_sums(tokens, batch, found, loss, objective, self.version if self.first else None)


def _penalised(
    batch: Batch, members: list[Sequence], precomputed: PrecomputedTokens, objective: ObjectiveConfig
) -> Batch:
    """The batch with beta * (divergence of each sample, summed over its trained tokens) taken from its reward."""
    assert precomputed.reference_N is not None
    targets = targets_of(members)
    tokens = tokens_of(targets.behaviour_N, targets, objective, batch.version)
    samples = [sample for group in batch.groups for sample in group.samples]
    trained = [place for place, member in enumerate(members) if member.trained_tokens]
    rewards_M = torch.tensor([samples[place].reward for place in trained], dtype=torch.float64)
    less_M = rewards_less_kl(
        rewards_M, tokens, precomputed.reference_N, beta=objective.kl_beta, estimator=objective.kl_estimator
    )
    for place, reward in zip(trained, less_M.tolist(), strict=True):
        samples[place] = structs.replace(samples[place], reward=reward)
    rest = iter(samples)
    groups = [structs.replace(group, samples=[next(rest) for _ in group.samples]) for group in batch.groups]
    return structs.replace(batch, groups=groups)


@dataclass(slots=True)
class StreamedStep(Step):
    """The step `version` -> `version + 1`, made part by part. All calls are collective."""

    parts: list[Batch] = field(default_factory=list)
    found: list[StepSums] = field(default_factory=list)
    members: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        Step.__post_init__(self)
        self.policy.zero_grad()

    @property
    def have(self) -> int:
        """Groups so far."""
        return sum(len(part.groups) for part in self.parts)

    @property
    def complete(self) -> bool:
        """Whether the batch has no more groups."""
        return bool(self.parts) and self.parts[-1].missing == 0

    @property
    def batch(self) -> Batch:
        """All parts as one batch."""
        return structs.replace(self.parts[-1], groups=[group for part in self.parts for group in part.groups])

    def add(self, part: Batch) -> None:
        """Accumulate the gradient of further groups of the batch."""
        self.parts.append(part)
        prepared = self.prepare(part)
        scale = self._denominator(prepared.members)
        loss = MicroBatchLoss(self.config.trainer.objective, self.version, scale=scale)
        with self.phases.span("train", groups=len(part.groups)):
            self.found += self.run(prepared.packed, prepared.precomputed, loss, total=False)
        self.members += prepared.members

    def close(self, lr: float) -> StepValues:
        """Update the weights by the accumulated gradient. Raises NonFiniteStep before it does."""
        total = self._denominator(self.members)
        with self.phases.span("train"):
            self.policy.total_gradients(scale=1.0 / total)
            sums, maxima = reduce_sums(self.found)
        sums["loss"] /= total
        self.update(sums, maxima, lr, None)
        return self.totals.values()

    def _denominator(self, members: list[Sequence]) -> float:
        tokens_N = torch.tensor([member.counted for member in members])
        return denominator(self.config.trainer.objective.aggregation, tokens_N)

"""The settings of a simulation: those of a run that affect its speed and the ages of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from async_grpo.config import RunConfig
from async_grpo.config.buffer import AutoStalenessConfig
from async_grpo.staleness import ReplayPolicy, StalenessWindow


@dataclass(frozen=True, slots=True)
class FixedWindow(StalenessWindow):
    """A window of a fixed number of groups, independent of S.

    Models other systems, which bound admission directly: by a queue of Q groups and C in flight, or by (1 + s) P with
    a fraction s.
    """

    groups: int = 0

    @property
    def capacity(self) -> int:
        """Number of groups that may be active."""
        return self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """Settings of the simulated run. The last ones model other systems; `from_config` leaves them at their defaults."""

    policy: ReplayPolicy
    steps: int
    group_size: int
    servers: int
    max_concurrency: int
    """Samples in flight per engine."""
    min_concurrency: int = 0
    oversample: int = 0
    interruption: Literal["keep", "recompute", "drain", "abort"] = "keep"
    max_interruptions: int = 3
    max_attempts: int = 5
    lease_s: float = 45.0
    progress_interval_s: float = 5.0
    streaming: bool = False
    checkpoint_steps: int = 0
    eval_every: int = 0
    eval_prompts: int = 0
    """Held-out prompts per evaluation."""
    eval_samples: int = 4
    """Sampled completions per held-out prompt."""
    eval_greedy: bool = True
    """True if each held-out prompt also gets a completion at temperature 0."""
    auto_staleness: AutoStalenessConfig | None = None
    """The controller of `max_staleness: auto`. None: S is constant."""

    groups_in_flight: int | None = None
    """Maximum number of groups that are generated at a time, over all servers; each new group goes to the server with
    the fewest. None: only max_concurrency limits them."""
    holds_slots_per_group: bool = False
    """True if a group keeps all of its slots until its longest sample has ended. Ours frees each with its sample."""
    prefetches_batches: bool = False
    """True if new weights wait until the next batch is complete, so its tokens are one version older. slime and miles
    keep updates out of an unfinished batch this way."""
    min_part_groups: int = 1
    """streaming: minimum number of ready groups for the trainer to take a part of a batch."""
    finishes_stale: bool = False
    """True if servers continue groups that are already too old to be trained."""
    regenerates_stale: bool = False
    """True if a group that became too old is generated again, with completions of the same lengths."""
    sync_every: int = 1
    """Steps between two versions that are sent to the engines."""

    @property
    def samples_started_per_group(self) -> int:
        """Number of samples with which a group starts."""
        return self.group_size + self.oversample

    @property
    def groups_per_step(self) -> int:
        """P."""
        return self.policy.window.groups_per_step

    @property
    def max_staleness(self) -> int:
        """S."""
        return self.policy.window.max_staleness

    @classmethod
    def from_config(cls, config: RunConfig) -> SimulatedSettings:
        """Settings of a configured run."""
        rollout = config.rollout
        trainer = config.trainer
        return cls(
            policy=config.replay_policy,
            steps=config.steps,
            group_size=config.group_size,
            servers=rollout.servers,
            max_concurrency=rollout.max_concurrency,
            min_concurrency=rollout.min_concurrency,
            oversample=rollout.oversample,
            interruption=rollout.interruption,
            max_interruptions=rollout.max_interruptions,
            max_attempts=rollout.max_attempts,
            lease_s=config.lease_s,
            progress_interval_s=rollout.progress_interval_s,
            streaming=trainer.streaming,
            checkpoint_steps=trainer.checkpoint.every_steps,
            eval_every=config.eval.every_steps,
            eval_prompts=config.eval.prompts,
            eval_samples=config.eval.samples,
            eval_greedy=config.eval.greedy,
            auto_staleness=config.auto_staleness,
        )

    def with_steps(self, steps: int) -> SimulatedSettings:
        """Copy with another number of steps."""
        window = replace(self.policy.window, horizon=steps * self.groups_per_step)
        return replace(self, steps=steps, policy=replace(self.policy, window=window))

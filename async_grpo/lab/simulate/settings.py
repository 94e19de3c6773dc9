"""What a simulation is of: the settings of a run that matter for its speed and its ages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from async_grpo.config import RunConfig
from async_grpo.config.buffer import AutoStalenessConfig
from async_grpo.staleness import ReplayPolicy, StalenessWindow


@dataclass(frozen=True, slots=True)
class CountedWindow(StalenessWindow):
    """A window of so many groups, whatever S is: how other systems bound what is admitted (a queue of Q groups and C in
    flight; (1 + s) P with a fraction s)."""

    groups: int = 0

    @property
    def capacity(self) -> int:
        """Groups that may be active."""
        return self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """The settings of a run that a simulation needs, and some by which other systems differ."""

    policy: ReplayPolicy
    steps: int
    group_size: int
    servers: int
    max_concurrency: int
    """Samples in flight in one engine."""
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
    """Held-out prompts of one evaluation."""
    eval_samples: int = 4
    """Sampled completions of each of them."""
    eval_greedy: bool = True
    """True if each gets one more completion, at temperature 0."""
    groups_in_flight: int | None = None
    """Most groups that are generated at once, over all servers, each new one on the server with the fewest. None: only
    max_concurrency counts."""
    slots_by_group: bool = False
    """Whether a group holds its slots until its longest sample has ended. Ours frees each when its sample ends."""
    prefetches: bool = False
    """Whether new weights wait until the next batch is complete, so that its tokens are one version older: how slime
    and miles keep an update out of a batch in the making."""
    least_part: int = 1
    """streaming: groups that must be ready before a part is trained."""
    finishes_stale: bool = False
    """Whether a server goes on with groups that are too old to be trained."""
    recycles: bool = False
    """Whether a group that is too old to be trained is generated again, with completions of the same lengths."""
    sync_every: int = 1
    """Steps between two versions that engines get."""
    auto: AutoStalenessConfig | None = None
    """max_staleness: auto. None: S stays as it is."""

    @property
    def started_samples(self) -> int:
        """Samples that a group starts with."""
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
    def of(cls, config: RunConfig) -> SimulatedSettings:
        """The settings of a configured run."""
        rollout, trainer = config.rollout, config.trainer
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
            auto=config.auto_staleness,
        )

    def with_steps(self, steps: int) -> SimulatedSettings:
        """The same run with another number of steps."""
        window = replace(self.policy.window, horizon=steps * self.groups_per_step)
        return replace(self, steps=steps, policy=replace(self.policy, window=window))

"""The whole configuration of a run, one model per section.

A newcomer sets `max_staleness`; everything else has defaults that work. The same names are used in the YAML file, in
`-o key=value` overrides, in the code and in the docs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from async_grpo.config.base import PositiveInt, StrictModel
from async_grpo.config.buffer import AutoStalenessConfig, BufferConfig, RedisConfig
from async_grpo.config.data import DataConfig
from async_grpo.config.launch import EvalConfig, LaunchConfig, TelemetryConfig
from async_grpo.config.model import ModelConfig
from async_grpo.config.presets import fill_quantized
from async_grpo.config.rewards import RewardsConfig
from async_grpo.config.rollout import RolloutConfig, SamplingConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.config.weights import WeightsConfig
from async_grpo.staleness import ReplayPolicy, StalenessWindow


class RunConfig(StrictModel):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the run, of its folder in `runs_dir`, and of its keys in Redis."""
    runs_dir: Path = Path("runs")
    """Folder that holds the folders of all runs."""
    runs_store: Annotated[str, Field(pattern=r"^((s3|gs|az)://[^/@?#]+(/[^@?#]*)?|file:///[^@?#]+)$")] | None = None
    """Destination of copies of runs with their checkpoints: s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER. The
    same command on another machine continues from there. Credentials come from the environment."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Seed of the first policy, the order of the data and the sampling."""
    steps: PositiveInt = 100
    """Optimizer steps; the run ends at policy version `steps`."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """S: no trained token is more than S optimizer steps old. 0 is on-policy training. auto: the trainer chooses the
    effective S between auto_staleness.min and auto_staleness.max, which is the bound."""
    auto_staleness: AutoStalenessConfig | None = None
    """Bounds and limits of max_staleness: auto."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G: samples of one prompt."""
    groups_per_step: PositiveInt = 16
    """P: groups of one optimizer step."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    rewards: RewardsConfig = RewardsConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    buffer: BufferConfig = BufferConfig()
    redis: RedisConfig = RedisConfig()
    eval: EvalConfig = EvalConfig()
    launch: LaunchConfig = LaunchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, given: Any) -> Any:
        """Replace max_staleness: auto by the bound of auto_staleness."""
        if not isinstance(given, dict) or given.get("max_staleness") != "auto":
            return given
        auto = given.get("auto_staleness") or {}
        bound = AutoStalenessConfig.model_fields["max"].default
        if isinstance(auto, dict):
            bound = auto.get("max", bound)
        return given | {"max_staleness": bound, "auto_staleness": auto}

    @model_validator(mode="before")
    @classmethod
    def _correct_for_quantization(cls, given: Any) -> Any:
        """Add a correction for an engine of 8-bit matrices (`fill_quantized`)."""
        match given:
            case {"rollout": {"vllm": {"quantization": "fp8" | "int8"}}}:
                trainer = given.get("trainer", {})
                if isinstance(trainer, dict):
                    return given | {"trainer": trainer | {"objective": fill_quantized(trainer.get("objective", {}))}}
        return given

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return self.runs_dir / self.name

    @property
    def local_name(self) -> str:
        """Name of the run on this machine, with a digest of its folder: runs of equal names must not share names in
        shared memory."""
        digest = hashlib.sha256(str(self.run_dir.absolute()).encode()).hexdigest()[:8]
        return f"{self.name}-{digest}"

    @property
    def capacity_groups(self) -> int:
        """(S + 1) * P: maximum number of active groups (admitted and not yet released)."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def lease_s(self) -> float:
        """Duration of a lease, in seconds."""
        return self.rollout.lease_for(self.redis)

    @property
    def most_servers(self) -> int:
        """Maximum number of concurrent rollout servers of `async-grpo run`."""
        return max(self.rollout.servers, self.launch.autoscale.max_servers or 0)

    @property
    def longest_sample_s(self) -> float:
        """Maximum seconds per sample; the default leaves time to regenerate a group before `trainer.take_timeout_s`."""
        return self.rollout.longest_sample_for(self.trainer.take_timeout_s)

    @property
    def staleness_window(self) -> StalenessWindow:
        """The window of the bound S, for all groups of the run."""
        return StalenessWindow(self.max_staleness, self.groups_per_step, self.steps * self.groups_per_step)

    @property
    def replay_policy(self) -> ReplayPolicy:
        """The buffer's policy, with the initial S of `auto_staleness`."""
        policy = self.buffer.replay_policy(self.staleness_window, self.seed)
        return policy.with_staleness(self.auto_staleness.start) if self.auto_staleness else policy

    def problems(self) -> Iterator[str]:
        """Combinations of sections that cannot work. The section that owns the first key of a message checks it."""
        limits = self.rollout.limits
        if self.auto_staleness is not None:
            yield from self.auto_staleness.problems_in_run(self.max_staleness, self.buffer)
        yield from self.buffer.problems_in_run(self.staleness_window)
        yield from self.rollout.problems_in_run(self.sampling, self.redis, self.model, self.trainer.take_timeout_s)
        yield from self.rewards.problems_in_run(self.sampling.max_tokens)
        yield from self.trainer.problems_in_run(self.model, limits, self.groups_per_step)
        yield from self.eval.problems_in_run(self.data)
        yield from self.model.problems_in_run(self.data.kind, self.data.arithmetic)
        yield from self.launch.problems_in_run(self.rollout, self.trainer, self.model.lora)

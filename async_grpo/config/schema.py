"""The whole configuration of a run, one model per section.

`max_staleness` is the one setting that matters at first; the others have defaults that work. The same names are used
in the YAML file, in `-o key=value` overrides, in the code and in the docs.
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
from async_grpo.config.presets import add_quantization_correction
from async_grpo.config.rewards import RewardsConfig
from async_grpo.config.rollout import RolloutConfig, SamplingConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.config.weights import WeightsConfig
from async_grpo.staleness import ReplayPolicy, StalenessWindow


class RunConfig(StrictModel):
    """Configuration of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the run; also of its folder in `runs_dir` and of its keys in Redis."""
    runs_dir: Path = Path("runs")
    """Folder with one subfolder per run."""
    runs_store: Annotated[str, Field(pattern=r"^((s3|gs|az)://[^/@?#]+(/[^@?#]*)?|file:///[^@?#]+)$")] | None = None
    """Where runs and their checkpoints are copied to: s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER. The same
    command on another machine resumes from the copy. Credentials come from the environment."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Seed of the first policy, of the data order and of sampling."""
    steps: PositiveInt = 100
    """Optimizer steps; the run ends at policy version `steps`."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """S: no trained token is more than S optimizer steps old. 0 is on-policy training. auto: the trainer adapts the
    effective S between auto_staleness.min and auto_staleness.max; the latter is then the bound."""
    auto_staleness: AutoStalenessConfig | None = None
    """Range and thresholds of max_staleness: auto."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G: samples per prompt."""
    groups_per_step: PositiveInt = 16
    """P: groups per optimizer step."""
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
    def _resolve_auto_staleness(cls, raw: Any) -> Any:
        """Replace `max_staleness: auto` by its bound, auto_staleness.max."""
        if not isinstance(raw, dict) or raw.get("max_staleness") != "auto":
            return raw
        auto = raw.get("auto_staleness") or {}
        bound = AutoStalenessConfig.model_fields["max"].default
        if isinstance(auto, dict):
            bound = auto.get("max", bound)
        return raw | {"max_staleness": bound, "auto_staleness": auto}

    @model_validator(mode="before")
    @classmethod
    def _correct_quantized_engine(cls, raw: Any) -> Any:
        """Add an importance weight to the objective if the engine has 8-bit matrices and nothing else corrects them."""
        match raw:
            case {"rollout": {"vllm": {"quantization": "fp8" | "int8"}}}:
                trainer = raw.get("trainer", {})
                if isinstance(trainer, dict):
                    objective = add_quantization_correction(trainer.get("objective", {}))
                    return raw | {"trainer": trainer | {"objective": objective}}
        return raw

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return self.runs_dir / self.name

    @property
    def name_with_digest(self) -> str:
        """Name of the run and a digest of its folder's path, unique on this machine and in a cluster's shared folders.

        Used in names of shared-memory stores, jobs and actors. Without the digest, two runs of the same name in
        different folders would replace each other's weights.
        """
        digest = hashlib.sha256(str(self.run_dir.absolute()).encode()).hexdigest()[:8]
        return f"{self.name}-{digest}"

    @property
    def capacity_groups(self) -> int:
        """(S + 1) * P: maximum number of active groups (admitted and not yet released)."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def lease_s(self) -> float:
        """Duration of a lease, in seconds."""
        return self.rollout.resolve_lease_s(self.redis)

    @property
    def max_servers_at_once(self) -> int:
        """Maximum number of concurrent rollout servers of `async-grpo run`."""
        return max(self.rollout.servers, self.launch.autoscale.max_servers or 0)

    @property
    def max_sample_s(self) -> float:
        """Maximum seconds per sample; the default leaves time to regenerate a group before `trainer.take_timeout_s`."""
        return self.rollout.resolve_max_sample_s(self.trainer.take_timeout_s)

    @property
    def staleness_window(self) -> StalenessWindow:
        """The staleness window under the bound S, for all groups of the run."""
        return StalenessWindow(self.max_staleness, self.groups_per_step, self.steps * self.groups_per_step)

    @property
    def replay_policy(self) -> ReplayPolicy:
        """The buffer's policy, with the initial S of `auto_staleness`."""
        policy = self.buffer.replay_policy(self.staleness_window, self.seed)
        if self.auto_staleness is None:
            return policy
        return policy.with_staleness(self.auto_staleness.start)

    def find_problems(self) -> Iterator[str]:
        """Find conflicts between sections. The section that owns the first key of a message contains its check."""
        limits = self.rollout.limits
        if self.auto_staleness is not None:
            yield from self.auto_staleness.find_conflicts(self.max_staleness, self.buffer)
        yield from self.buffer.find_conflicts(self.staleness_window)
        yield from self.rollout.find_conflicts(self.sampling, self.redis, self.model, self.trainer.take_timeout_s)
        yield from self.rewards.find_conflicts(self.sampling.max_tokens)
        yield from self.trainer.find_conflicts(self.model, limits, self.groups_per_step)
        yield from self.eval.find_conflicts(self.data)
        yield from self.model.find_conflicts(self.data.kind, self.data.arithmetic)
        yield from self.launch.find_conflicts(self.rollout, self.trainer, self.model.lora)

"""Everything that a run can be told, one model a section.

A newcomer turns one dial, `max_staleness`; the rest has defaults that work. The same names are
used in the YAML file, in `-o key=value` overrides, in the code and in the docs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from async_grpo.config.base import PositiveInt, StrictModel
from async_grpo.config.buffer import AdmissionConfig, AutoStalenessConfig, BufferConfig, RedisConfig
from async_grpo.config.data import DataConfig
from async_grpo.config.launch import EvalConfig, LaunchConfig, TelemetryConfig
from async_grpo.config.model import ModelConfig
from async_grpo.config.presets import fill_quantized
from async_grpo.config.rewards import RewardsConfig
from async_grpo.config.rollout import RolloutConfig, SamplingConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.config.weights import WeightsConfig
from async_grpo.staleness import RateLimit, ReplayPolicy, StalenessWindow

LEASE_SHARE = 1.5
"""Leases last so many times redis.timeout_s: they are renewed when a third has gone, and outlive that wait then."""


class RunConfig(StrictModel):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the run, of its folder in `runs_dir`, and of its keys in Redis."""
    runs_dir: Path = Path("runs")
    """Folder that holds the folders of all runs."""
    runs_store: Annotated[str, Field(pattern=r"^((s3|gs|az)://[^/@?#]+(/[^@?#]*)?|file:///[^@?#]+)$")] | None = None
    """Where runs are copied with their checkpoints: s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER. The same
    command on another machine goes on from there. Credentials come from the environment."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Seed of the first policy, the order of the data and the sampling."""
    steps: PositiveInt = 100
    """Optimizer steps; the run ends at policy version `steps`."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """S: no trained token is more than S optimizer steps old. 0 is on-policy training. auto: the trainer chooses the S
    in force, between auto_staleness.min and auto_staleness.max, which is the bound."""
    auto_staleness: AutoStalenessConfig | None = None
    """With max_staleness: auto, its bounds and limits."""
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
        """max_staleness: auto is the bound of auto_staleness."""
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
        """An engine of 8-bit matrices has its tokens weighed (`fill_quantized`)."""
        match given:
            case {"rollout": {"vllm": {"quantization": "fp8" | "int8"}}}:
                trainer = given.get("trainer", {})
                if isinstance(trainer, dict):
                    return given | {"trainer": trainer | {"objective": fill_quantized(trainer.get("objective", {}))}}
        return given

    @property
    def run_dir(self) -> Path:
        """Where this run writes."""
        return self.runs_dir / self.name

    @property
    def local_name(self) -> str:
        """The run on this machine: its name and a digest of its folder, so that equal names do not meet in
        shared memory."""
        digest = hashlib.sha256(str(self.run_dir.absolute()).encode()).hexdigest()[:8]
        return f"{self.name}-{digest}"

    @property
    def capacity_groups(self) -> int:
        """(S + 1) * P: the most groups that may be active (admitted and not yet released)."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def lease_s(self) -> float:
        """How long a ticket is leased for."""
        return self.rollout.lease_s or LEASE_SHARE * self.redis.timeout_s

    @property
    def most_servers(self) -> int:
        """The most rollout servers that `async-grpo run` may have at once."""
        return max(self.rollout.servers, self.launch.autoscale.max_servers or 0)

    @property
    def longest_sample_s(self) -> float:
        """What a sample may take at most: where it is derived, the group that takes its place still comes before the
        trainer gives up."""
        given = self.rollout.sample_deadline_s
        return given if given is not None else self.trainer.take_timeout_s / 2

    @property
    def replay_policy(self) -> ReplayPolicy:
        """What the replay buffer is told. Raises ValueError for dials that do not go together."""
        chosen, admission = self.buffer.selector, self.buffer.admission
        policy = ReplayPolicy(
            window=StalenessWindow(self.max_staleness, self.groups_per_step, self.steps * self.groups_per_step),
            selector=chosen.kind,
            selector_window=chosen.window,
            on_stale=self.buffer.on_stale,
            rate=self._rate_limit(admission),
            max_uses=self.buffer.max_uses,
            seed=self.seed,
        )
        return policy.with_staleness(self.auto_staleness.start) if self.auto_staleness else policy

    def _rate_limit(self, admission: AdmissionConfig) -> RateLimit:
        if admission.kind != "sample_to_insert_ratio":
            return RateLimit(min_size=admission.min_size)
        size = max(admission.min_size, self.groups_per_step)
        error_buffer = admission.error_buffer or 2.0 * self.groups_per_step
        return RateLimit.ratio(admission.samples_per_insert, min_size=size, error_buffer=error_buffer)

    def problems(self) -> Iterator[str]:
        yield from self._clashing_staleness()
        yield from self._clashing_times()
        yield from self._clashing_lengths()
        yield from self._clashing_data()
        yield from self._clashing_reference()
        yield from self._clashing_quantization()
        yield from self._clashing_precision()
        most = self.launch.autoscale.max_servers
        if most is not None and most < self.rollout.servers:
            yield (
                f"launch.autoscale.max_servers ({most}) is below rollout.servers ({self.rollout.servers}), the fewest "
                "servers. Raise launch.autoscale.max_servers or lower rollout.servers"
            )
        if self.launch.share_devices != "off":
            yield from self._clashing_shares()

    def _clashing_quantization(self) -> Iterator[str]:
        engine, lora = self.rollout.vllm, self.model.lora
        if engine.quantization == "none":
            return
        if engine.platform != "cpu" and self.model.precision == "float32":
            yield (
                f"rollout.vllm.quantization is {engine.quantization}, whose products on {engine.platform} end in "
                "16 bits, but model.precision is float32. Set model.precision to bfloat16"
            )
        if lora is not None and lora.engine == "adapters":
            yield (
                f"rollout.vllm.quantization is {engine.quantization}, and adapters beside 8-bit matrices are not "
                "supported. Set model.lora.engine to merged, or rollout.vllm.quantization to none"
            )

    def _clashing_precision(self) -> Iterator[str]:
        ranks = self.trainer.context_parallel
        if ranks > 1 and self.trainer.platform == "cuda" and self.model.precision == "float32":
            yield (
                f"trainer.context_parallel is {ranks}, and on cuda the kernel for sequences that ranks share computes "
                "in bfloat16, but model.precision is float32. Set model.precision to bfloat16, or "
                "trainer.context_parallel to 1"
            )

    def _clashing_staleness(self) -> Iterator[str]:
        auto = self.auto_staleness
        if auto is not None and auto.max != self.max_staleness:
            yield (
                f"auto_staleness is for max_staleness: auto, which is then auto_staleness.max ({auto.max}), but "
                f"max_staleness is {self.max_staleness}. Set max_staleness to auto, or remove auto_staleness"
            )
        if auto is None:
            return
        for key, value in (
            ("selector.kind", self.buffer.selector.kind),
            ("admission.kind", self.buffer.admission.kind),
        ):
            if value in ("exact_age", "sample_to_insert_ratio"):
                yield (
                    f"max_staleness: auto changes the window while the run goes on, and buffer.{key} {value} counts on "
                    f"all of it. Give max_staleness a number, or choose another buffer.{key}"
                )

    def _clashing_times(self) -> Iterator[str]:
        try:
            self.replay_policy  # noqa: B018  (its own checks speak)
        except ValueError as error:
            yield f"buffer.{error}"
        if self.lease_s < self.redis.timeout_s:
            yield (
                f"rollout.lease_s ({self.lease_s:g}) is below redis.timeout_s ({self.redis.timeout_s:g}): calls "
                "outlive a Redis server that is away for that long, but every lease would expire meanwhile and cost "
                "its group an attempt. Leave rollout.lease_s out (it is then 1.5 times redis.timeout_s), raise it, or "
                "lower redis.timeout_s"
            )
        if self.longest_sample_s >= self.trainer.take_timeout_s:
            yield (
                f"rollout.sample_deadline_s ({self.longest_sample_s:g}) is not below trainer.take_timeout_s "
                f"({self.trainer.take_timeout_s:g}): a sample that hangs would end the trainer, which waits for its "
                "group. Lower rollout.sample_deadline_s or raise trainer.take_timeout_s"
            )

    def _clashing_lengths(self) -> Iterator[str]:
        limits, completion = self.rollout.limits, self.sampling.max_tokens
        longest = limits.max_length
        if longest <= completion:
            yield (
                f"{limits.length_key} ({longest}) leaves no room for a prompt "
                f"beside sampling.max_tokens ({completion}). "
                f"Raise {limits.length_key} or lower sampling.max_tokens"
            )
        punished = self.rewards.soft_overlong_tokens
        if punished is not None and punished >= completion:
            yield (
                f"rewards.soft_overlong_tokens ({punished}) is not below sampling.max_tokens ({completion}): "
                "every completion would be punished for its length. Lower rewards.soft_overlong_tokens"
            )
        if self.trainer.micro_batch_tokens < longest and self.trainer.overlong == "error":
            yield (
                f"trainer.micro_batch_tokens ({self.trainer.micro_batch_tokens}) is below {limits.length_key} "
                f"({longest}): a long sequence would fit no micro-batch. Raise trainer.micro_batch_tokens, or set "
                "trainer.overlong to truncate or drop"
            )
        made = self.model.warmup or self.model.random
        if made is not None and made.max_positions < longest:
            yield (
                f"{limits.length_key} ({longest}) is above the {made.max_positions} positions of the model that "
                "is made. Lower it, or raise max_positions of model.warmup or model.random"
            )

    def _clashing_shares(self) -> Iterator[str]:
        mode, limits, trainer = (
            f"launch.share_devices is {self.launch.share_devices}",
            self.rollout.limits,
            self.trainer,
        )
        if trainer.nodes > 1:
            yield (
                f"{mode}, and trainer.nodes is {trainer.nodes}: only processes of one machine share devices. Set "
                "trainer.nodes to 1, or launch.share_devices to off"
            )
        if (trainer.platform == "cpu") is not (limits.platform == "cpu"):
            yield (
                f"{mode}, but trainer.platform is {trainer.platform} and {limits.platform_key} {limits.platform}: they "
                "have no device in common. Set launch.share_devices to off, or both platforms to that of the device"
            )
        if (
            self.launch.share_devices == "sleep"
            and self.model.lora is not None
            and self.model.lora.engine == "adapters"
        ):
            yield (
                f"{mode}: an engine that sleeps gives up the memory of its weights, and whether vLLM brings back its "
                "own adapters is not known. Set model.lora.engine to merged, or launch.share_devices to split"
            )
        if self.launch.share_devices == "sleep" and trainer.streaming:
            yield (
                f"{mode}: engines generate nothing while a step is made, but trainer.streaming begins a step with the "
                "first groups and waits for more. Set trainer.streaming to false, or launch.share_devices to split"
            )
        if trainer.platform != "cpu":
            yield from self._clashing_memory(mode)

    def _clashing_memory(self, mode: str) -> Iterator[str]:
        limits, trainer = self.rollout.limits, self.trainer
        shares = trainer.device_memory_share + limits.memory_share
        if self.launch.share_devices == "split" and shares > 1:
            yield (
                f"{mode}, and trainer.device_memory_share ({trainer.device_memory_share:g}) and "
                f"{limits.memory_share_key} ({limits.memory_share:g}) make {shares:g} of a device, more than there is. "
                "Lower one of them (--dry-run shows what either side needs), or set launch.share_devices to sleep"
            )
        if limits.cache_bytes is None:
            yield (
                f"{mode}, and {limits.cache_key} is not set: the engine would make its cache as large as what happens "
                f"to be free when it starts, which the trainer needs later. Set {limits.cache_key} (2147483648 is "
                "2 GiB; --dry-run shows what a sample takes)"
            )

    def _clashing_reference(self) -> Iterator[str]:
        reference = self.trainer.reference
        if self.model.lora is None or reference.source == "none":
            return
        if reference.path is not None and reference.placement == "swap":
            yield (
                f"trainer.reference.path is {reference.path}, but with model.lora only adapters are exchanged for a "
                "pass of the reference (placement swap). Leave path out (the reference is then the first policy, "
                "without adapters), or set trainer.reference.placement to model"
            )
        if reference.source == "synced" and reference.placement == "model":
            yield (
                "trainer.reference is synced in a second model, which has no adapters of model.lora to take over. Set "
                "trainer.reference.placement to swap"
            )

    def _clashing_data(self) -> Iterator[str]:
        if self.trainer.mini_batches > self.groups_per_step:
            yield (
                f"trainer.mini_batches ({self.trainer.mini_batches}) is above groups_per_step "
                f"({self.groups_per_step}): some updates would have no group. Lower trainer.mini_batches"
            )
        kept = self.data.arithmetic.held_out
        if self.data.kind == "arithmetic" and self.eval.prompts > kept:
            yield (
                f"eval.prompts ({self.eval.prompts}) is above data.arithmetic.held_out ({kept}). "
                "Lower eval.prompts or hold out more"
            )
        if self.model.warmup is not None and self.data.kind != "arithmetic":
            yield (
                "model.warmup makes a policy for the arithmetic task, but data.kind is "
                f"{self.data.kind!r}. Set data.kind to arithmetic, or give model.path or model.random"
            )
        if self.model.warmup is not None and self.model.warmup.task != self.data.arithmetic:
            yield (
                f"model.warmup.task ({self.model.warmup.task}) and data.arithmetic ({self.data.arithmetic}) differ: "
                "the policy would be taught one task and trained on another. Give both the same values"
            )

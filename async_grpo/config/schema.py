"""Everything that a run can be told, one model a section.

A newcomer turns one dial, `max_staleness`; the rest has defaults that work. The same names are
used in the YAML file, in `-o key=value` overrides, in the code and in the docs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from async_grpo.config.base import PositiveInt, Seconds, StrictModel
from async_grpo.config.buffer import RedisConfig
from async_grpo.config.tiny_qwen2 import TinyQwen2Config
from async_grpo.config.warmup import ArithmeticTaskConfig, WarmupConfig
from async_grpo.config.weights import WeightsConfig

Precision = Literal["float32", "bfloat16"]


class RandomModelConfig(TinyQwen2Config):
    """A randomly initialised tiny Qwen2, for tests of the machinery: it learns nothing."""

    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """Size of the byte-level BPE vocabulary trained on the prompts."""


class ModelConfig(StrictModel):
    """Where the first policy comes from: exactly one of `path`, `warmup` and `random`."""

    path: Path | None = None
    """A Hugging Face checkpoint folder (config.json, safetensors, tokenizer)."""
    warmup: WarmupConfig | None = None
    """Make a tiny policy by a short supervised stage on the arithmetic task (cached)."""
    random: RandomModelConfig | None = None
    """Make a tiny random policy (cached)."""
    precision: Precision = "float32"
    """Of the weights, in the trainer and in the engine."""

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelConfig:
        given = [name for name in ("path", "warmup", "random") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of path, warmup, random says where the policy comes from, but {given or 'none'} "
                "is given. Set model.path to a Hugging Face checkpoint folder, or keep only one of them"
            )
        return self


class DataConfig(StrictModel):
    """The prompts and their reference answers."""

    kind: Literal["arithmetic", "jsonl"] = "arithmetic"
    arithmetic: ArithmeticTaskConfig = ArithmeticTaskConfig()
    path: Path | None = None
    """A JSON-lines file (kind: jsonl)."""
    eval_path: Path | None = None
    """A JSON-lines file of held-out prompts; without it the last `eval.prompts` rows are held out."""
    prompt_field: str = "question"
    answer_field: str = "answer"
    template: str = "{prompt}"
    """Text around the prompt; `{prompt}` is replaced."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are dropped when the data are loaded, with a count."""
    shuffle: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("kind jsonl needs a file. Set data.path, for example -o data.path=train.jsonl")
        if "{prompt}" not in self.template:
            raise ValueError(f"template {self.template!r} does not contain {{prompt}}. Add it where the prompt goes")
        return self


class RewardConfig(StrictModel):
    """One reward; the reward of a sample is the weighted sum of all of them."""

    name: str
    """`answer_tag` (text in <answer> equals the reference), `gsm8k`, `format`, or `module:attribute`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0


class RewardsConfig(StrictModel):
    """Verifiers run outside the event loop, in processes that can be killed."""

    functions: Annotated[list[RewardConfig], Field(min_length=1)] = [RewardConfig(name="answer_tag")]
    workers: PositiveInt = 1
    deadline_s: Seconds = 10.0
    """A verifier that takes longer is killed; its sample is `unverifiable`, which is not 0."""


class SamplingConfig(StrictModel):
    """The behaviour policy: what completions are sampled from."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: all tokens."""
    max_tokens: PositiveInt = 64

    @model_validator(mode="after")
    def _full_distribution(self) -> SamplingConfig:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p {self.top_p:g} and top_k {self.top_k} truncate the distribution, and the trainer's "
                "log-probabilities are of the whole one: the importance weights would be wrong. "
                "Set sampling.top_p to 1.0 and sampling.top_k to 0"
            )
        return self


class VllmConfig(StrictModel):
    """The inference engine."""

    max_model_len: PositiveInt = 256
    kv_cache_bytes: PositiveInt = 256 << 20
    """Memory for the KV cache on CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Of an accelerator; unused on CPU."""
    tensor_parallel: PositiveInt = 1
    enforce_eager: bool = True
    multiprocessing: bool = True
    """The engine core in a process of its own: generation and Python's bookkeeping overlap."""
    threads: PositiveInt = 1
    """OpenMP threads of one engine on CPU."""
    extra: dict[str, Any] = {}
    """Passed to AsyncEngineArgs unchanged."""


class RolloutConfig(StrictModel):
    """A rollout server."""

    servers: Annotated[int, Field(ge=1)] = 1
    """How many `async-grpo run` starts on this machine."""
    max_concurrency: PositiveInt = 64
    """Samples in flight in one engine."""
    interruption: Literal["keep", "recompute"] = "keep"
    """When new weights arrive: keep the KV cache, or re-encode the prefix under the new weights."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal (`filtered`) and admit as many new ones."""
    max_attempts: PositiveInt = 5
    """A group whose holders died this many times (their lease expired) is `failed`."""
    lease_s: Seconds = 15.0
    """A ticket whose holder is silent for longer goes to another server."""
    vllm: VllmConfig = VllmConfig()


class OptimizerConfig(StrictModel):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where linear and cosine end."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _floor_below_peak(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g}): the rate would rise. Lower min_lr")
        return self


class ObjectiveConfig(StrictModel):
    """The decoupled GRPO loss (AReaL, arXiv 2505.24298): w * ppo_clip(r)."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    loss: Literal["decoupled", "ppo_clip"] = "decoupled"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    behaviour_cap: Annotated[float, Field(gt=0)] = 5.0
    """w = pi_prox / pi_behaviour is capped here."""


class CheckpointConfig(StrictModel):
    """Resumable checkpoints under `runs/<name>/checkpoints`."""

    every_steps: PositiveInt = 10
    keep: PositiveInt = 2


class TrainerConfig(StrictModel):
    """The Megatron-core trainer."""

    platform: Literal["cpu"] = "cpu"
    """What the trainer computes on; this version knows the CPU only."""
    processes: PositiveInt = 1
    """Ranks that torchrun starts: tensor_parallel * pipeline_parallel * data-parallel size."""
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    threads: PositiveInt = 1
    """torch threads a rank on CPU."""
    micro_batch_tokens: PositiveInt = 8192
    """Sequences are packed, without padding, into micro-batches of at most this many tokens."""
    take_timeout_s: Seconds = 600.0
    """How long the trainer waits for a batch before it ends with an error."""
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _ranks_divide(self) -> TrainerConfig:
        block = self.tensor_parallel * self.pipeline_parallel
        if self.processes % block:
            raise ValueError(
                f"processes ({self.processes}) is not a multiple of tensor_parallel * pipeline_parallel "
                f"({self.tensor_parallel} * {self.pipeline_parallel} = {block}). "
                f"Set trainer.processes to {block} times the data-parallel size"
            )
        return self


class EvalConfig(StrictModel):
    """Evaluation on held-out prompts, before, after and every `every_steps` versions."""

    prompts: PositiveInt = 256
    samples: PositiveInt = 4
    """mean@k: completions a prompt at temperature 1."""
    greedy: bool = True
    every_steps: Annotated[int, Field(ge=0)] = 0
    """0: only before and after."""
    timeout_s: Seconds = 600.0


class RestartConfig(StrictModel):
    """What the supervisor does when a role dies."""

    rollout: Annotated[int, Field(ge=0)] = 3
    """Restarts of one rollout server before the run is given up."""
    trainer: Annotated[int, Field(ge=0)] = 3


class LaunchConfig(StrictModel):
    """The local supervisor."""

    restarts: RestartConfig = RestartConfig()
    ready_timeout_s: Seconds = 300.0
    stop_timeout_s: Seconds = 30.0


class TelemetryConfig(StrictModel):
    """What a run writes."""

    tensorboard: bool = True
    samples_every: PositiveInt = 8
    """One finished group in so many is written to samples/*.jsonl."""


class RunConfig(StrictModel):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    runs_dir: Path = Path("runs")
    seed: Annotated[int, Field(ge=0)] = 1
    steps: PositiveInt = 100
    """Optimizer steps; the run ends at policy version `steps`."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """S: no trained token is more than S optimizer steps old. 0 is on-policy training."""
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
    redis: RedisConfig = RedisConfig()
    eval: EvalConfig = EvalConfig()
    launch: LaunchConfig = LaunchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

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

    @model_validator(mode="after")
    def _lengths_fit(self) -> RunConfig:
        need = self.sampling.max_tokens + 1
        if self.rollout.vllm.max_model_len < need:
            raise ValueError(
                f"rollout.vllm.max_model_len ({self.rollout.vllm.max_model_len}) leaves no room for a prompt "
                f"beside sampling.max_tokens ({self.sampling.max_tokens}). "
                "Raise rollout.vllm.max_model_len or lower sampling.max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _whole_sequences_fit(self) -> RunConfig:
        longest = self.rollout.vllm.max_model_len
        if self.trainer.micro_batch_tokens < longest:
            raise ValueError(
                f"trainer.micro_batch_tokens ({self.trainer.micro_batch_tokens}) is below rollout.vllm.max_model_len "
                f"({longest}): a long sequence would fit no micro-batch. Raise trainer.micro_batch_tokens"
            )
        made = self.model.warmup or self.model.random
        if made is not None and made.max_positions < longest:
            raise ValueError(
                f"rollout.vllm.max_model_len ({longest}) is above the {made.max_positions} positions of the model that "
                "is made. Lower it, or raise max_positions of model.warmup or model.random"
            )
        return self

    @model_validator(mode="after")
    def _enough_held_out(self) -> RunConfig:
        kept = self.data.arithmetic.held_out
        if self.data.kind == "arithmetic" and self.eval.prompts > kept:
            raise ValueError(
                f"eval.prompts ({self.eval.prompts}) is above data.arithmetic.held_out ({kept}). "
                "Lower eval.prompts or hold out more"
            )
        return self

    @model_validator(mode="after")
    def _task_fits_model(self) -> RunConfig:
        if self.model.warmup is not None and self.data.kind != "arithmetic":
            raise ValueError(
                "model.warmup makes a policy for the arithmetic task, but data.kind is "
                f"{self.data.kind!r}. Set data.kind to arithmetic, or give model.path or model.random"
            )
        if self.model.warmup is not None and self.model.warmup.task != self.data.arithmetic:
            raise ValueError(
                f"model.warmup.task ({self.model.warmup.task}) and data.arithmetic ({self.data.arithmetic}) differ: "
                "the policy would be taught one task and trained on another. Give both the same values"
            )
        return self

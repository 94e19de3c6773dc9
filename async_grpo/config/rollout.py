"""Rollout servers: sampling, inference engine, workflows and tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel
from async_grpo.config.buffer import RedisConfig
from async_grpo.config.http import HttpConfig
from async_grpo.config.model import ModelConfig

MAX_TOP_K = 64
"""Engines report the kept tokens as log-probabilities, of which more would cost more than the sampling itself."""


class SamplingConfig(StrictModel):
    """The distribution that training completions are sampled from. The trainer uses the same one, so importance weights
    stay exact. Evaluations sample from the whole distribution."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature."""
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] = 0
    """Sample from the K most likely tokens. 0: from all. Needed with top_p, min_p and repetition_penalty."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest most likely tokens with this total probability. 1: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens with at least this fraction of the probability of the most likely one. 0: from all."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divide positive logits by this, and multiply negative ones, for tokens of the prompt and of the completion so
    far. 1: no penalty."""
    max_tokens: PositiveInt = 64
    """Maximum length of a completion, in tokens."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Minimum length of a completion, in tokens: before it, tokens that end a completion are not sampled. Needs top_k,
    because the trainer must know which tokens could be sampled. 0: no minimum."""

    @property
    def truncates(self) -> bool:
        """True if tokens are sampled from a part of the vocabulary."""
        return self.top_k > 0

    @property
    def summary(self) -> str:
        """The values that have an effect, in one line."""
        settings = [f"temperature {self.temperature:g}"]
        neutral_values = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0}
        for name, neutral in neutral_values.items():
            value = getattr(self, name)
            if value != neutral:
                settings.append(f"{name} {value:g}")
        return f"{', '.join(settings)}, at most {self.max_tokens} tokens"

    def find_problems(self) -> Iterator[str]:
        needing = []
        if self.top_p < 1:
            needing.append(f"top_p {self.top_p:g}")
        if self.min_p > 0:
            needing.append(f"min_p {self.min_p:g}")
        if self.repetition_penalty != 1:
            needing.append(f"repetition_penalty {self.repetition_penalty:g}")
        if self.min_tokens > 0:
            needing.append(f"min_tokens {self.min_tokens}")
        if self.min_tokens > self.max_tokens:
            yield (
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}): no completion could end. "
                "Lower sampling.min_tokens"
            )
        if needing and self.top_k == 0:
            yield (
                f"{' and '.join(needing)} without top_k: the engine reports the tokens that it sampled from to the "
                f"trainer, and without top_k these could be the whole vocabulary. Set sampling.top_k, to at most "
                f"{MAX_TOP_K}"
            )


LEASE_TIMEOUT_RATIO = 1.5
"""Default lease duration as a multiple of redis.timeout_s. A lease is renewed after a third of its duration, so at
least redis.timeout_s remains at any time: no lease expires during an outage that calls survive."""
CPU_STEP_TOKENS = 2048
"""Maximum tokens per step of an engine on CPU. It does not chunk prompts, so a longer prompt raises the limit."""
DEVICE_STEP_TOKENS = 8192
"""Maximum tokens per step of an engine on an accelerator, as in verl and MindSpeed-RL. Longer prompts are chunked."""
GRAPH_BATCH_STEP = 16
"""Distance of the largest batch sizes for which vLLM captures graphs: 1, 2, 4, multiples of 8, from 256 multiples of
16."""
CPU_CACHE_BYTES = 256 << 20
Quantization = Literal["none", "fp8", "int8"]
RESERVED_ENGINE_ARGUMENTS = frozenset(
    {
        "additional_config",
        "dtype",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "logprobs_mode",
        "max_logprobs",
        "max_model_len",
        "model",
        "quantization",
        "skip_tokenizer_init",
        "tensor_parallel_size",
        "weight_transfer_config",
    }
)
"""Engine arguments that `extra` may not set: they have their own key, or correctness depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the chosen engine, in a form that does not depend on which engine it is.

    `length_key`, `staging_key` and so on are the keys to name in error messages; `memory_advice` is the fix for an
    engine that does not fit on its devices.
    """

    engine: str
    """Name of the engine, in its official spelling."""
    max_length: int
    """Maximum number of tokens of a prompt and its completion together."""
    platform: str
    devices: int
    """Accelerators of one server, over which one copy of the model is split. On CPU: processes."""
    device_memory_gib: float | None
    """Memory of one accelerator. None: query the machine."""
    memory_share: float
    """Fraction of an accelerator's memory that the engine may use."""
    requests: int
    """Maximum number of concurrent requests in one engine."""
    cache_bytes: int | None
    """Memory of the KV cache on one device. None: the rest of the engine's share of an accelerator."""
    batched_tokens: int
    """Maximum number of tokens in one forward pass."""
    matrix_bytes: int | None
    """Bytes per element of the layers' matrices. None: as in model.precision."""
    captures_graphs: bool
    """True if the engine captures graphs of its forward pass. They take memory."""
    length_key: str
    platform_key: str
    devices_key: str
    device_memory_key: str
    memory_share_key: str
    cache_key: str
    memory_advice: str
    staging_bytes: int = 0
    """Memory of one device, in addition to the engine's share, for staging the next version."""
    staging_key: str = ""


class VllmConfig(StrictModel):
    """The vLLM engine."""

    platform: Literal["cpu", "cuda", "ascend"] = "cpu"
    """Hardware of the engine. The installed vLLM must be the build for it."""
    max_model_len: PositiveInt = 256
    """Maximum length of a sequence, prompt and completion together, in tokens."""
    kv_cache_bytes: PositiveInt | None = None
    """Memory for the KV cache of one device. None: 256 MiB on CPU, and on an accelerator the rest of
    gpu_memory_utilization after weights and work space. A device shared with the trainer needs a number
    (launch.share_devices)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of an accelerator's memory for the engine. Unused on CPU."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one accelerator, for the memory check before a run starts. None: query the machine; without an answer
    there is no check."""
    tensor_parallel: PositiveInt = 1
    """Devices over which one engine is split."""
    quantization: Quantization = "none"
    """8-bit matrices with one scale per row, and activations quantised per token. `fp8`: E4M3, on CPU and on CUDA from
    Ada on. `int8`: on CPU, CUDA and Ascend. Weights are quantised when they are loaded into the engine; the trainer
    keeps model.precision. The objective then corrects for the difference between the two by importance weights."""
    staging_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory per device, in addition to gpu_memory_utilization, for staging the next version: weights are copied there
    while the engine generates, so the pause only moves them into place. Tensors that do not fit are copied from host
    memory during the pause. To stage everything, set the model's size in bfloat16 (7B: 15), for any tensor_parallel. 0:
    nothing is staged."""
    enforce_eager: bool | None = None
    """Run without compilation and captured graphs: faster start, slower generation. None: true on CPU, false on
    accelerators."""
    multiprocessing: bool = True
    """Run the engine core in a separate process, so that generation overlaps with the server's Python code."""
    threads: PositiveInt = 1
    """OpenMP threads per engine on CPU."""
    additional_config: dict[str, Any] = {}
    """vLLM's `additional_config`, which contains the settings of vllm-ascend."""
    environment: dict[str, str] = {}
    """Environment variables of the engine. Variables in the server's own environment take precedence."""
    extra: dict[str, Any] = {}
    """Additional AsyncEngineArgs, passed unchanged. `max_num_seqs` (default: all requests that a server admits) and
    `max_num_batched_tokens` (2048 on CPU, 8192 on accelerators, or more if a prompt needs it) also enter the memory
    plan."""

    @property
    def staging_bytes(self) -> int:
        """Memory per device for staging the next version."""
        return int(self.staging_gib * (1 << 30))

    @property
    def is_eager(self) -> bool:
        """True if the engine runs without compilation and captured graphs."""
        if self.enforce_eager is None:
            return self.platform == "cpu"
        return self.enforce_eager

    @property
    def cache_bytes(self) -> int | None:
        """Memory of the KV cache on one device. None: the rest of the engine's share."""
        if self.kv_cache_bytes is None and self.platform == "cpu":
            return CPU_CACHE_BYTES
        return self.kv_cache_bytes

    def limits(self, admitted: int) -> EngineLimits:
        """Return the limits of an engine whose server admits at most `admitted` concurrent requests."""
        # Round up to a batch size for which vLLM captures a graph. Larger batches would run without one.
        rounded = -(-admitted // GRAPH_BATCH_STEP) * GRAPH_BATCH_STEP
        requests = int(self.extra.get("max_num_seqs", rounded))

        # A CPU engine does not chunk prompts, so one prompt must fit into a step. vLLM rejects steps that cannot
        # hold one token per request.
        step_tokens = max(CPU_STEP_TOKENS, self.max_model_len) if self.platform == "cpu" else DEVICE_STEP_TOKENS
        batched_tokens = int(self.extra.get("max_num_batched_tokens", max(step_tokens, requests)))
        return EngineLimits(
            engine="vLLM",
            max_length=self.max_model_len,
            platform=self.platform,
            devices=self.tensor_parallel,
            device_memory_gib=self.device_memory_gib,
            memory_share=self.gpu_memory_utilization,
            cache_bytes=self.cache_bytes,
            requests=requests,
            batched_tokens=batched_tokens,
            matrix_bytes=None if self.quantization == "none" else 1,
            captures_graphs=self.platform != "cpu" and not self.is_eager,
            length_key="rollout.vllm.max_model_len",
            platform_key="rollout.vllm.platform",
            devices_key="rollout.vllm.tensor_parallel",
            device_memory_key="rollout.vllm.device_memory_gib",
            memory_share_key="rollout.vllm.gpu_memory_utilization",
            cache_key="rollout.vllm.kv_cache_bytes",
            memory_advice="Raise rollout.vllm.tensor_parallel or gpu_memory_utilization, or lower "
            "rollout.vllm.max_model_len",
            staging_bytes=self.staging_bytes,
            staging_key="rollout.vllm.staging_gib",
        )

    def find_problems(self) -> Iterator[str]:
        accelerators = ("cuda", "ascend")
        platforms_by_setting = {
            "gpu_memory_utilization": accelerators,
            "additional_config": ("ascend",),
            "device_memory_gib": accelerators,
        }
        for name, platforms in platforms_by_setting.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and self.platform not in platforms:
                yield (
                    f"{name} would have no effect: it is a setting of {' and '.join(platforms)}, and the platform is "
                    f"{self.platform}. Remove it, or set rollout.vllm.platform"
                )
        if self.tensor_parallel > 1 and not self.multiprocessing:
            yield (
                f"tensor_parallel ({self.tensor_parallel}) needs one process per device, but multiprocessing is "
                "false. Set rollout.vllm.multiprocessing to true, or tensor_parallel to 1"
            )
        yield from self._find_quantization_problems()
        reserved = sorted(RESERVED_ENGINE_ARGUMENTS & self.extra.keys())
        if reserved:
            yield (
                f"extra sets {', '.join(reserved)}: they have their own keys, or exact log-probabilities and weight "
                "updates depend on them. Remove them from rollout.vllm.extra"
            )

    def _find_quantization_problems(self) -> Iterator[str]:
        if self.quantization == "none":
            return
        if self.quantization == "fp8" and self.platform == "ascend":
            yield (
                "quantization is fp8, but Atlas A2 and A3 have no fp8 arithmetic. Set rollout.vllm.quantization to int8"
            )
        reserved = sorted({"hf_overrides", "load_format"} & self.extra.keys())
        if reserved:
            yield (
                f"quantization is {self.quantization}, which sets {' and '.join(reserved)} itself. Remove "
                f"{' and '.join(reserved)} from rollout.vllm.extra, or set quantization to none"
            )

    def find_conflicts(self, model: ModelConfig) -> Iterator[str]:
        """Find conflicts with the model."""
        yield from self._find_fp32_head_conflicts(model)
        if self.quantization == "none":
            return
        if self.platform != "cpu" and model.precision == "float32":
            yield (
                f"rollout.vllm.quantization is {self.quantization}, and its kernels on {self.platform} return 16-bit "
                "results, but model.precision is float32. Set model.precision to bfloat16"
            )
        if model.lora is not None and model.lora.engine == "adapters":
            yield (
                f"rollout.vllm.quantization is {self.quantization}, but vLLM's own LoRA adapters are not supported "
                "with 8-bit matrices. Set model.lora.engine to merged, or rollout.vllm.quantization to none"
            )

    def _find_fp32_head_conflicts(self, model: ModelConfig) -> Iterator[str]:
        if not model.fp32_head:
            return
        if self.platform == "ascend":
            yield (
                "model.fp32_head is true, but vLLM computes logits in float32 only from 0.26 on, and vllm-ascend "
                "extends 0.23: trainer and engine would differ more than without it. Set model.fp32_head to false"
            )
        if "hf_overrides" in self.extra:
            yield (
                "model.fp32_head is true, which sets hf_overrides itself. Remove hf_overrides from rollout.vllm.extra, "
                "or set model.fp32_head to false"
            )


class ToolConfig(StrictModel):
    """A tool that the policy may call in `multi_turn`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
    """Name by which the policy calls the tool."""
    function: str = "calculator"
    """`calculator` (arithmetic), or `module:attribute`: a function with keyword arguments that returns text."""
    timeout_s: Seconds = 5.0
    """Maximum seconds per call."""


class MultiTurnConfig(StrictModel):
    """Conversations with tools: the policy calls a tool, reads its result and continues."""

    tools: list[ToolConfig] = [ToolConfig(name="calculator")]
    """Tools that the policy may call."""
    max_calls: PositiveInt = 4
    """Maximum number of tool calls per completion."""
    observation: str = "\n<tool_response>\n{result}\n</tool_response>\n"
    """Template of a tool's result in the conversation; `{result}` is replaced. Chat models need their turn markers
    here."""
    max_result_chars: PositiveInt = 2000
    """Maximum length of a tool's result, in characters; a longer one is truncated."""

    def find_problems(self) -> Iterator[str]:
        if "{result}" not in self.observation:
            yield (
                f"observation {self.observation!r} does not contain {{result}}, so the policy would never see a "
                "result. Add {result} where it belongs"
            )
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            yield f"tools {names} contains a name twice, so a call would be ambiguous. Rename one of the tools"


EndRule = Literal["mask", "zero"]


class EndsConfig(StrictModel):
    """Treatment of samples without a reward, by the way in which they ended. `mask`: the sample leaves the mean and
    deviation of its group, and its tokens get no gradient. `zero`: its reward is 0, as if the policy had failed."""

    workflow_error: EndRule = "mask"
    """The workflow or one of its tools raised an error, or returned no finished sample."""
    deadline: EndRule = "mask"
    """The workflow did not return by rollout.sample_deadline_s."""
    refused: EndRule = "mask"
    """The engine refused a request, for example because its prompt was too long."""
    unverifiable: EndRule = "mask"
    """A required reward function failed."""


class RolloutConfig(StrictModel):
    """A rollout server."""

    engine: Literal["vllm"] = "vllm"
    """The inference engine. Its settings are in the section of the same name."""
    servers: Annotated[int, Field(ge=1)] = 1
    """Number of rollout servers that `async-grpo run` starts on this machine."""
    workflow: str = "single_turn"
    """Workflow that generates a sample: `single_turn`, `multi_turn`, or `module:attribute` (docs/workflows.md)."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    ends: EndsConfig = EndsConfig()
    max_concurrency: PositiveInt = 64
    """Maximum number of training samples in flight per engine. Completions for evaluations (up to the same number) and
    for HTTP (`rollout.http.max_concurrency`) are additional."""
    min_concurrency: NonNegativeInt = 0
    """Minimum number of training samples in flight. The server adapts the number between this and max_concurrency to
    the engine's load. 0: always max_concurrency."""
    oversample: NonNegativeInt = 0
    """k: a group starts group_size + k samples and keeps the first group_size that finish. This shortens the wait for
    slow samples, but introduces a bias: long completions are trained less often."""
    interruption: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """Treatment of samples in flight when new weights arrive. keep: continue with their KV cache. recompute: recompute
    the KV cache of their prefix with the new weights. drain: finish them first. abort: save them to the buffer; any
    server with capacity continues them."""
    max_interruptions: PositiveInt = 3
    """Maximum number of interruptions per group, by `abort` or by a server that stops; after that it runs to its
    end."""
    progress_interval_s: Seconds = 5.0
    """Seconds between two saves of unfinished samples to the buffer. If a server dies, only the tokens since its last
    save are lost."""
    sample_deadline_s: Seconds | None = None
    """Maximum seconds per sample; after that it ends as rollout.ends.deadline. None: ten times the duration of a
    completion of sampling.max_tokens at this server's average speed, but at least 120 s and at most half of
    trainer.take_timeout_s. That half also applies until the first sample is done."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal (`filtered`) and admit the same number of new ones."""
    max_attempts: PositiveInt = 5
    """Maximum number of attempts at a group: it is `failed` once this many servers or engines have died with it."""
    seed_per_sample: bool | None = None
    """Give every training sample its own seed, so that the same weights sample the same tokens on every server. Engines
    on accelerators then launch a kernel per sample and token (except with vLLM's model runner V2). False: an engine
    draws from one generator, seeded by the run's seed and the server's name. None: true on CPU, false on accelerators.
    Evaluations always have seeds."""
    lease_s: Seconds | None = None
    """Seconds without renewal after which a lease expires and another server may take the group. At least
    redis.timeout_s, so that no lease expires during an outage of Redis. None: 1.5 times redis.timeout_s."""
    engine_restarts: NonNegativeInt = 2
    """Restarts of a dead engine before its server exits with an error."""
    http: HttpConfig = HttpConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def limits(self) -> EngineLimits:
        """Limits of the chosen engine, with capacity for training, evaluations and HTTP at the same time."""
        # An evaluation may have as many completions in flight as training.
        admitted = 2 * self.max_concurrency + self.http.max_concurrency
        limits: EngineLimits = getattr(self, self.engine).limits(admitted)
        return limits

    @property
    def seeds_samples(self) -> bool:
        """True if every training sample has its own seed."""
        if self.seed_per_sample is None:
            return self.limits.platform == "cpu"
        return self.seed_per_sample

    def find_problems(self) -> Iterator[str]:
        if self.min_concurrency > self.max_concurrency:
            yield (
                f"min_concurrency ({self.min_concurrency}) is above max_concurrency ({self.max_concurrency}). Lower "
                "min_concurrency"
            )

    def resolve_lease_s(self, redis: RedisConfig) -> float:
        """Return the lease duration of a ticket."""
        if self.lease_s is None:
            return LEASE_TIMEOUT_RATIO * redis.timeout_s
        return self.lease_s

    def resolve_max_sample_s(self, take_timeout_s: float) -> float:
        """Return the maximum seconds per sample. The default leaves time to regenerate the group before the trainer
        gives up."""
        if self.sample_deadline_s is None:
            return take_timeout_s / 2
        return self.sample_deadline_s

    def find_conflicts(
        self, sampling: SamplingConfig, redis: RedisConfig, model: ModelConfig, take_timeout_s: float
    ) -> Iterator[str]:
        """Find conflicts with other sections. `take_timeout_s`: seconds that the trainer waits for a batch."""
        lease_s = self.resolve_lease_s(redis)
        if lease_s < redis.timeout_s:
            yield (
                f"rollout.lease_s ({lease_s:g}) is below redis.timeout_s ({redis.timeout_s:g}): calls survive a Redis "
                "outage of that length, but every lease would expire meanwhile and cost its group an attempt. Leave "
                "rollout.lease_s out (it is then 1.5 times redis.timeout_s), raise it, or lower redis.timeout_s"
            )
        max_sample_s = self.resolve_max_sample_s(take_timeout_s)
        if max_sample_s >= take_timeout_s:
            yield (
                f"rollout.sample_deadline_s ({max_sample_s:g}) is not below trainer.take_timeout_s "
                f"({take_timeout_s:g}): while one sample hangs, the trainer would give up waiting for its group and "
                "exit. Lower rollout.sample_deadline_s or raise trainer.take_timeout_s"
            )
        yield from self._find_length_conflicts(sampling.max_tokens, model)
        yield from self.vllm.find_conflicts(model)

    def _find_length_conflicts(self, max_tokens: int, model: ModelConfig) -> Iterator[str]:
        limits = self.limits
        key = limits.length_key
        if limits.max_length <= max_tokens:
            yield (
                f"{key} ({limits.max_length}) leaves no room for a prompt in addition to sampling.max_tokens "
                f"({max_tokens}). Raise {key} or lower sampling.max_tokens"
            )
        tiny_model = model.warmup or model.random
        if tiny_model is not None and tiny_model.max_positions < limits.max_length:
            yield (
                f"{key} ({limits.max_length}) is above the {tiny_model.max_positions} positions of the generated "
                "model. Lower it, or raise max_positions of model.warmup or model.random"
            )

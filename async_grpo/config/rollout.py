"""A rollout server and its engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel
from async_grpo.config.buffer import RedisConfig
from async_grpo.config.http import HttpConfig
from async_grpo.config.model import ModelConfig


class SamplingConfig(StrictModel):
    """The behaviour policy: what completions are sampled from."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must stay 1.0: the trainer's log-probabilities are of the whole distribution."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Must stay 0 (all tokens), for the same reason."""
    max_tokens: PositiveInt = 64
    """Most tokens of a completion."""

    def problems(self) -> Iterator[str]:
        if self.top_p != 1.0 or self.top_k != 0:
            yield (
                f"top_p {self.top_p:g} and top_k {self.top_k} truncate the distribution, and the trainer's "
                "log-probabilities are of the whole one: the importance weights would be wrong. "
                "Set sampling.top_p to 1.0 and sampling.top_k to 0"
            )


LEASE_SHARE = 1.5
"""Lease duration as a multiple of redis.timeout_s. Leases are renewed every third, so one outlives a Redis outage."""
CPU_STEP_TOKENS = 2048
"""Maximum tokens per step of an engine on CPU, which reads prompts whole (or one whole prompt, if that is longer)."""
DEVICE_STEP_TOKENS = 8192
"""Maximum tokens per step of an engine on an accelerator, as in verl and MindSpeed-RL; longer prompts are read in
chunks."""
GRAPH_STEP = 16
"""vLLM captures graphs for batches of 1, 2, 4, then multiples of 8, from 256 on multiples of 16."""
CPU_CACHE_BYTES = 256 << 20
Quantization = Literal["none", "fp8", "int8"]
OURS = frozenset(
    {
        *("model", "dtype", "max_model_len", "tensor_parallel_size", "enforce_eager", "skip_tokenizer_init"),
        *("logprobs_mode", "max_logprobs", "weight_transfer_config", "additional_config"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization", "quantization"),
    }
)
"""Arguments of the engine that have a key of their own, or on which its guarantees depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the chosen engine, independent of the keys of its section.

    `length_key`, `staging_key` and so on are the keys to name in error messages; `memory_advice` is the fix for an
    engine that does not fit on its devices.
    """

    engine: str
    """Name of the engine, as its makers write it."""
    max_length: int
    """Maximum number of tokens of a prompt and its completion together."""
    platform: str
    devices: int
    """Accelerators of one server, which share one copy of the model; on CPU processes."""
    device_memory_gib: float | None
    """Memory of one accelerator. None: ask the machine."""
    memory_share: float
    """Share of an accelerator's memory that the engine may use."""
    requests: int
    """Maximum number of concurrent requests in one engine."""
    cache_bytes: int | None
    """Memory of the KV cache on one device. None: on an accelerator, what is left of the engine's share."""
    batched_tokens: int
    """Maximum number of tokens in one forward pass."""
    matrix_bytes: int | None
    """Bytes of an element of the layers' matrices; None: those of model.precision."""
    captures_graphs: bool
    """True if the engine captures graphs of its forward pass, which take memory."""
    length_key: str
    platform_key: str
    devices_key: str
    device_memory_key: str
    memory_share_key: str
    cache_key: str
    memory_advice: str
    staging_bytes: int = 0
    """Memory of one device, in addition to the engine's share, for the next version."""
    staging_key: str = ""


class VllmConfig(StrictModel):
    """The inference engine."""

    platform: Literal["cpu", "cuda", "ascend"] = "cpu"
    """Hardware of the engine; the installed vLLM must be the build for it."""
    max_model_len: PositiveInt = 256
    """Maximum length of a sequence, prompt and completion together, in tokens."""
    kv_cache_bytes: PositiveInt | None = None
    """Memory for the KV cache of one device. None: 256 MiB on CPU, and on an accelerator the rest of
    gpu_memory_utilization after weights and work space. A device shared with the trainer needs a number
    (launch.share_devices)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of an accelerator's memory for the engine; unused on CPU."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one accelerator, for the memory check before a run starts. None: ask the machine; no check if it does
    not say."""
    tensor_parallel: PositiveInt = 1
    """Devices that share one engine."""
    quantization: Quantization = "none"
    """Matrices of the layers as 8-bit numbers with a scale for each row, activations quantised for each token. `fp8`:
    E4M3, on CPU and on CUDA from Ada on; `int8`: on CPU, CUDA and Ascend. Weights are quantised as they enter the
    engine; the trainer keeps model.precision. A correction then weights tokens for the difference between the two."""
    staging_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory of every device, in addition to gpu_memory_utilization, for the next version: it is copied there while the
    engine generates, so that the pause only moves it into place. Tensors without room are read from the host during the
    pause. The whole model fits into its size in bfloat16 (7B: 15), for any tensor_parallel. 0: nothing is staged."""
    enforce_eager: bool | None = None
    """Run without compilation and captured graphs: faster start, slower generation. None: true on CPU, false on
    accelerators."""
    multiprocessing: bool = True
    """Run the engine core in its own process, so that generation and Python's bookkeeping overlap."""
    threads: PositiveInt = 1
    """OpenMP threads of one engine on CPU."""
    additional_config: dict[str, Any] = {}
    """Settings of vllm-ascend."""
    environment: dict[str, str] = {}
    """Environment variables of the engine; variables that the server was started with take precedence."""
    extra: dict[str, Any] = {}
    """Passed to AsyncEngineArgs unchanged. `max_num_seqs` (default: all requests that a server admits) and
    `max_num_batched_tokens` (2048 on CPU, 8192 on accelerators, or more if a prompt needs it) also enter the memory
    plan."""

    @property
    def staging_bytes(self) -> int:
        """Memory of every device for the next version."""
        return int(self.staging_gib * (1 << 30))

    @property
    def is_eager(self) -> bool:
        """True if the engine runs without compilation and captured graphs."""
        return self.platform == "cpu" if self.enforce_eager is None else self.enforce_eager

    @property
    def cache_bytes(self) -> int | None:
        """Memory of the KV cache on one device; None: what is left of the engine's share."""
        return CPU_CACHE_BYTES if self.kv_cache_bytes is None and self.platform == "cpu" else self.kv_cache_bytes

    def limits(self, admitted: int) -> EngineLimits:
        """Limits of the engine, for the rest of the system. `admitted`: maximum number of concurrent requests that the
        server admits. The engine has room for all of them, rounded up to a batch size for which vLLM captures graphs.
        """
        requests = int(self.extra.get("max_num_seqs", -(-admitted // GRAPH_STEP) * GRAPH_STEP))
        # A CPU engine reads prompts whole, and vLLM wants room for one token of every request.
        step = max(CPU_STEP_TOKENS, self.max_model_len) if self.platform == "cpu" else DEVICE_STEP_TOKENS
        return EngineLimits(
            engine="vLLM",
            max_length=self.max_model_len,
            platform=self.platform,
            devices=self.tensor_parallel,
            device_memory_gib=self.device_memory_gib,
            memory_share=self.gpu_memory_utilization,
            cache_bytes=self.cache_bytes,
            requests=requests,
            batched_tokens=int(self.extra.get("max_num_batched_tokens", max(step, requests))),
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

    def problems(self) -> Iterator[str]:
        accelerators = ("cuda", "ascend")
        platforms_of = {
            "gpu_memory_utilization": accelerators,
            "additional_config": ("ascend",),
            "device_memory_gib": accelerators,
        }
        for name, platforms in platforms_of.items():
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and self.platform not in platforms:
                yield (
                    f"{name} would have no effect: it is a setting of {' and '.join(platforms)}, and the platform is "
                    f"{self.platform}. Remove it, or set rollout.vllm.platform"
                )
        if self.tensor_parallel > 1 and not self.multiprocessing:
            yield (
                f"tensor_parallel ({self.tensor_parallel}) needs a process for each worker, but multiprocessing is "
                "false. Set rollout.vllm.multiprocessing to true, or tensor_parallel to 1"
            )
        yield from self._clashing_quantization()
        if taken := sorted(OURS & self.extra.keys()):
            yield (
                f"extra sets {', '.join(taken)}: these have keys of their own, or exact log-probabilities and weight "
                "updates depend on them. Take them out of rollout.vllm.extra"
            )

    def _clashing_quantization(self) -> Iterator[str]:
        if self.quantization == "none":
            return
        if self.quantization == "fp8" and self.platform == "ascend":
            yield ("quantization is fp8, which Atlas A2 and A3 do not multiply. Set rollout.vllm.quantization to int8")
        if taken := sorted({"hf_overrides", "load_format"} & self.extra.keys()):
            yield (
                f"quantization is {self.quantization}, which needs {' and '.join(taken)} for itself. Take "
                f"{'them' if len(taken) > 1 else 'it'} out of rollout.vllm.extra, or set quantization to none"
            )

    def problems_in_run(self, model: ModelConfig) -> Iterator[str]:
        """Clashes of the quantization with the model."""
        if self.quantization == "none":
            return
        if self.platform != "cpu" and model.precision == "float32":
            yield (
                f"rollout.vllm.quantization is {self.quantization}, whose products on {self.platform} end in "
                "16 bits, but model.precision is float32. Set model.precision to bfloat16"
            )
        if model.lora is not None and model.lora.engine == "adapters":
            yield (
                f"rollout.vllm.quantization is {self.quantization}, and adapters next to 8-bit matrices are not "
                "supported. Set model.lora.engine to merged, or rollout.vllm.quantization to none"
            )


class ToolConfig(StrictModel):
    """A tool that the policy may call in `multi_turn`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
    """The name by which the policy calls it."""
    function: str = "calculator"
    """`calculator` (arithmetic), or `module:attribute`: a function of keyword arguments that returns text."""
    timeout_s: Seconds = 5.0
    """Seconds for one call."""


class MultiTurnConfig(StrictModel):
    """Conversations with tools: the policy writes, a tool answers, the policy continues."""

    tools: list[ToolConfig] = [ToolConfig(name="calculator")]
    """Tools that the policy may call."""
    max_calls: PositiveInt = 4
    """Maximum number of tool calls per completion."""
    observation: str = "\n<tool_response>\n{result}\n</tool_response>\n"
    """Text in which the policy sees a tool's result; `{result}` is replaced. Chat models need their turn markers
    here."""
    max_result_chars: PositiveInt = 2000
    """Maximum number of characters of a tool's result; a longer one is cut."""

    def problems(self) -> Iterator[str]:
        if "{result}" not in self.observation:
            yield (f"observation {self.observation!r} does not contain {{result}}. Add it where the answer goes")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            yield f"tools {names} have one name twice: the policy could not tell them apart. Rename one"


class RolloutConfig(StrictModel):
    """A rollout server."""

    engine: Literal["vllm"] = "vllm"
    """The inference engine. The section of the same name has its keys."""
    servers: Annotated[int, Field(ge=1)] = 1
    """Number of rollout servers that `async-grpo run` starts on this machine."""
    workflow: str = "single_turn"
    """Workflow that generates a sample: `single_turn`, `multi_turn`, or `module:attribute` (see docs/workflows.md)."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    max_concurrency: PositiveInt = 64
    """Maximum number of training samples in flight in one engine. Completions for evaluations (as many again) and
    for HTTP (`rollout.http.max_concurrency`) come on top."""
    min_concurrency: NonNegativeInt = 0
    """Minimum number of training samples in flight; the engine's load decides between it and max_concurrency. 0:
    always max_concurrency."""
    oversample: NonNegativeInt = 0
    """k: a group starts group_size + k samples and keeps the first group_size that finish. This shortens the wait for
    slow samples, but long completions are trained less often: a bias."""
    interruption: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """Treatment of samples in flight when new weights arrive. keep: they continue with their KV cache. recompute:
    their prefix is encoded again under the new weights. drain: they finish first. abort: they are stored, and any
    server with room continues them."""
    max_interruptions: PositiveInt = 3
    """Maximum interruptions of one group, by `abort` or by a server that stops; after that it runs to its end."""
    progress_interval_s: Seconds = 5.0
    """Seconds between two saves of unfinished samples: a server that dies loses at most what it generated since the
    last one."""
    sample_deadline_s: Seconds | None = None
    """Seconds for the workflow of one sample; after that its group is `failed`. None: ten times what a completion of
    sampling.max_tokens takes at the average speed of this server, but at least 120 s and at most half of
    trainer.take_timeout_s, which also applies until the first sample is done."""
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
    """Seconds of silence after which a ticket goes to another server. At least redis.timeout_s, so that no lease
    expires while Redis is away. None: 1.5 times redis.timeout_s."""
    engine_restarts: NonNegativeInt = 2
    """Restarts of a dead engine before its server gives up."""
    http: HttpConfig = HttpConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def limits(self) -> EngineLimits:
        """The limits of the chosen engine, from the section of its name. It has room for training, as many completions
        again for evaluations, and those for HTTP."""
        limits: EngineLimits = getattr(self, self.engine).limits(2 * self.max_concurrency + self.http.max_concurrency)
        return limits

    @property
    def seeds_samples(self) -> bool:
        """True if every training sample has a seed of its own."""
        return self.limits.platform == "cpu" if self.seed_per_sample is None else self.seed_per_sample

    def problems(self) -> Iterator[str]:
        if self.min_concurrency > self.max_concurrency:
            yield (
                f"min_concurrency ({self.min_concurrency}) is above max_concurrency ({self.max_concurrency}): there is "
                "no number between them. Lower min_concurrency"
            )

    def lease_for(self, redis: RedisConfig) -> float:
        """Seconds for which a ticket is leased."""
        return self.lease_s or LEASE_SHARE * redis.timeout_s

    def longest_sample_for(self, take_timeout_s: float) -> float:
        """Maximum seconds per sample. The default leaves time to regenerate the group before `take_timeout_s`."""
        return take_timeout_s / 2 if self.sample_deadline_s is None else self.sample_deadline_s

    def problems_in_run(
        self, sampling: SamplingConfig, redis: RedisConfig, model: ModelConfig, take_timeout_s: float
    ) -> Iterator[str]:
        """Clashes with other sections. `take_timeout_s`: seconds that the trainer waits for a batch."""
        lease_s, longest_s = self.lease_for(redis), self.longest_sample_for(take_timeout_s)
        if lease_s < redis.timeout_s:
            yield (
                f"rollout.lease_s ({lease_s:g}) is below redis.timeout_s ({redis.timeout_s:g}): calls "
                "outlive a Redis server that is away for that long, but every lease would expire meanwhile and cost "
                "its group an attempt. Leave rollout.lease_s out (it is then 1.5 times redis.timeout_s), raise it, or "
                "lower redis.timeout_s"
            )
        if longest_s >= take_timeout_s:
            yield (
                f"rollout.sample_deadline_s ({longest_s:g}) is not below trainer.take_timeout_s "
                f"({take_timeout_s:g}): a sample that hangs would end the trainer, which waits for its "
                "group. Lower rollout.sample_deadline_s or raise trainer.take_timeout_s"
            )
        yield from self._problems_of_lengths(sampling.max_tokens, model)
        yield from self.vllm.problems_in_run(model)

    def _problems_of_lengths(self, max_tokens: int, model: ModelConfig) -> Iterator[str]:
        key, longest = self.limits.length_key, self.limits.max_length
        if longest <= max_tokens:
            yield (
                f"{key} ({longest}) leaves no room for a prompt in addition to sampling.max_tokens ({max_tokens}). "
                f"Raise {key} or lower sampling.max_tokens"
            )
        made = model.warmup or model.random
        if made is not None and made.max_positions < longest:
            yield (
                f"{key} ({longest}) is above the {made.max_positions} positions of the model that "
                "is made. Lower it, or raise max_positions of model.warmup or model.random"
            )

"""The Megatron-core trainer: training step, optimizer, reference model, checkpoints, parallelism and rendezvous."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from async_grpo.config.base import PositiveInt, Seconds, StrictModel
from async_grpo.config.model import LoraConfig, ModelConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.presets import leave_out_batch_norm
from async_grpo.config.rollout import EngineLimits


class RendezvousConfig(StrictModel):
    """Rendezvous of the trainer's nodes (trainer.nodes above 1). All nodes need the same values."""

    address: Annotated[str, Field(pattern=r"^[^\s:/]+$")] | None = None
    """Address at which all nodes reach node 0, and the only one on which node 0 listens. None: taken from the launcher
    (srun, for example)."""
    port: Annotated[int, Field(gt=0, lt=65535)] = 29500
    """Rendezvous port of the nodes. The ranks use the next port, or this one if a launcher starts them."""
    id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Id of the rendezvous; nodes with a different one are rejected. None: the name of the run."""
    timeout_s: Seconds = 600.0
    """Maximum seconds that a node or a rank waits for the others; after that it exits with an error."""
    silence_s: Annotated[float, Field(ge=2)] = 20.0
    """Seconds without a heartbeat after which a node counts as lost and the others exit."""


class ReferenceConfig(StrictModel):
    """Reference policy of the KL divergence."""

    source: Literal["none", "frozen", "synced"] = "none"
    """`frozen`: the weights of `path` for the whole run. `synced`: the weights of `path`, replaced by the policy's
    current ones every `sync_every` steps."""
    path: Path | None = None
    """Hugging Face folder of a model with the policy's sizes, or the id of one on `model.hub`. None: the first policy
    of the run."""
    sync_every: PositiveInt | None = None
    """synced: optimizer steps between two copies of the policy's weights."""
    placement: Literal["swap", "model"] = "swap"
    """`swap`: its weights stay in CPU memory, in the policy's dtype, and are swapped with the policy's for each forward
    pass. `model`: a second model on the device: no swapping, but its weights take device memory. Its rope_theta, norm
    epsilon and tied embeddings may differ from the policy's."""

    def find_problems(self) -> Iterator[str]:
        if self.source == "synced" and self.sync_every is None:
            yield "source synced needs sync_every, or the reference would stay frozen. Set trainer.reference.sync_every"
        if self.source != "synced" and self.sync_every is not None:
            yield (
                f"sync_every ({self.sync_every}) has no effect with source {self.source}. Set "
                "trainer.reference.source to synced, or leave sync_every out"
            )
        if self.source == "none" and self.path is not None:
            yield (
                "path has no effect with source none. Set trainer.reference.source to frozen or synced, or leave path "
                "out"
            )

    def find_conflicts(self, lora: LoraConfig | None) -> Iterator[str]:
        """Find conflicts with the policy's adapters."""
        if lora is None or self.source == "none":
            return
        if self.path is not None and self.placement == "swap":
            yield (
                f"trainer.reference.path is {self.path}, but with model.lora and placement swap a pass of the "
                "reference only swaps adapters, so it would use the policy's base weights. Leave path out (the "
                "reference is then the first policy, without adapters), or set trainer.reference.placement to model"
            )
        if self.source == "synced" and self.placement == "model":
            yield (
                "trainer.reference is synced with placement model, but that second model has no adapters to copy "
                "model.lora's into. Set trainer.reference.placement to swap"
            )


class OptimizerConfig(StrictModel):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Final learning rate of the linear and cosine schedules."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up to lr."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global norm of the gradient; a larger gradient is scaled down to it."""
    offload: bool = False
    """Keep fp32 master weights and moments in host memory; an update copies those of one parameter at a time to the
    device. This frees device memory for activations and gives the same numbers."""

    def find_problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g}): the schedule would raise the rate. Lower min_lr"


class CheckpointConfig(StrictModel):
    """Resumable checkpoints under `runs/<name>/checkpoints`."""

    every_steps: PositiveInt = 10
    """Optimizer steps between two checkpoints."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Number of checkpoints with the best evaluations (eval.every_steps) to keep in addition, regardless of their age.
    `checkpoints/best` names the best."""
    resumable: PositiveInt = 2
    """Number of newest checkpoints whose groups stay in the buffer. If the newest checkpoint is damaged, the run can
    then resume exactly from the one before it. At most `keep`; fewer if the buffer needs the memory for new groups. 1:
    only the newest."""
    background: bool = True
    """Write checkpoints in a background thread: a step waits only until its state is copied to host memory."""
    timeout_s: Seconds = 1800.0
    """Maximum seconds for writing one checkpoint."""
    export_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two exports of the weights in Hugging Face format, as checkpoints/hf-VERSION. Exports are kept as
    long as checkpoints. 0: export only at the end, as checkpoints/hf."""


PlatformName = Literal["cpu", "cuda", "npu"]
"""The platforms of `trainer.platform.platforms`."""
VLLM_PLATFORMS: Mapping[str, str] = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}
"""Platform of the trainer -> `rollout.vllm.platform` of servers on the same devices: vLLM has its own names."""


class TrainerConfig(StrictModel):
    """The Megatron-core trainer."""

    platform: PlatformName = "cpu"
    """Hardware of the trainer. It is never detected from the installed packages (docs/platforms.md)."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one device, for the memory check before a run starts. None: query the machine; without an answer there
    is no check."""
    device_memory_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a device's memory that one rank may allocate. Beyond it torch raises an out-of-memory error, which
    protects the other processes on the device."""
    device_peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Dense TFLOP/s of one device at the run's precision, for the reported utilisation. None: the vendor's value, if
    the device is known."""
    processes: PositiveInt = 1
    """Ranks on all nodes: tensor_parallel * pipeline_parallel * context_parallel * data-parallel size."""
    nodes: PositiveInt = 1
    """Machines, each with the same number of ranks. Above 1, run `async-grpo trainer CONFIG --node-rank R` on each of
    them."""
    rendezvous: RendezvousConfig = RendezvousConfig()
    tensor_parallel: PositiveInt = 1
    """Ranks over which each weight matrix is split."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline stages; each has the same number of consecutive layers."""
    context_parallel: PositiveInt = 1
    """Ranks over which each sequence is split; useful for long sequences, whose activations take most of the memory."""
    expert_parallel: PositiveInt = 1
    """Ranks over which the experts of a mixture-of-experts model are split. These are the same ranks that the other
    kinds of parallelism use, so it does not multiply into `processes`."""
    sequence_parallel: bool = False
    """Also split the activations between the matrices over the tensor-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of storing them: those of attention (selective) or of whole
    layers (full). This takes less memory and more time and gives the same numbers."""
    threads: PositiveInt = 1
    """torch threads per rank on CPU."""
    micro_batch_tokens: PositiveInt = 8192
    """Maximum tokens per micro-batch. Sequences are packed without padding."""
    overlong: Literal["error", "truncate", "drop"] = "error"
    """Treatment of a sequence that is longer than a micro-batch. `truncate`: train only its first tokens. `drop`: train
    none. All of its tokens stay in the denominator of the loss, so the gradients of the others do not grow."""
    num_iterations: PositiveInt = 1
    """Passes over the batch per step."""
    mini_batches: PositiveInt = 1
    """Optimizer updates per pass over the batch; every pass shuffles the groups into new mini-batches."""
    streaming: bool = False
    """Start a step with the groups that are ready, while others are still being generated."""
    max_skipped_steps: PositiveInt = 3
    """Consecutive skipped steps (non-finite loss or gradient) after which the run ends with an error."""
    take_timeout_s: Seconds = 600.0
    """Maximum seconds to wait for a batch; after that the trainer exits with an error."""
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_batch_norm(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("streaming") is True:
            return {**raw, "objective": leave_out_batch_norm(raw.get("objective"))}
        return raw

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.num_iterations * self.mini_batches

    @property
    def processes_per_node(self) -> int:
        """Ranks per machine."""
        return self.processes // self.nodes

    def find_problems(self) -> Iterator[str]:
        yield from self._find_step_problems()
        yield from self._find_parallelism_problems()

    def find_conflicts(self, model: ModelConfig, limits: EngineLimits, groups_per_step: int) -> Iterator[str]:
        """Find conflicts with the model, with the engine's maximum sequence length and with the batch size."""
        if self.micro_batch_tokens < limits.max_length and self.overlong == "error":
            yield (
                f"trainer.micro_batch_tokens ({self.micro_batch_tokens}) is below {limits.length_key} "
                f"({limits.max_length}): the longest sequences would fit into no micro-batch. Raise "
                "trainer.micro_batch_tokens, or set trainer.overlong to truncate or drop"
            )
        if self.mini_batches > groups_per_step:
            yield (
                f"trainer.mini_batches ({self.mini_batches}) is above groups_per_step "
                f"({groups_per_step}): some updates would have no groups. Lower trainer.mini_batches"
            )
        yield from self.reference.find_conflicts(model.lora)
        if self.context_parallel > 1 and self.platform == "cuda" and model.precision == "float32":
            yield (
                f"trainer.context_parallel is {self.context_parallel}, and its attention kernel on cuda computes in "
                "bfloat16, but model.precision is float32. Set model.precision to bfloat16, or "
                "trainer.context_parallel to 1"
            )

    def _find_step_problems(self) -> Iterator[str]:
        if self.objective.needs_reference and self.reference.source == "none":
            yield (
                f"objective.kl_beta is {self.objective.kl_beta:g}, but there is no reference policy, so the KL term "
                "would be missing. Set trainer.reference.source to frozen or synced, or trainer.objective.kl_beta to 0"
            )
        if self.streaming:
            obstacle = self._explain_streaming_obstacle()
            if obstacle is not None:
                yield (
                    f"streaming trains a group before the others have arrived, but {obstacle}. Change that, or set "
                    "trainer.streaming to false"
                )
        describes_device = self.device_memory_gib or self.device_peak_tflops or self.device_memory_share < 1
        if self.platform == "cpu" and describes_device:
            yield (
                "device_memory_gib, device_memory_share and device_peak_tflops describe an accelerator and would have "
                "no effect, because trainer.platform is cpu. Remove them, or set trainer.platform to the accelerator's"
            )

    def _explain_streaming_obstacle(self) -> str | None:
        """Return which feature needs the whole batch before the first micro-batch; None if there is none."""
        if self.num_iterations > 1:
            return f"num_iterations ({self.num_iterations}) passes over the batch more than once"
        if self.mini_batches > 1:
            return f"mini_batches ({self.mini_batches}) splits the groups of the whole batch"
        if self.objective.whole_batch_advantage is not None:
            return f"objective.{self.objective.whole_batch_advantage} needs the rewards of the whole batch"
        for correction in self.objective.corrections:
            if correction.needs_whole_batch:
                return f"correction {correction.kind} needs the log-probabilities of the whole batch"
        return None

    def _find_parallelism_problems(self) -> Iterator[str]:
        model_ranks = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if self.processes % model_ranks:
            yield (
                f"processes ({self.processes}) is not a multiple of tensor_parallel * pipeline_parallel * "
                f"context_parallel ({self.tensor_parallel} * {self.pipeline_parallel} * {self.context_parallel} = "
                f"{model_ranks}): some ranks would belong to no copy of the model. "
                f"Set trainer.processes to {model_ranks} times the data-parallel size"
            )
        if self.processes % self.nodes:
            yield (
                f"processes ({self.processes}) is not a multiple of nodes ({self.nodes}), but every node starts the "
                "same number of ranks. Set trainer.processes to the number of ranks on all nodes, a multiple of nodes"
            )
        ranks = self.processes // self.pipeline_parallel
        if ranks % self.expert_parallel:
            yield (
                f"expert_parallel ({self.expert_parallel}) does not divide the {ranks} ranks of a pipeline stage "
                f"(processes {self.processes} / pipeline_parallel {self.pipeline_parallel}): the experts could not be "
                f"split evenly. Set trainer.expert_parallel to a divisor of {ranks}"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            yield (
                "sequence_parallel splits activations over the tensor-parallel ranks, but tensor_parallel is 1, so "
                "it would have no effect. Set trainer.tensor_parallel above 1, or leave sequence_parallel out"
            )

"""The Megatron-core trainer: how a step is made, its reference model, checkpoints, and where its machines meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import PositiveInt, Seconds, StrictModel
from async_grpo.config.model import LoraConfig, ModelConfig
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.presets import WHOLE_BATCH_ADVANTAGES, is_own
from async_grpo.config.rollout import EngineLimits


class RendezvousConfig(StrictModel):
    """Rendezvous of the nodes, for trainer.nodes above 1; the same on every node."""

    address: Annotated[str, Field(pattern=r"^[^\s:/]+$")] | None = None
    """Address at which all nodes reach node 0. Node 0 listens only there. None: the launcher (srun,
    for example) says it."""
    port: Annotated[int, Field(gt=0, lt=65535)] = 29500
    """Port at which the nodes meet; the ranks meet at the next one, or at this one where a launcher places them."""
    id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Nodes with another id are refused. None: the name of the run."""
    timeout_s: Seconds = 600.0
    """Seconds that a node, or a rank, waits for the others before it ends with an error."""
    silence_s: Annotated[float, Field(ge=2)] = 20.0
    """Seconds without a sign of life after which a node counts as lost and the others end."""


class ReferenceConfig(StrictModel):
    """The policy that the KL divergence is measured from."""

    source: Literal["none", "frozen", "synced"] = "none"
    """`frozen`: the weights of `path` for the whole run. `synced`: the weights of `path`, replaced by the policy's
    current ones every `sync_every` steps."""
    path: Path | None = None
    """Hugging Face folder of a model with the policy's sizes, or the id of one on `model.hub`. None: the first policy
    of the run."""
    sync_every: PositiveInt | None = None
    """synced: optimizer steps between two copies."""
    placement: Literal["swap", "model"] = "swap"
    """`swap`: its weights stay in CPU memory, in the policy's dtype, and are swapped with the policy's for each pass.
    `model`: a second model beside the policy: no swapping, but its weights take memory; it may have another rope_theta,
    norm epsilon or tied embeddings than the policy."""

    def problems(self) -> Iterator[str]:
        if self.source == "synced" and self.sync_every is None:
            yield ("source synced needs sync_every, or it would stay frozen. Set trainer.reference.sync_every")
        if self.source != "synced" and self.sync_every is not None:
            yield (
                f"sync_every ({self.sync_every}) has no effect with source {self.source}. Set "
                "trainer.reference.source to synced, or leave sync_every out"
            )
        if self.source == "none" and self.path is not None:
            yield "path has no effect with source none. Set trainer.reference.source to frozen"

    def problems_in_run(self, lora: LoraConfig | None) -> Iterator[str]:
        """Clashes with the policy's adapters."""
        if lora is None or self.source == "none":
            return
        if self.path is not None and self.placement == "swap":
            yield (
                f"trainer.reference.path is {self.path}, but with model.lora only adapters are exchanged for a "
                "pass of the reference (placement swap). Leave path out (the reference is then the first policy, "
                "without adapters), or set trainer.reference.placement to model"
            )
        if self.source == "synced" and self.placement == "model":
            yield (
                "trainer.reference is synced in a second model, which has no adapters of model.lora to take over. Set "
                "trainer.reference.placement to swap"
            )


class OptimizerConfig(StrictModel):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Final learning rate of the linear and cosine schedules."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly to lr."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""
    offload: bool = False
    """Keep fp32 masters and moments in host memory; an update brings those of one parameter at a time to the device.
    This frees device memory for activations and gives the same numbers."""

    def problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g}): the rate would rise. Lower min_lr"


class CheckpointConfig(StrictModel):
    """Resumable checkpoints under `runs/<name>/checkpoints`."""

    every_steps: PositiveInt = 10
    """Optimizer steps between two checkpoints."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep, the newest."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Number of checkpoints with the best evaluations (eval.every_steps) to keep as well, however old;
    `checkpoints/best` names the best."""
    resumable: PositiveInt = 2
    """Number of newest checkpoints whose groups stay in the buffer, so that a run whose newest checkpoint is damaged
    resumes exactly from the one before it. At most `keep`, and fewer as soon as the memory of the buffer is needed for
    new groups. 1: only the newest."""
    background: bool = True
    """Write checkpoints in the background: a step only waits until its state is copied into memory."""
    timeout_s: Seconds = 1800.0
    """Seconds for writing one checkpoint."""
    export_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two exports of the weights as checkpoints/hf-VERSION, which are kept like checkpoints. 0: export
    only at the end, as checkpoints/hf."""


PlatformName = Literal["cpu", "cuda", "npu"]
"""The platforms of `trainer.platform.platforms`."""
VLLM_PLATFORMS: Mapping[str, str] = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}
"""Platform of the trainer -> `rollout.vllm.platform` of servers on the same devices: vLLM has its own names."""


class TrainerConfig(StrictModel):
    """The Megatron-core trainer."""

    platform: PlatformName = "cpu"
    """Hardware of the trainer. It is never guessed from what is installed; see docs/platforms.md."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one device, for the memory check before a run starts. None: ask the machine; no check if it does not
    say."""
    device_memory_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a device's memory that one rank may take. Beyond it torch reports that memory has run out, so that the
    other processes on the device keep theirs."""
    device_peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Dense TFLOP/s of one device at the run's precision, for the reported utilisation. None: the vendor's figure, if
    the device is known."""
    processes: PositiveInt = 1
    """Ranks on all nodes: tensor_parallel * pipeline_parallel * context_parallel * data-parallel size."""
    nodes: PositiveInt = 1
    """Machines that share the ranks evenly. Above 1, `async-grpo trainer CONFIG --node-rank R` runs on each of them."""
    rendezvous: RendezvousConfig = RendezvousConfig()
    tensor_parallel: PositiveInt = 1
    """Ranks that share every matrix."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that share the layers; each has the same number of consecutive layers."""
    context_parallel: PositiveInt = 1
    """Ranks that share every sequence; useful for long sequences, whose activations take most of the memory."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts model. The other kinds of parallelism count the same ranks,
    so it does not multiply into `processes`."""
    sequence_parallel: bool = False
    """Also share the activations between the matrices over the tensor-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them: those of attention (selective) or of whole
    layers (full). This takes less memory and more time and gives the same numbers."""
    threads: PositiveInt = 1
    """torch threads per rank on CPU."""
    micro_batch_tokens: PositiveInt = 8192
    """Sequences are packed, without padding, into micro-batches of at most this many tokens."""
    overlong: Literal["error", "truncate", "drop"] = "error"
    """Treatment of a sequence that fits no micro-batch. `truncate`: only its first tokens are trained. `drop`: none
    is. All of its tokens stay in the denominator of the loss, so the gradient of the others does not grow."""
    num_iterations: PositiveInt = 1
    """Number of passes of a step over its batch."""
    mini_batches: PositiveInt = 1
    """Optimizer updates per pass over the batch; every pass deals out the groups again."""
    streaming: bool = False
    """Start a step with the groups that are ready, while others are still being generated."""
    max_skipped_steps: PositiveInt = 3
    """A step with a non-finite loss or gradient is skipped; this many in a row end the run."""
    take_timeout_s: Seconds = 600.0
    """Seconds that the trainer waits for a batch before it ends with an error."""
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def updates(self) -> int:
        """Optimizer updates of one step."""
        return self.num_iterations * self.mini_batches

    @property
    def processes_per_node(self) -> int:
        """Ranks of one machine."""
        return self.processes // self.nodes

    def problems(self) -> Iterator[str]:
        yield from self._clashing_steps()
        yield from self._clashing_ranks()

    def problems_in_run(self, model: ModelConfig, limits: EngineLimits, groups_per_step: int) -> Iterator[str]:
        """Clashes with the model, with the longest sequence of the engine and with the size of a batch."""
        if self.micro_batch_tokens < limits.max_length and self.overlong == "error":
            yield (
                f"trainer.micro_batch_tokens ({self.micro_batch_tokens}) is below {limits.length_key} "
                f"({limits.max_length}): a long sequence would fit no micro-batch. Raise trainer.micro_batch_tokens, "
                "or set trainer.overlong to truncate or drop"
            )
        if self.mini_batches > groups_per_step:
            yield (
                f"trainer.mini_batches ({self.mini_batches}) is above groups_per_step "
                f"({groups_per_step}): some updates would have no group. Lower trainer.mini_batches"
            )
        yield from self.reference.problems_in_run(model.lora)
        if self.context_parallel > 1 and self.platform == "cuda" and model.precision == "float32":
            yield (
                f"trainer.context_parallel is {self.context_parallel}, and on cuda the kernel for sequences that ranks "
                "share computes in bfloat16, but model.precision is float32. Set model.precision to bfloat16, or "
                "trainer.context_parallel to 1"
            )

    def _clashing_steps(self) -> Iterator[str]:
        if self.objective.kl_beta > 0 and self.reference.source == "none":
            yield (
                f"objective.kl_beta is {self.objective.kl_beta:g}, but there is no reference model to diverge from: "
                "the term would be missing. Set trainer.reference.source to frozen or synced, or "
                "trainer.objective.kl_beta to 0"
            )
        if self.streaming and (obstacle := self._obstacle_to_streaming()):
            yield (
                f"streaming trains a group before the others have arrived, but {obstacle}. Change that, or set "
                "trainer.streaming to false"
            )
        if self.platform == "cpu" and (
            self.device_memory_gib or self.device_peak_tflops or self.device_memory_share < 1
        ):
            yield (
                "device_memory_gib, device_memory_share and device_peak_tflops describe an accelerator and would have "
                "no effect: the platform is cpu. Remove them, or set trainer.platform to that of the accelerator"
            )

    def _obstacle_to_streaming(self) -> str:
        """Feature that needs the whole batch before its first micro-batch; "" if none."""
        if self.num_iterations > 1:
            return f"num_iterations ({self.num_iterations}) goes over the batch more than once"
        if self.mini_batches > 1:
            return f"mini_batches ({self.mini_batches}) deals out the groups of the whole batch"
        advantage = self.objective.advantage
        if advantage in WHOLE_BATCH_ADVANTAGES:
            return f"objective.advantage {advantage} needs the rewards of the whole batch"
        if is_own(advantage):
            return f"objective.advantage {advantage}, of your own, is given the rewards of the whole batch"
        for correction in self.objective.corrections:
            if correction.needs_whole_batch:
                return f"correction {correction.kind} needs the log-probabilities of the whole batch"
        return ""

    def _clashing_ranks(self) -> Iterator[str]:
        block = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if self.processes % block:
            yield (
                f"processes ({self.processes}) is not a multiple of tensor_parallel * pipeline_parallel * "
                f"context_parallel ({self.tensor_parallel} * {self.pipeline_parallel} * {self.context_parallel} = "
                f"{block}): some ranks would have no part. "
                f"Set trainer.processes to {block} times the data-parallel size"
            )
        if self.processes % self.nodes:
            yield (
                f"processes ({self.processes}) is not a multiple of nodes ({self.nodes}), and every node starts as "
                "many ranks as the others. Set trainer.processes to the number of all ranks, a multiple of nodes"
            )
        ranks = self.processes // self.pipeline_parallel
        if ranks % self.expert_parallel:
            yield (
                f"expert_parallel ({self.expert_parallel}) does not divide the {ranks} ranks of a pipeline stage "
                f"(processes {self.processes} / pipeline_parallel {self.pipeline_parallel}): the experts could not be "
                f"laid out evenly. Set trainer.expert_parallel to a divisor of {ranks}"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            yield (
                "sequence_parallel shares activations over the tensor-parallel ranks, but tensor_parallel is 1, so "
                "there is nobody to share with. Set trainer.tensor_parallel above 1, or leave sequence_parallel out"
            )

"""Maximum memory of one trainer device, from the model's shape and the parallel sizes.

Symbols: b bytes per element (2 in bfloat16, 4 in float32), T tokens of a micro-batch on this rank
(micro_batch_tokens / CP), h hidden size, q and k widths of query and key heads, f width of the MLP, V vocabulary, L
layers, TP, PP, CP, EP sizes. t = TP if sequence_parallel divides the activations between the matrices, else 1.

    weights      b * P                     P parameters of this rank: TP divides matrices, PP layers, EP experts
    gradients    4 * P                     summed in float32, not divided
    optimizer    (8 [+ 4 copy]) * P / D    AdamW's two moments and, for bfloat16 weights, a float32 copy. ZeRO-1
                                           (arXiv 1910.02054) divides them over the D ranks with the same weights.
                                           Offloaded: those of one parameter, fetched after activations and work space
                                           are freed, so the larger of the two counts
    activations  T * L/PP * in flight * a  a bytes per token and layer, after arXiv 2205.05198 (which assumes plain
                                           MLPs, dropout and stored attention scores; we have none of them)
    work space   the larger of two: the logits, T * (V/TP * (4 + b) + 2hb), with an entropy bonus T * (V/TP * 12 + 2hb)
                 (in float32 16); and the gradients in the backward pass of one layer, T * (4h + 3f/TP) * b.
                 With fp32_head on NPUs also the float32 copies of the output layer's weights and input, next to the
                 logits: 4 * hV/TP + T * (4 * V/TP + (4 + 2b)h)

a without recomputation: 4hb/t (inputs of two norms and two matrices) + attention + 3fb/TP (gate, up, their product).

    attention            fused kernels keep queries, keys and values, (q + 2k)b/TP, rotated queries and keys,
                         (q + k)b/TP, and the result, qb/TP. On NPUs the rotation also keeps its input, (q + k)b/TP, and
                         attention 64 bytes per head. With CP the gathered keys of all ranks are kept instead of this
                         rank's, once for each of the two segments of a sequence: 2 * (CP + 1/2) * kb/TP
    selective            attention keeps (2q + 2k)b/TP: its inputs and its result
    full                 a layer keeps its input, hb/t; one layer at a time keeps everything
    experts              each copy of a token keeps (2h + 4f)b: itself twice, gate and up, the gate's activation, the
                         product

Host memory of the ranks of a node: an offloaded optimizer, and the copies for a checkpoint until it is on disk, b * P
for the weights and 12 * P for an optimizer that is not offloaded, divided over the data-parallel ranks.

With adapters (`model.lora`), only the adapters have gradients and an optimizer.

In a pipeline (1F1B, arXiv 2104.04473) the first stage has PP micro-batches in flight; the last stage has one, and the
logits. The larger counts. tests/integration/trainer/test_fake_scale.py compares the plan with full-size models.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.config.model import LoraConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.models.shapes import ModelShape
from async_grpo.utils.text import GIB, gib

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
COPY_BYTES = 4

UPDATE_BYTES = 8
"""Bytes per parameter while torch's AdamW updates it: the root of its second moment, and the quotient. Fused: none."""

NPU_SOFTMAX_BYTES = 64
"""Bytes per head and token: the maximum and the sum of its softmax, eight times each in float32."""

RESERVED_BYTES = 3 * GIB
"""Bytes for the device's context, workspaces of its libraries and buffers of the collectives."""

PROCESS_BYTES = 2 * GIB
"""Host memory of one rank or engine process besides tensors: libraries, buffers of the collectives. An estimate."""

EXCHANGE_PAGE_BYTES = 64 << 20
"""Bytes of a page of host memory when a reference model is swapped with the policy."""
EXCHANGE_BUFFERS = 2
"""Number of buffers of that size on the device during the swap."""

SLACK = 1.05
"""Factor on all tensors, for fragmentation of the allocator."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Memory of one device in bytes, on the pipeline stage that needs most."""

    stage: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    work_space: int
    reference: int
    fetched: int = 0
    """Bytes that an update fetches from the host with an offloaded optimizer, after activations are freed."""

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        step = max(self.activations + self.work_space, self.fetched)
        return int(SLACK * (self.weights + self.gradients + self.optimizer + self.reference + step)) + RESERVED_BYTES

    @property
    def resident(self) -> int:
        """Bytes in use between two steps."""
        return int(SLACK * (self.weights + self.gradients + self.optimizer + self.reference)) + RESERVED_BYTES

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "reference model": self.reference,
        }
        if self.fetched > self.activations + self.work_space:
            parts["fetched from the optimizer"] = self.fetched
        else:
            parts["activations"] = self.activations
            parts["work space"] = self.work_space
        summands = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        return f"{gib(self.total)} GiB = {SLACK:g} * ({summands}) + {gib(RESERVED_BYTES)} reserved"


def trainer_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    """Memory of the device that needs most."""
    stages = ("first", "last") if config.trainer.pipeline_parallel > 1 else ("only",)
    plans = [_stage_memory(config, shape, stage) for stage in stages]
    return max(plans, key=lambda plan: plan.total)


def _stage_memory(config: RunConfig, shape: ModelShape, stage: str) -> TrainerMemory:
    layout = config.trainer
    element = ELEMENT_BYTES[config.model.precision]
    lora = config.model.lora

    dense, experts = stage_parameters(shape, layout, stage)
    base_parameters = dense + experts
    if lora is None:
        parameters = base_parameters
    else:  # only the adapters are trained
        dense = adapter_parameters(shape, layout, lora)
        experts = 0
        parameters = base_parameters + dense

    state_bytes = _optimizer_bytes(element)
    shard = dense // dense_replicas(layout) + experts // expert_replicas(layout)
    if layout.optimizer.offload:
        optimizer = 0
        fetched = (state_bytes + UPDATE_BYTES) * min(shard, _largest_parameter(shape, layout, lora))
    else:
        optimizer = state_bytes * shard
        fetched = 0

    if layout.reference.source == "none":
        reference = 0
    elif layout.reference.placement == "swap":
        reference = EXCHANGE_BUFFERS * EXCHANGE_PAGE_BYTES
    else:
        reference = element * base_parameters

    tokens = layout.micro_batch_tokens // layout.context_parallel
    in_flight = layout.pipeline_parallel if stage == "first" else 1
    work_space = backward_bytes(shape, layout, element)
    if stage != "first":
        work_space = max(work_space, logit_bytes(shape, layout, element))
    work_space *= tokens
    if stage != "first" and config.model.fp32_head and layout.platform == "npu":
        work_space = max(work_space, float32_head_bytes(shape, layout, tokens))

    return TrainerMemory(
        stage=stage,
        parameters=parameters,
        weights=element * parameters,
        gradients=GRADIENT_BYTES * (dense + experts),
        optimizer=optimizer,
        activations=tokens * activation_bytes(shape, layout, element, in_flight),
        work_space=work_space,
        reference=reference,
        fetched=fetched,
    )


def _optimizer_bytes(element: int) -> int:
    """Bytes of optimizer state per parameter. float32 weights need no copy."""
    return MOMENT_BYTES + COPY_BYTES if element == 2 else MOMENT_BYTES


def _largest_parameter(shape: ModelShape, layout: TrainerConfig, lora: LoraConfig | None) -> int:
    """Elements of the largest parameter on one rank: a matrix of the vocabulary, or gate and up.

    Gate and up of all experts of a rank are one parameter.
    """
    if lora is not None:
        return max(shape.vocab, 2 * shape.ffn) * lora.rank // layout.tensor_parallel
    vocabulary = shape.vocab * shape.hidden // layout.tensor_parallel
    if shape.experts:
        return max(vocabulary, 2 * shape.ffn * shape.hidden * shape.experts // layout.expert_parallel)
    return max(vocabulary, 2 * shape.ffn * shape.hidden // layout.tensor_parallel)


def dense_replicas(layout: TrainerConfig) -> int:
    """D: number of ranks with the same weights, experts excluded (data- and context-parallel)."""
    return layout.processes // (layout.tensor_parallel * layout.pipeline_parallel)


def expert_replicas(layout: TrainerConfig) -> int:
    """Number of ranks with the same experts."""
    return layout.processes // (layout.expert_parallel * layout.pipeline_parallel)


def stage_parameters(shape: ModelShape, layout: TrainerConfig, stage: str) -> tuple[int, int]:
    """Numbers of (dense, expert) parameters on one rank of the `first`, `last` or `only` stage."""
    layers = shape.layers // layout.pipeline_parallel
    whole = shape.uncut_layer_parameters
    cut = (shape.shared_layer_parameters - whole) // layout.tensor_parallel

    vocabulary_matrices = 2 if stage == "only" and not shape.tied else 1
    vocabulary = vocabulary_matrices * (shape.embedding_parameters // layout.tensor_parallel)
    last_norm = 0 if stage == "first" else shape.hidden

    experts = layers * shape.expert_layer_parameters // layout.expert_parallel
    return layers * (cut + whole) + vocabulary + last_norm, experts


def adapter_parameters(shape: ModelShape, layout: TrainerConfig, lora: LoraConfig) -> int:
    """Number of adapter parameters on one rank of a stage.

    Tensor parallelism divides one side of each matrix, and of its two adapter matrices the one at that side.
    """
    divided_width = {
        "q_proj": shape.query,
        "k_proj": shape.key,
        "v_proj": shape.key,
        "o_proj": shape.query,
        "gate_proj": shape.ffn,
        "up_proj": shape.ffn,
        "down_proj": shape.ffn,
    }
    width = sum(shape.hidden + divided_width[target] // layout.tensor_parallel for target in lora.targets)
    return shape.layers // layout.pipeline_parallel * lora.rank * width


def activation_bytes(shape: ModelShape, layout: TrainerConfig, element: int, in_flight: int) -> int:
    """Bytes of one token's activations in all layers of a stage and all micro-batches in flight."""
    layers = shape.layers // layout.pipeline_parallel
    return layers * in_flight * layer_bytes(shape, layout, element, recompute=layout.recompute)


def layer_bytes(shape: ModelShape, layout: TrainerConfig, element: int, *, recompute: str) -> int:
    """a: bytes that one layer keeps per token until its backward pass."""
    norm_ranks = _ranks_between_matrices(layout)
    if recompute == "full":
        return element * shape.hidden // norm_ranks
    norms = 4 * element * shape.hidden // norm_ranks
    attention = _attention_bytes(shape, layout, element, recompute) // layout.tensor_parallel
    return norms + attention + _mlp_bytes(shape, layout, element)


def _ranks_between_matrices(layout: TrainerConfig) -> int:
    """t: number of ranks that share the activations between the matrices."""
    return layout.tensor_parallel if layout.sequence_parallel else 1


def _attention_bytes(shape: ModelShape, layout: TrainerConfig, element: int, recompute: str) -> int:
    """Bytes that attention keeps per token, all heads."""
    if recompute == "selective":
        return element * (2 * shape.query + 2 * shape.key)
    gathered_keys = (2 * layout.context_parallel + 1) * shape.key
    if layout.platform == "npu":
        softmax = NPU_SOFTMAX_BYTES * shape.heads
        if layout.context_parallel > 1:
            return element * (3 * shape.query + shape.key + gathered_keys) + softmax
        return element * (4 * shape.query + 4 * shape.key) + softmax
    if layout.context_parallel > 1:
        return element * (2 * shape.query + gathered_keys)
    return element * (3 * shape.query + 3 * shape.key)


def _mlp_bytes(shape: ModelShape, layout: TrainerConfig, element: int) -> int:
    """Bytes that the MLP or the experts keep per token. Tensor parallelism does not divide experts."""
    if not shape.experts:
        return 3 * element * shape.ffn // layout.tensor_parallel
    copy_bytes = element * (4 * shape.ffn + 2 * shape.hidden)
    return shape.experts_per_token * copy_bytes // _ranks_between_matrices(layout)


def logit_bytes(shape: ModelShape, layout: TrainerConfig, element: int) -> int:
    """Bytes of the output layer per token: its logits, its input and the gradient of its input.

    The logits exist in the model's precision and in float32. With an entropy bonus there are three float32 tensors
    instead, and in a float32 model also the logits.
    """
    per_logit = element + 4
    if layout.objective.entropy_coef > 0:
        per_logit = 12 if element == 2 else 16
    return per_logit * shape.vocab // layout.tensor_parallel + 2 * element * shape.hidden


def float32_head_bytes(shape: ModelShape, layout: TrainerConfig, tokens: int) -> int:
    """Bytes of the forward pass of a float32 output layer where no kernel sums bfloat16 products in float32, so that
    weights and input are copied: the copies, the logits, and the input with its gradient."""
    slice_size = shape.vocab // layout.tensor_parallel
    return 4 * shape.hidden * slice_size + tokens * (4 * slice_size + (4 + 2 * 2) * shape.hidden)


def backward_bytes(shape: ModelShape, layout: TrainerConfig, element: int) -> int:
    """Bytes of one token in the backward pass of one layer: its gradients, and its recomputed activations."""
    recomputed = 0
    if layout.recompute == "full":
        recomputed = layer_bytes(shape, layout, element, recompute="none")
    if shape.experts:
        copies = shape.experts_per_token * (3 * shape.ffn + 2 * shape.hidden)
        mlp = copies // _ranks_between_matrices(layout)
    else:
        mlp = 3 * shape.ffn // layout.tensor_parallel
    return recomputed + element * (4 * shape.hidden + mlp)


@dataclass(frozen=True, slots=True)
class TrainerHostMemory:
    """Maximum host memory of all ranks of one node, in bytes."""

    optimizer: int
    """Offloaded masters and moments."""
    checkpoint: int
    """Copies of weights and optimizer until a checkpoint is on disk."""
    reference: int
    """A reference model that is swapped with the policy, page-locked."""
    processes: int

    @property
    def total(self) -> int:
        """Bytes of all ranks of the node."""
        return self.optimizer + self.checkpoint + self.reference + self.processes


NO_TRAINER = TrainerHostMemory(optimizer=0, checkpoint=0, reference=0, processes=0)
"""Host memory on a machine without ranks."""


def trainer_host_memory(config: RunConfig, shape: ModelShape) -> TrainerHostMemory:
    """Host memory of the ranks of one node.

    The data-parallel ranks divide the copies for a checkpoint, so there is one copy, whatever the layout. An offloaded
    optimizer is not copied, except float32 weights: they have no separate masters and stay on the device.
    """
    layout = config.trainer
    element = ELEMENT_BYTES[config.model.precision]
    lora = config.model.lora

    trained = shape.parameters
    if lora is not None:
        trained = adapter_parameters(shape, layout, lora) * layout.tensor_parallel * layout.pipeline_parallel
    offloaded = _optimizer_bytes(element) if layout.optimizer.offload else 0
    copied = MOMENT_BYTES + COPY_BYTES - offloaded

    reference = 0
    if layout.reference.source != "none" and layout.reference.placement == "swap" and lora is None:
        reference = element * shape.parameters * dense_replicas(layout) // layout.nodes

    return TrainerHostMemory(
        optimizer=offloaded * trained // layout.nodes,
        checkpoint=(element + copied) * trained // layout.nodes,
        reference=reference,
        processes=PROCESS_BYTES * (layout.processes // layout.nodes),
    )

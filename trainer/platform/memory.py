"""Memory of one device of the trainer, at worst, from the model's shape and how the ranks are cut.

Symbols: b bytes of an element (2 in bfloat16, 4 in float32), T tokens of a micro-batch on this rank
(micro_batch_tokens / CP), h hidden, q and k widths of query and key heads, f width of the MLP, V vocabulary, L layers,
TP, PP, CP, EP sizes, t = TP where sequence_parallel shares what lies between the matrices, else 1.

    weights      b * P                     P parameters of this rank: matrices cut by TP, layers by PP, experts by EP
    gradients    4 * P                     summed in float32, as a whole on every rank
    optimizer    (8 [+ 4 copy]) * P / D    AdamW's two moments and, beside bfloat16 weights, a float32 copy; ZeRO-1
                                           (arXiv 1910.02054) cuts them over the D ranks that hold the same weights
                                           (offloaded: those of one parameter, once activations and work space are
                                           gone: the larger counts)
    activations  T * L/PP * in flight * a  a bytes a token and layer, after arXiv 2205.05198 (there for plain MLPs,
                                           dropout and stored attention scores, none of which is here)
    work space   the larger of the logits, T * (V/TP * (4 + b) + 2hb), with an entropy bonus T * (V/TP * 12 + 2hb) (in
                 float32 16), and of the gradients in the backward pass of one layer, T * (4h + 3f/TP) * b

a without recomputation: 4hb/t (inputs of two norms and two matrices) + attention + 3fb/TP (gate and up; their product).

    attention            fused kernels keep keys, queries, values as they lie, (q + 2k)b/TP, queries and keys rotated,
                         (q + k)b/TP, and the result, qb/TP. On NPUs the rotation keeps its input, (q + k)b/TP more, and
                         attention 64 bytes for each head. With CP the keys of all ranks are kept in the place of this
                         rank's, those of a sequence for each of its two segments: 2 * (CP + 1/2) * kb/TP
    selective            attention keeps (2q + 2k)b/TP: what it starts from, and its result
    full                 a layer keeps its input, hb/t; one layer at a time is there as a whole
    experts              each copy of a token keeps (2h + 4f)b: itself twice, gate and up, the gate's activation, the
                         product

Host memory of the ranks of a node: an offloaded optimizer, and the copies of a checkpoint until it is on disk, b * P
for the weights and 12 * P for an optimizer that is not offloaded, shared by the data-parallel ranks.

With adapters (`model.lora`), gradients and optimizer are those of the adapters alone.

Of the micro-batches of a pipeline (1F1B, arXiv 2104.04473), the first stage has PP in flight, the last has one and the
logits: the larger counts. tests/integration/trainer/test_fake_scale.py compares all of it with models of full size.
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
"""Of a parameter while torch's AdamW updates it: the root of its second moment, and the quotient. Fused: none."""

NPU_SOFTMAX_BYTES = 64
"""Of a head and token: the maximum and the sum of its softmax, eight times each in float32."""

RESERVED_BYTES = 3 * GIB
"""Bytes for the device's context, workspaces of its libraries and buffers of the collectives."""

PROCESS_BYTES = 2 * GIB
"""Host memory of one rank or engine process besides tensors: libraries, buffers of the collectives. An estimate."""

EXCHANGE_PAGE_BYTES = 64 << 20
EXCHANGE_BUFFERS = 2
"""A reference that is swapped with the policy: bytes of a page of host memory, and number of buffers of that size on
the device."""

SLACK = 1.05
"""Factor on everything else, for what an allocator cannot use."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """The memory of one device in bytes, on the pipeline stage that needs most."""

    stage: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    work_space: int
    reference: int
    fetched: int = 0
    """What an update fetches from the host's memory of an offloaded optimizer, when activations are gone."""

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        step = max(self.activations + self.work_space, self.fetched)
        return int(SLACK * (self.weights + self.gradients + self.optimizer + self.reference + step)) + RESERVED_BYTES

    @property
    def resident(self) -> int:
        """Bytes that the device holds between two steps."""
        return int(SLACK * (self.weights + self.gradients + self.optimizer + self.reference)) + RESERVED_BYTES

    def __str__(self) -> str:
        step = {"activations": self.activations, "work space": self.work_space}
        if self.fetched > self.activations + self.work_space:
            step = {"fetched from the optimizer": self.fetched}
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "reference model": self.reference,
            **step,
        }
        summands = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        return f"{gib(self.total)} GiB = {SLACK:g} * ({summands}) + {gib(RESERVED_BYTES)} reserved"


def trainer_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    """The memory of the device that needs most."""
    stages = ("first", "last") if config.trainer.pipeline_parallel > 1 else ("only",)
    return max((_stage_memory(config, shape, stage) for stage in stages), key=lambda memory: memory.total)


def _stage_memory(config: RunConfig, shape: ModelShape, stage: str) -> TrainerMemory:
    layout, element = config.trainer, ELEMENT_BYTES[config.model.precision]
    dense, experts = stage_parameters(shape, layout, stage)
    frozen, lora = 0, config.model.lora
    if lora is not None:
        frozen, dense, experts = dense + experts, adapter_parameters(shape, layout, lora), 0
    offload, kept = layout.optimizer.offload, MOMENT_BYTES + (COPY_BYTES if element == 2 else 0)
    shard = dense // same_weights(layout) + experts // same_experts(layout)
    largest = _largest_parameter(shape, layout, lora)
    tokens = layout.micro_batch_tokens // layout.context_parallel
    in_flight = layout.pipeline_parallel if stage == "first" else 1
    reference = 0
    if layout.reference.source != "none":
        second_model = element * (frozen or dense + experts)
        swapped = layout.reference.placement == "swap"
        reference = EXCHANGE_BUFFERS * EXCHANGE_PAGE_BYTES if swapped else second_model
    work = backward_bytes(shape, layout, element)
    if stage != "first":
        work = max(work, logit_bytes(shape, layout, element))
    return TrainerMemory(
        stage=stage,
        parameters=frozen + dense + experts,
        weights=element * (frozen + dense + experts),
        gradients=GRADIENT_BYTES * (dense + experts),
        optimizer=0 if offload else kept * shard,
        activations=tokens * activation_bytes(shape, layout, element, in_flight),
        work_space=tokens * work,
        reference=reference,
        fetched=(kept + UPDATE_BYTES) * min(shard, largest) if offload else 0,
    )


def _largest_parameter(shape: ModelShape, layout: TrainerConfig, lora: LoraConfig | None) -> int:
    """Of one rank: a matrix of the vocabulary, or gate and up, which for all experts of a rank are one parameter."""
    if lora is not None:
        return max(shape.vocab, 2 * shape.ffn) * lora.rank // layout.tensor_parallel
    vocabulary = shape.vocab * shape.hidden // layout.tensor_parallel
    if shape.experts:
        return max(vocabulary, 2 * shape.ffn * shape.hidden * shape.experts // layout.expert_parallel)
    return max(vocabulary, 2 * shape.ffn * shape.hidden // layout.tensor_parallel)


def same_weights(layout: TrainerConfig) -> int:
    """D: ranks that hold the same weights beside experts (data- and context-parallel)."""
    return layout.processes // (layout.tensor_parallel * layout.pipeline_parallel)


def same_experts(layout: TrainerConfig) -> int:
    """Ranks that hold the same experts."""
    return layout.processes // (layout.expert_parallel * layout.pipeline_parallel)


def stage_parameters(shape: ModelShape, layout: TrainerConfig, stage: str) -> tuple[int, int]:
    """(beside experts, of experts) on one rank of the `first`, `last` or `only` stage."""
    layers = shape.layers // layout.pipeline_parallel
    whole = shape.uncut_layer_parameters
    cut = (shape.shared_layer_parameters - whole) // layout.tensor_parallel
    matrix = shape.embedding_parameters // layout.tensor_parallel
    matrices = 2 if stage == "only" and not shape.tied else 1
    norm = 0 if stage == "first" else shape.hidden
    experts = layers * shape.expert_layer_parameters // layout.expert_parallel
    return layers * (cut + whole) + matrices * matrix + norm, experts


def adapter_parameters(shape: ModelShape, layout: TrainerConfig, lora: LoraConfig) -> int:
    """Parameters of the adapters on one rank of a stage. What meets the cut side of a matrix is cut with it."""
    hidden, cut = shape.hidden, layout.tensor_parallel
    inner = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.ffn)
    sides = {"q_proj": shape.query, "k_proj": shape.key, "v_proj": shape.key, "o_proj": shape.query, **inner}
    return shape.layers // layout.pipeline_parallel * lora.rank * sum(hidden + sides[x] // cut for x in lora.targets)


def activation_bytes(shape: ModelShape, layout: TrainerConfig, element: int, in_flight: int) -> int:
    """Bytes of one token's activations, over the layers of a stage and the micro-batches in flight."""
    layers = shape.layers // layout.pipeline_parallel
    return layers * in_flight * layer_bytes(shape, layout, element, recompute=layout.recompute)


def layer_bytes(shape: ModelShape, layout: TrainerConfig, element: int, *, recompute: str) -> int:
    """a: what one layer keeps of one token until its backward pass."""
    between = layout.tensor_parallel if layout.sequence_parallel else 1
    if recompute == "full":
        return element * shape.hidden // between
    norms = 4 * element * shape.hidden // between
    attention = _attention_bytes(shape, layout, element, recompute) // layout.tensor_parallel
    return norms + attention + _mlp_bytes(shape, layout, element, between)


def _attention_bytes(shape: ModelShape, layout: TrainerConfig, element: int, recompute: str) -> int:
    """Of all heads."""
    if recompute == "selective":
        return element * (2 * shape.query + 2 * shape.key)
    keys = (2 * layout.context_parallel + 1) * shape.key
    if layout.platform == "npu":
        statistics = NPU_SOFTMAX_BYTES * shape.heads
        if layout.context_parallel > 1:
            return element * (3 * shape.query + shape.key + keys) + statistics
        return element * (4 * shape.query + 4 * shape.key) + statistics
    if layout.context_parallel > 1:
        return element * (2 * shape.query + keys)
    return element * (3 * shape.query + 3 * shape.key)


def _mlp_bytes(shape: ModelShape, layout: TrainerConfig, element: int, between: int) -> int:
    """A token goes through the MLP, or copies of it through its experts, which are never cut."""
    if not shape.experts:
        return 3 * element * shape.ffn // layout.tensor_parallel
    return shape.experts_per_token * element * (4 * shape.ffn + 2 * shape.hidden) // between


def logit_bytes(shape: ModelShape, layout: TrainerConfig, element: int) -> int:
    """Bytes of one token: its logits as the output layer gives them and in float32, and, of the output layer, its input
    and that one's gradient. An entropy bonus needs three tensors of float32 instead; logits in float32 stay beside."""
    each = element + 4
    if layout.objective.entropy_coef > 0:
        each = 12 if element == 2 else 16
    return each * shape.vocab // layout.tensor_parallel + 2 * element * shape.hidden


def backward_bytes(shape: ModelShape, layout: TrainerConfig, element: int) -> int:
    """Bytes of one token in the backward pass of one layer: gradients, and what was not kept of the layer."""
    between = layout.tensor_parallel if layout.sequence_parallel else 1
    once = layer_bytes(shape, layout, element, recompute="none") if layout.recompute == "full" else 0
    copies = shape.experts_per_token * (3 * shape.ffn + 2 * shape.hidden) // between
    mlp = copies if shape.experts else 3 * shape.ffn // layout.tensor_parallel
    return once + element * (4 * shape.hidden + mlp)


@dataclass(frozen=True, slots=True)
class TrainerHostMemory:
    """The host memory of all ranks of one node in bytes, at worst."""

    optimizer: int
    """Offloaded masters and moments."""
    checkpoint: int
    """Copies of weights and optimizer until a checkpoint is on disk."""
    reference: int
    """A reference model that is swapped with the policy, page-locked."""
    processes: int

    @property
    def total(self) -> int:
        """Bytes that the ranks of the node take."""
        return self.optimizer + self.checkpoint + self.reference + self.processes


NO_TRAINER = TrainerHostMemory(optimizer=0, checkpoint=0, reference=0, processes=0)
"""That of a machine without ranks."""


def trainer_host_memory(config: RunConfig, shape: ModelShape) -> TrainerHostMemory:
    """The host memory of the ranks of one node.

    The data-parallel ranks share everything that a checkpoint copies, so it is there once, whatever the layout. An
    offloaded optimizer is not copied, except float32 weights: they are their own masters and stay on the device.
    """
    layout, element, lora = config.trainer, ELEMENT_BYTES[config.model.precision], config.model.lora
    trained = shape.parameters
    if lora is not None:
        trained = adapter_parameters(shape, layout, lora) * layout.tensor_parallel * layout.pipeline_parallel
    masters = COPY_BYTES if element == 2 else 0
    offloaded = MOMENT_BYTES + masters if layout.optimizer.offload else 0
    copied = MOMENT_BYTES + COPY_BYTES - offloaded
    swapped = layout.reference.source != "none" and layout.reference.placement == "swap" and lora is None
    ranks = layout.processes // layout.nodes
    return TrainerHostMemory(
        optimizer=offloaded * trained // layout.nodes,
        checkpoint=(element + copied) * trained // layout.nodes,
        reference=element * shape.parameters * same_weights(layout) // layout.nodes if swapped else 0,
        processes=PROCESS_BYTES * ranks,
    )

"""Memory of one device of the trainer, at worst, from the model's shape and how the ranks are cut.

Symbols: b bytes of an element (2 in bfloat16, 4 in float32), T tokens of a micro-batch on this rank
(micro_batch_tokens / CP), h hidden, q and k widths of query and key heads, f width of the MLP, V vocabulary, L layers,
TP, PP, CP, EP sizes, t = TP where sequence_parallel shares what lies between the matrices, else 1.

    weights      b * P                     P parameters of this rank: matrices cut by TP, layers by PP, experts by EP
    gradients    4 * P                     summed in float32, as a whole on every rank
    optimizer    (8 [+ 4 copy]) * P / D    AdamW's two moments and, beside bfloat16 weights, a float32 copy; ZeRO-1
                                           (arXiv 1910.02054) cuts them over the D ranks that hold the same weights
                                           (offloaded: those of one parameter, once activations and logits are gone)
    activations  T * L/PP * in flight * a  a bytes a token and layer, after arXiv 2205.05198 (there for plain MLPs,
                                           dropout and stored attention scores, none of which is here)
    logits       T * V/TP * (2b + 8)       and 8 more with an entropy bonus

a without recomputation: 4hb/t (inputs of two norms and two matrices) + (2q + 4k)b/TP + 2qb/TP (keys, queries, values as
they lie and as attention wants them; its result in both forms) + 4fb/TP (gate and up, the gate's activation, their
product). `selective` keeps one form of each in attention; `full` keeps the layer's input, hb/t, and one layer at a time
in full. Of the micro-batches of a pipeline (1F1B, arXiv 2104.04473), the first stage has PP in flight, the last has one
and the logits: the larger counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.models.shapes import ModelShape
from async_grpo.utils.text import GIB, gib

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
COPY_BYTES = 4

RESERVED_BYTES = 3 * GIB
"""Bytes for the device's context, workspaces of its libraries and buffers of the collectives."""

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
    logits: int
    reference: int
    fetched: int = 0
    """What an update fetches from the host's memory of an offloaded optimizer, when activations and logits are gone."""

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        working = max(self.activations + self.logits, self.fetched)
        tensors = self.weights + self.gradients + self.optimizer + working + self.reference
        return int(SLACK * tensors) + RESERVED_BYTES

    @property
    def resident(self) -> int:
        """Bytes that the device holds between two steps."""
        return int(SLACK * (self.weights + self.gradients + self.optimizer + self.reference)) + RESERVED_BYTES

    def __str__(self) -> str:
        is_update = self.fetched > self.activations + self.logits
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": 0 if is_update else self.activations,
            "logits": 0 if is_update else self.logits,
            "fetched from the optimizer": self.fetched if is_update else 0,
            "reference model": self.reference,
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
    kept = MOMENT_BYTES + (COPY_BYTES if element == 2 else 0)
    tokens = layout.micro_batch_tokens // layout.context_parallel
    in_flight = layout.pipeline_parallel if stage == "first" else 1
    holds_reference = layout.objective.kl_beta > 0 and layout.reference.placement == "model"
    shard = dense // same_weights(layout) + experts // same_experts(layout)
    largest = max(shape.vocab, 2 * shape.ffn) * shape.hidden // layout.tensor_parallel
    return TrainerMemory(
        stage=stage,
        parameters=dense + experts,
        weights=element * (dense + experts),
        gradients=GRADIENT_BYTES * (dense + experts),
        optimizer=0 if layout.optimizer.offload else kept * shard,
        activations=tokens * activation_bytes(shape, layout, element, in_flight),
        logits=tokens * logit_bytes(shape, layout, element, config) if stage != "first" else 0,
        reference=element * (dense + experts) if holds_reference else 0,
        fetched=kept * min(shard, largest) if layout.optimizer.offload else 0,
    )


def same_weights(layout: TrainerConfig) -> int:
    """D: ranks that hold the same weights beside experts (data- and context-parallel)."""
    return layout.processes // (layout.tensor_parallel * layout.pipeline_parallel)


def same_experts(layout: TrainerConfig) -> int:
    """Ranks that hold the same experts."""
    return layout.processes // (layout.expert_parallel * layout.pipeline_parallel)


def stage_parameters(shape: ModelShape, layout: TrainerConfig, stage: str) -> tuple[int, int]:
    """(beside experts, of experts) on one rank of the `first`, `last` or `only` stage."""
    layers = shape.layers // layout.pipeline_parallel
    whole = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0) + shape.experts * shape.hidden
    cut = (shape.shared_layer_parameters - whole) // layout.tensor_parallel
    matrix = shape.embedding_parameters // layout.tensor_parallel
    matrices = 2 if stage == "only" and not shape.tied else 1
    norm = 0 if stage == "first" else shape.hidden
    experts = layers * shape.expert_layer_parameters // layout.expert_parallel
    return layers * (cut + whole) + matrices * matrix + norm, experts


def activation_bytes(shape: ModelShape, layout: TrainerConfig, element: int, in_flight: int) -> int:
    """Bytes of one token's activations, over the layers of a stage and the micro-batches in flight."""
    layers = shape.layers // layout.pipeline_parallel
    whole = layer_bytes(shape, layout, element, recompute="none")
    kept = layer_bytes(shape, layout, element, recompute=layout.recompute)
    once = whole if layout.recompute == "full" else 0
    return layers * in_flight * kept + once


def layer_bytes(shape: ModelShape, layout: TrainerConfig, element: int, *, recompute: str) -> int:
    """a: what one layer keeps of one token until its backward pass."""
    between = layout.tensor_parallel if layout.sequence_parallel else 1
    if recompute == "full":
        return element * shape.hidden // between
    norms = 4 * element * shape.hidden // between
    forms = 2 if recompute == "none" else 1
    attention = forms * element * (2 * shape.query + 2 * shape.key) // layout.tensor_parallel
    return norms + attention + _mlp_bytes(shape, layout, element, between)


def _mlp_bytes(shape: ModelShape, layout: TrainerConfig, element: int, between: int) -> int:
    """A token goes through the MLP, or copies of it through its experts, which are never cut."""
    if not shape.experts:
        return 4 * element * shape.ffn // layout.tensor_parallel
    return shape.experts_per_token * element * (4 * shape.ffn + 2 * shape.hidden) // between


def logit_bytes(shape: ModelShape, layout: TrainerConfig, element: int, config: RunConfig) -> int:
    """Bytes of one token: logits, two float32 tensors of them in either pass, the gradient in the weights'
    precision."""
    entropy = 8 if config.trainer.objective.entropy_coef > 0 else 0
    return (2 * element + 8 + entropy) * shape.vocab // layout.tensor_parallel

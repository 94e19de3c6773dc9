"""Memory of one device of an engine: weights first, then work space, and the KV cache in what is left of its share.

    share        gpu_memory_utilization * memory of the device
    weights      b * parameters / TP
    work space   of one step: activations of max_num_batched_tokens tokens, float32 logits of max_concurrency samples
    a token      2 * L * max(groups / TP, 1) * head_dim * b     keys and values; fewer groups than ranks are repeated
    at worst     max_concurrency samples of max_model_len tokens (evaluations and HTTP, on top, are not counted)

vLLM makes the cache as large as the share allows. With less than `at worst` it lets samples wait or begin again, which
costs time; with less than one whole sample it does not start.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.planner.shapes import ModelShape
from async_grpo.planner.trainer_memory import ELEMENT_BYTES
from async_grpo.planner.units import GIB, gib

BATCHED_TOKENS = 8192
"""Prompt tokens of one step, unless rollout.vllm.extra.max_num_batched_tokens says otherwise."""
RESERVED_BYTES = 1 * GIB
"""Captured graphs, workspaces, one layer of new weights on its way in."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one device."""

    weights: int
    work_space: int
    token: int
    """Of one token in the KV cache."""
    wanted_tokens: int
    max_model_len: int
    utilization: float

    @property
    def least(self) -> int:
        """Without the room to let one sample grow to its full length, nothing works."""
        return self.weights + self.work_space + self.token * self.max_model_len

    def cache(self, memory_bytes: float) -> int:
        """What is left for the KV cache on a device of so much memory; may be negative."""
        return int(self.utilization * memory_bytes) - self.weights - self.work_space

    def samples(self, memory_bytes: float) -> int:
        """Samples of full length that fit into the cache."""
        return max(0, self.cache(memory_bytes) // (self.token * self.max_model_len))

    def __str__(self) -> str:
        cache = self.token * self.wanted_tokens
        return (
            f"weights {gib(self.weights)} + work space {gib(self.work_space)} + KV cache {gib(cache)} GiB at worst "
            f"({self.wanted_tokens} tokens * {self.token} bytes)"
        )


def engine_memory(config: RunConfig, shape: ModelShape) -> EngineMemory:
    """Of one device of one rollout server."""
    vllm, element = config.rollout.vllm, ELEMENT_BYTES[config.model.precision]
    ranks, samples = vllm.tensor_parallel, config.rollout.max_concurrency
    batched = int(vllm.extra.get("max_num_batched_tokens", BATCHED_TOKENS))
    widths = 4 * shape.hidden + (2 * shape.ffn + shape.query + 2 * shape.key) // ranks
    return EngineMemory(
        weights=element * shape.parameters // ranks,
        work_space=batched * element * widths + 4 * samples * shape.vocab + RESERVED_BYTES,
        token=2 * shape.layers * max(shape.groups // ranks, 1) * shape.head_dim * element,
        wanted_tokens=samples * vllm.max_model_len,
        max_model_len=vllm.max_model_len,
        utilization=vllm.gpu_memory_utilization,
    )

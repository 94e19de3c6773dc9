"""DevicePlan: whether the devices of a run are large enough, before it starts.

Memory of one device of an engine: weights first, then work space, and the KV cache in what is left of its share.

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
from async_grpo.config.rollout import EngineLimits
from async_grpo.errors import ConfigError
from async_grpo.models.shapes import ModelShape
from async_grpo.utils.text import GIB, gib
from trainer.platform import select_platform
from trainer.platform.memory import ELEMENT_BYTES, TrainerMemory

RESERVED_BYTES = 1 * GIB
"""Captured graphs, workspaces, one layer of new weights on its way in."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory that an engine needs on one device, in bytes."""

    weights: int
    work_space: int
    token: int
    """Bytes of one token in the KV cache."""
    wanted_samples: int
    """Samples that may be in flight at once."""
    limits: EngineLimits

    @property
    def least(self) -> int:
        """The least memory with which the engine starts: room for one sample of full length."""
        return self.weights + self.work_space + self.token * self.limits.max_length

    def cache(self, memory_bytes: float) -> int:
        """Bytes left for the KV cache on a device of `memory_bytes`; may be negative."""
        return int(self.limits.memory_share * memory_bytes) - self.weights - self.work_space

    def samples(self, memory_bytes: float) -> int:
        """Samples of full length that fit into the cache."""
        return max(0, self.cache(memory_bytes) // (self.token * self.limits.max_length))

    def __str__(self) -> str:
        tokens = self.wanted_samples * self.limits.max_length
        return (
            f"weights {gib(self.weights)} + work space {gib(self.work_space)} + "
            f"KV cache {gib(self.token * tokens)} GiB at worst ({tokens} tokens * {self.token} bytes)"
        )


def engine_memory(config: RunConfig, shape: ModelShape) -> EngineMemory:
    """The memory that a rollout server needs on one device."""
    limits, element = config.rollout.limits, ELEMENT_BYTES[config.model.precision]
    ranks, samples = limits.devices, config.rollout.max_concurrency
    widths = 4 * shape.hidden + (2 * shape.ffn + shape.query + 2 * shape.key) // ranks
    return EngineMemory(
        weights=element * shape.parameters // ranks,
        work_space=limits.batched_tokens * element * widths + 4 * samples * shape.vocab + RESERVED_BYTES,
        token=2 * shape.layers * max(shape.groups // ranks, 1) * shape.head_dim * element,
        wanted_samples=samples,
        limits=limits,
    )


TRAINER_FIX = (
    "Raise trainer.tensor_parallel, pipeline_parallel or processes (which share weights and optimizer), set "
    "trainer.sequence_parallel or trainer.recompute: full, or lower trainer.micro_batch_tokens"
)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One device of each side; None where that side computes on the CPU."""

    trainer: TrainerMemory | None
    engine: EngineMemory | None
    model_bytes: int

    def check(self, trainer_gib: float | None, engine_gib: float | None) -> None:
        """Raise ConfigError, with the arithmetic, for devices that are too small; None means unknown."""
        if self.trainer is not None and trainer_gib is not None and self.trainer.total > trainer_gib * GIB:
            raise ConfigError(
                f"a device of the trainer has {trainer_gib:g} GiB, but needs {self.trainer}: training would run out of "
                f"memory. {TRAINER_FIX}"
            )
        if self.engine is not None and engine_gib is not None and not self.engine.samples(engine_gib * GIB):
            share = self.engine.limits.memory_share * engine_gib
            raise ConfigError(
                f"a device of a rollout server has {engine_gib:g} GiB, of which the engine may use {share:.1f}, but "
                f"one sample of {self.engine.limits.max_length} tokens needs {gib(self.engine.least)}: {self.engine}. "
                f"{self.engine.limits.memory_advice} or rollout.max_concurrency"
            )

    def rows(self, trainer_gib: float | None, engine_gib: float | None) -> list[tuple[str, str]]:
        """The rows for the table of a dry run."""
        found = []
        if self.trainer is not None:
            found.append(("trainer device", f"{self.trainer}; {_against(self.trainer.total, trainer_gib)}"))
        if self.engine is not None:
            found.append(("engine device", f"{self.engine}; {self._cache(self.engine, engine_gib)}"))
        # docs/weights.md: two copies for the publisher, two for the receiver that all engines of a machine share.
        found.append(("shared memory", f"/dev/shm: {gib(4 * self.model_bytes)} GiB = 4 * {gib(self.model_bytes)}"))
        return found

    @staticmethod
    def _cache(engine: EngineMemory, engine_gib: float | None) -> str:
        if engine_gib is None:
            return f"the device's memory is not known ({engine.limits.device_memory_key})"
        cache, samples = engine.cache(engine_gib * GIB), engine.samples(engine_gib * GIB)
        room = "all" if samples >= engine.wanted_samples else f"{samples}"
        return (
            f"of {engine_gib:g} GiB, {engine.limits.memory_share:g} leave {gib(cache)} for the cache: {room} of "
            f"{engine.wanted_samples} samples at full length"
        )


def device_plan(config: RunConfig, shape: ModelShape) -> DevicePlan:
    """The plan for the sides that compute on an accelerator."""
    generates = bool(select_platform(config.rollout.limits.platform).visible_variable)
    return DevicePlan(
        trainer=select_platform(config.trainer.platform).memory_plan(config, shape),
        engine=engine_memory(config, shape) if generates else None,
        model_bytes=ELEMENT_BYTES[config.model.precision] * shape.parameters,
    )


def _against(needed: int, there_gib: float | None) -> str:
    if there_gib is None:
        return "the device's memory is not known (trainer.device_memory_gib)"
    return f"of {there_gib:g} GiB, {gib(there_gib * GIB - needed)} stay free"

"""Exports new weights from the trainer: gathered from all ranks, handed to the weight sender by rank 0.

With `model.lora` these are the adapters alone, and the digest of the weights that they are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state

from async_grpo.config import RunConfig
from async_grpo.weights import make_sender
from async_grpo.weights.base import WeightSender
from async_grpo.weights.lora import DIGEST
from async_grpo.weights.manifest import layout_of
from trainer.coordinator import Coordinator
from trainer.distributed import is_leader
from trainer.model.lora import adapter_shapes
from trainer.model.policy import Policy
from trainer.model.weight_map import model_tensors


class WeightExporter:
    """Publishes versions of one epoch; the servers learn its address with the first of them."""

    def __init__(self, policy: Policy, config: RunConfig, coordinator: Coordinator, epoch: int) -> None:
        self._policy = policy
        self._coordinator = coordinator
        self._announced = False
        self._publisher: WeightSender | None = None
        if is_leader():
            layout = layout_of(_tensor_kinds(policy))
            self._publisher = make_sender(config, layout, epoch)

    def publish(self, version: int) -> None:
        """Weights first, then the version that tickets carry: no ticket asks for weights that are not there."""
        if self._publisher is None:
            for _ in self._policy.export_trained():
                pass  # this rank's part of the gathering
            return
        self._publisher.publish(version, _arrays(self._policy))
        if not self._announced:
            self._coordinator.set_publisher(self._publisher.address)
            self._announced = True
        self._coordinator.publish_version(version)

    def close(self) -> None:
        """End the sender."""
        if self._publisher is not None:
            self._publisher.close()


def _tensor_kinds(policy: Policy) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor that is published."""
    dtype = str(policy.dtype).removeprefix("torch.")
    if policy.adapters is not None:
        adapters = adapter_shapes(policy.hf, policy.adapters.config)
        return [(DIGEST, "uint8", (len(policy.adapters.base),)), *((name, dtype, shape) for name, shape in adapters)]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return [(name, dtype, shape) for name, shape in model_tensors(policy.hf, stages)]


def _arrays(policy: Policy) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """No copies; bfloat16, which numpy does not know, as raw uint16."""
    if policy.adapters is not None:
        yield DIGEST, np.frombuffer(policy.adapters.base, np.uint8)
    for name, tensor in policy.export_trained():
        raw = tensor.contiguous()
        yield name, raw.view(torch.int16).numpy().view(np.uint16) if raw.dtype == torch.bfloat16 else raw.numpy()

"""Exports new weights from the trainer, to the weight sender of rank 0.

weights     every rank --its own shards--> slot of the sender's store --when all are there--> commit
            in a background thread, overlapping the next step; weight updates wait for it (`Policy.reading`). The
            first version is copied before its address is announced
adapters    all ranks --gathered--> rank 0 --> publish, with the digest of the weights that they are for
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
from async_grpo.weights.lora import DIGEST
from async_grpo.weights.manifest import make_layout
from async_grpo.weights.sender import WeightSender
from trainer.coordinator import Coordinator
from trainer.model.lora import adapter_shapes
from trainer.model.policy import Policy
from trainer.model.weight_map import model_tensors
from trainer.platform import select_platform
from trainer.ranks.distributed import is_leader
from trainer.shared_slots import SharedSlots


class WeightExporter:
    """Publishes versions of one epoch; the servers learn its address with the first of them. All calls are
    collective."""

    def __init__(self, policy: Policy, config: RunConfig, coordinator: Coordinator, epoch: int) -> None:
        self._policy = policy
        self._coordinator = coordinator
        self._announced = False
        self._sender: WeightSender | None = None
        if is_leader():
            layout = make_layout(_tensor_kinds(policy))
            self._sender = make_sender(config, layout, epoch)
        self._shards: SharedSlots | None = None
        if policy.adapters is None:
            try:
                stream = select_platform(config.trainer.platform).background_stream()
                self._shards = SharedSlots(policy, self._sender, config.weights.update_timeout_s, stream)
            except BaseException:
                self._close_sender()  # its store has the size of two models, and nobody else would remove it
                raise

    def publish(self, version: int) -> None:
        """Weights first, then the version that tickets carry: they are there, or on their way.

        Raises what copying the version before has raised.
        """
        if self._shards is None:
            self._publish_adapters(version)
        else:
            self._publish_shards(self._shards, version)
        if self._sender is not None and not self._announced:
            self._coordinator.set_publisher(self._sender.address)
        self._announced = True
        self._coordinator.publish_version(version)

    def check_publishing(self) -> None:
        """Raise what has ended the publication of weights, if something has; needs no other rank.

        The servers get no further version then, so a trainer that waits for their groups would wait in vain.
        """
        self._policy.reading.raise_failure()
        if self._sender is not None:
            self._sender.check_publisher()

    def close(self) -> None:
        """End the sender, after the version that is being copied."""
        try:
            self._policy.reading.wait()
        finally:
            if self._shards is not None:
                self._shards.close()
            self._close_sender()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _publish_adapters(self, version: int) -> None:
        if self._sender is not None:
            self._sender.publish_weights(version, _adapters(self._policy))
            return
        for _ in self._policy.export_trained():
            pass  # this rank's part of the gathering

    def _publish_shards(self, shards: SharedSlots, version: int) -> None:
        self._policy.reading.wait()
        shards.allow()
        if self._announced:
            self._policy.reading.start(lambda: shards.publish(version))
        else:
            shards.publish(version)


def _tensor_kinds(policy: Policy) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor that is published."""
    dtype = str(policy.dtype).removeprefix("torch.")
    if policy.adapters is not None:
        adapters = adapter_shapes(policy.hf, policy.adapters.config)
        return [(DIGEST, "uint8", (len(policy.adapters.base),)), *((name, dtype, shape) for name, shape in adapters)]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return [(name, dtype, shape) for name, shape in model_tensors(policy.hf, stages)]


def _adapters(policy: Policy) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """No copies; bfloat16, which numpy does not know, as raw uint16."""
    assert policy.adapters is not None
    yield DIGEST, np.frombuffer(policy.adapters.base, np.uint8)
    for name, tensor in policy.export_trained():
        raw = tensor.contiguous()
        yield name, raw.view(torch.int16).numpy().view(np.uint16) if raw.dtype == torch.bfloat16 else raw.numpy()

"""Exports new weights from the trainer to the weight sender of rank 0.

weights     every rank --own shards--> slot of the sender's store --when complete--> commit
            in a background thread, overlapping the next step; weight updates wait for it (`Policy.reading`)
adapters    all ranks --gather--> rank 0 --> publish, with the digest of the base weights
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
from trainer.ranks.distributed import is_rank_zero
from trainer.shared_slots import SharedSlots


class WeightExporter:
    """Publishes the versions of one epoch. The first one also announces the sender's address.

    All calls are collective, except `check_publishing`.
    """

    def __init__(self, policy: Policy, config: RunConfig, coordinator: Coordinator, epoch: int) -> None:
        self._policy = policy
        self._coordinator = coordinator
        self._announced = False
        self._sender: WeightSender | None = None
        if is_rank_zero():
            layout = make_layout(_tensor_kinds(policy))
            self._sender = make_sender(config, layout, epoch)
        self._shards: SharedSlots | None = None
        if policy.adapters is None:
            try:
                stream = select_platform(config.trainer.platform).background_stream()
                self._shards = SharedSlots(policy, self._sender, config.weights.update_timeout_s, stream)
            except BaseException:
                self._close_sender()  # its store in /dev/shm has the size of two models and would stay there
                raise

    def publish_weights(self, version: int) -> None:
        """Start to publish the weights of `version`, and let new tickets carry it.

        Raises the error of copying the previous version, if it failed.
        """
        # Weights before the version: a server that gets a ticket of `version` waits for its weights, so they must be on
        # their way by then.
        if self._shards is None:
            self._publish_adapters(version)
        else:
            self._publish_shards(self._shards, version)
        if self._sender is not None and not self._announced:
            self._coordinator.set_publisher(self._sender.address)
        self._announced = True
        self._coordinator.publish_version(version)

    def check_publishing(self) -> None:
        """Raise the error that has ended the publication of weights, if any. Not collective.

        Servers get no further version then, so the groups that the trainer waits for would never come.
        """
        self._policy.reading.raise_failure()
        if self._sender is not None:
            self._sender.check_publisher()

    def close(self) -> None:
        """Wait for the copy in progress and close the sender."""
        try:
            self._policy.reading.wait_until_read()
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
            pass  # take part in the collective gather of each adapter

    def _publish_shards(self, shards: SharedSlots, version: int) -> None:
        self._policy.reading.wait_until_read()
        shards.record_update()
        if self._announced:
            self._policy.reading.start_reading(lambda: shards.copy_version(version))
        else:
            # The address is announced after this call, and servers fetch immediately: copy the first version now.
            shards.copy_version(version)


def _tensor_kinds(policy: Policy) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype, shape) of every tensor that is published."""
    dtype = str(policy.dtype).removeprefix("torch.")
    if policy.adapters is not None:
        adapters = adapter_shapes(policy.hf, policy.adapters.config)
        digest = (DIGEST, "uint8", (len(policy.adapters.base),))
        return [digest, *((name, dtype, shape) for name, shape in adapters)]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return [(name, dtype, shape) for name, shape in model_tensors(policy.hf, stages)]


def _adapters(policy: Policy) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the digest of the base weights, then the adapters, without copies."""
    assert policy.adapters is not None
    yield DIGEST, np.frombuffer(policy.adapters.base, np.uint8)
    for name, tensor in policy.export_trained():
        raw = tensor.contiguous()
        if raw.dtype == torch.bfloat16:
            # numpy has no bfloat16: send the bits as uint16.
            yield name, raw.view(torch.int16).numpy().view(np.uint16)
        else:
            yield name, raw.numpy()

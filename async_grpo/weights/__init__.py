"""Weight transfer from the trainer to the engines: interfaces, memory layout, shared-memory store, codec, transports.

    base            interfaces of the transports, and the records that reach the engines
    manifest        versions, tensor layouts, chunk manifests
    chunks, delta   splitting and hashing the model; lossless patches between two versions
    store           one or two versions in shared memory
    encoder         hashing and patching a version in threads
    sender          trainer side, common to all transports
    node/           rollout machine side, common to all transports
    zmq/            the default transport, both ends
    folder/         a shared folder or an object-store bucket, both ends

Child processes import this module on their way to a submodule, so it imports nothing until a factory is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.config import RunConfig
    from async_grpo.weights.base import Resolve, WeightReceiver
    from async_grpo.weights.manifest import TensorLayout
    from async_grpo.weights.sender import WeightSender


def make_sender(config: RunConfig, layout: TensorLayout, epoch: int) -> WeightSender:
    """Create the sender for `weights.transport`. Raises ConfigError, WeightsError, PublisherLost, WaitTimeout."""
    match config.weights.transport:
        case "zmq":
            from async_grpo.weights.zmq.sender import ZmqWeightSender

            return ZmqWeightSender(layout, config.name_with_digest, epoch, config.weights)
        case "shared_filesystem" | "object_store":
            from async_grpo.weights.folder.sender import FolderWeightSender

            return FolderWeightSender(layout, config.name_with_digest, epoch, config.weights)


def make_receiver(config: RunConfig, resolve: Resolve, *, name: str) -> WeightReceiver:
    """Create the receiver of rollout server `name`. Needs a running event loop. Raises ConfigError."""
    from async_grpo.weights.node.receiver import SharedWeightReceiver
    from async_grpo.weights.shared_memory import store_path

    # All servers of the run on this machine share one store and one receiver process, whatever the transport.
    return SharedWeightReceiver(resolve, store_path(config.name_with_digest, "node"), config.weights, name=name)

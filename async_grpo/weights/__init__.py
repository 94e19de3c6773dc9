"""Weights from the trainer to the engines: the seam, the layouts, the store in shared memory, the codec, the
transports.

    base            what a transport offers to both sides, and what it holds
    manifest        versions, layouts of tensors, manifests of chunks
    chunks, delta   the block of a model cut and hashed; lossless patches between two versions
    store           two versions in shared memory
    encoder         hashes and patches a version, on threads
    sender          the trainer's side of every transport
    node/           the rollout machine's side of every transport
    zmq/            the default transport, both ends
    folder/         a folder that all machines mount, or a bucket, both ends

Child processes pass through this module, so it imports nothing before a factory is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.config import RunConfig
    from async_grpo.weights.base import Resolve, WeightReceiver
    from async_grpo.weights.manifest import TensorLayout
    from async_grpo.weights.sender import WeightSender


def make_sender(config: RunConfig, layout: TensorLayout, epoch: int) -> WeightSender:
    """The sender of `weights.transport`. Raises ConfigError, WeightsError, PublisherLost, WaitTimeout."""
    match config.weights.transport:
        case "zmq":
            from async_grpo.weights.zmq.sender import ZmqWeightSender

            return ZmqWeightSender(layout, config.local_name, epoch, config.weights)
        case "shared_filesystem" | "object_store":
            from async_grpo.weights.folder.sender import FolderWeightSender

            return FolderWeightSender(layout, config.local_name, epoch, config.weights)


def make_receiver(config: RunConfig, resolve: Resolve, *, name: str) -> WeightReceiver:
    """The receiver of `weights.transport` for the rollout server `name`; needs a running event loop. Raises
    ConfigError."""
    from async_grpo.weights.node.receiver import SharedWeightReceiver
    from async_grpo.weights.shared_memory import store_path

    # Every server of the run on this machine shares the store, and the process that fills it: of any transport.
    return SharedWeightReceiver(resolve, store_path(config.local_name, "node"), config.weights, name=name)

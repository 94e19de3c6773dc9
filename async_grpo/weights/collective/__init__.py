"""Versions broadcast by torch.distributed, on top of the transport over ZMQ.

    receivers --ManifestRequest "ready"--> publisher --ManifestReply + GroupInvitation--> the receivers that are ready
    publisher --broadcast, bucket by bucket------------------------------------------->  their slots

worker   the thread of a process that takes part in broadcasts, and the store through which its group meets
root     the publisher's part: which receivers a group has
member   a receiver's part: proves what came, and leaves the rest to be fetched

Everything else is the transport over ZMQ: identities, manifests, hashes, the store, and chunks by request for whatever
a broadcast did not bring. So a member that dies or comes late costs a broadcast, never a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.config.weights import WeightsConfig
    from async_grpo.weights.collective.member import BroadcastMember
    from async_grpo.weights.collective.root import BroadcastRoot


def make_root(config: WeightsConfig, send: Callable[[bytes, bytes], None]) -> BroadcastRoot | None:
    """The publisher's part; None if `weights.transport` is another."""
    if config.transport != "collective":
        return None
    from async_grpo.weights.collective.root import BroadcastRoot
    from async_grpo.weights.collective.worker import BroadcastWorker

    return BroadcastRoot(BroadcastWorker(config.request_timeout_s), send, config.heartbeat_s)


def make_member(config: WeightsConfig) -> BroadcastMember | None:
    """A receiver's part; None if `weights.transport` is another."""
    if config.transport != "collective":
        return None
    from async_grpo.weights.collective.member import BroadcastMember
    from async_grpo.weights.collective.worker import BroadcastWorker

    return BroadcastMember(BroadcastWorker(config.request_timeout_s))

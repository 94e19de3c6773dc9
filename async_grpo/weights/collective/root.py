"""The publisher's part: which receivers a group has, and when it begins.

A receiver that asks for the manifest, and has a store, is ready for the newest version. The broadcast begins when all
receivers that are known are ready, or `patience_s` after the first. Those that are ready are the group. It is the group
of the version before if they are the same ones and it is whole, so that nobody connects anew. Who asks later, or for
the first time, fetches chunks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

import structlog

from async_grpo.weights.chunks import ServedVersion
from async_grpo.weights.collective.worker import BroadcastOver, BroadcastWorker
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.weights.zmq.messages import GroupEntry, GroupInvitation, ManifestReply
from async_grpo.wire import encode

ROOT_RANK = 0

log = structlog.get_logger()
Send = Callable[[bytes, bytes], None]
"""Sends (receiver, message)."""


class BroadcastRoot:
    """Invites receivers. Never waits."""

    def __init__(self, worker: BroadcastWorker, send: Send, patience_s: float) -> None:
        self.worker = worker
        self.broadcasts = self.failures = 0
        self._send = send
        self._patience_s = patience_s
        self._ready: dict[bytes, None] = {}
        self._ready_s = 0.0
        self._members: tuple[bytes, ...] = ()
        self._number = int.from_bytes(os.urandom(6))  # no receiver takes it for a group of an earlier publisher
        self._whole = False
        self._invited: WeightVersion | None = None

    @property
    def broadcasting(self) -> WeightVersion | None:
        """The version whose slot must not be overwritten; None if there is none."""
        return self._invited if self.worker.busy else None

    def ask(self, peer: bytes, newest: WeightVersion | None) -> bool:
        """The receiver is ready for the newest version; False if it is to fetch it, because its broadcast has begun or
        that of another group goes on."""
        if newest is None or newest == self._invited or (self.worker.busy and peer not in self._members):
            return False
        if not self._ready:
            self._ready_s = time.monotonic()
        self._ready[peer] = None
        return True

    def begin_if_ready(self, known: Collection[bytes], served: ServedVersion, manifest: WeightManifest) -> None:
        """Invite those that are ready, if the newest version can be broadcast now."""
        if not self._ready or self.worker.busy or served.identity == self._invited:
            return
        if set(known) - self._ready.keys() and time.monotonic() - self._ready_s < self._patience_s:
            return
        members, self._ready = tuple(sorted(self._ready)), {}
        if members != self._members or not self._whole:
            self._members, self._number = members, self._number + 1
        self._whole, self._invited = True, served.identity
        size = 1 + len(members)
        for rank, peer in enumerate(members, 1):
            invitation = GroupInvitation(number=self._number, rank=rank, size=size)
            self._send(peer, encode(ManifestReply(manifest=manifest, group=invitation)))
        invitation = GroupInvitation(number=self._number, rank=ROOT_RANK, size=size)
        self.worker.start(invitation, served.identity, served.block)
        self.broadcasts += 1

    def relay(self, peer: bytes, entry: GroupEntry) -> None:
        """An entry of a member goes to the others."""
        if peer not in self._members or entry.group != self._number:
            return
        self.worker.put(entry)
        for other in self._members:
            if other != peer:
                self._send(other, encode(entry))

    def advance(self) -> None:
        """Take what the broadcast has to tell."""
        for event in self.worker.take():
            if isinstance(event, GroupEntry):
                self._tell_members(event)
            elif isinstance(event, BroadcastOver) and event.error:
                self._whole = False
                self.failures += 1
                log.warning("a broadcast of weights failed; receivers fetch the rest", reason=event.error)
                self._tell_members(GroupEntry(group=self._number, key="", value=b"the publisher has left it"))

    def _tell_members(self, entry: GroupEntry) -> None:
        for peer in self._members:
            self._send(peer, encode(entry))

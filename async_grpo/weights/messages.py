"""What travels between trainer, publisher and receivers.

trainer  --Publish-->  publisher  --Announcement (PUB)-->     receivers
         <-Ready----              <-ManifestRequest (DEALER)-
         <-Published              --ManifestReply (ROUTER)-->
                                  <-ChunkRequest------------
                                  --ChunkReply + bytes | Gone->
"""

from __future__ import annotations

from async_grpo.weights.manifest import Identity, Manifest
from async_grpo.wire.records import Record


class Ready(Record, frozen=True, kw_only=True, tag="ready"):
    """The publisher listens; these are its real ports."""

    announce: str
    requests: str


class Publish(Record, frozen=True, kw_only=True, tag="publish"):
    """The store holds this version: serve and announce it."""

    epoch: int
    version: int


class Published(Record, frozen=True, kw_only=True, tag="published"):
    """The announcement of this version is out."""

    epoch: int
    version: int


class Announcement(Record, frozen=True, kw_only=True, tag="announcement"):
    """The newest version; repeated every heartbeat. `version` is None before the first."""

    epoch: int
    version: int | None = None

    @property
    def identity(self) -> Identity | None:
        """(epoch, version) if there is a version."""
        return None if self.version is None else Identity(self.epoch, self.version)


class ManifestRequest(Record, frozen=True, kw_only=True, tag="manifest_request"):
    """Asks for the newest manifest."""


class ManifestReply(Record, frozen=True, kw_only=True, tag="manifest_reply"):
    """The newest manifest; None before the first version."""

    manifest: Manifest | None = None


class ChunkRequest(Record, frozen=True, kw_only=True, tag="chunk_request"):
    """Asks for one chunk; may be repeated at will."""

    epoch: int
    version: int
    index: int


class ChunkReply(Record, frozen=True, kw_only=True, tag="chunk_reply"):
    """The next frame holds the chunk."""

    epoch: int
    version: int
    index: int


class Gone(Record, frozen=True, kw_only=True, tag="gone"):
    """This version is not served any more: ask for the newest manifest."""

    epoch: int
    version: int


Request = ManifestRequest | ChunkRequest
Reply = ManifestReply | ChunkReply | Gone

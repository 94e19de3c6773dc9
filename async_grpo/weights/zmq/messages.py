"""What travels between trainer, publisher and receivers, and the counters of the transport.

    trainer   --Prepare-->          publisher     "which slot may I write?"; the answer waits for the encoder
              <-Cleared---
              --Publish-->                        "the store holds v"
              <-Published-
              --StatsRequest--> <-PublisherStats-

    publisher --Announcement (PUB)--------> receivers    newest version, at once and every heartbeat
              <--ReceiverHeartbeat (DEALER)--            registration, every heartbeat and at every change
              ---ParentAssignment (ROUTER)->             from whom to fetch
              <--ManifestRequest------------
              ---ManifestReply-------------->
              <--ReceiverLeaving-------------

    publisher | relay  <--ChunkRequest (DEALER)--  receiver
                       ---ChunkReply + bytes | ChunkPending | VersionGone-->
                       <--FetchDone--------------

Records are MessagePack maps with named fields. Every chunk request is signed with the key of its version, which only
the manifest contains. So a peer that cannot read manifests gets no chunks, and replaying a recorded request yields only
the same chunk again.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from async_grpo.weights.manifest import Versioned, WeightManifest, WeightVersion
from async_grpo.wire.records import Record

SIGNATURE_BYTES = 16
_SIGNED = struct.Struct("<qqq?")


class PublisherReady(Record, frozen=True, kw_only=True, tag="ready"):
    """The publisher listens; these are its real ports."""

    announce: str
    requests: str


class Prepare(Record, frozen=True, kw_only=True, tag="prepare"):
    """The trainer asks for a slot to write."""


class Cleared(Record, frozen=True, kw_only=True, tag="cleared"):
    """The trainer may write a slot, but not that of `spare`, which is being fetched."""

    spare: tuple[int, int] | None = None


class Publish(Versioned, frozen=True, kw_only=True, tag="publish"):
    """The store holds this version: encode, serve and announce it."""


class Published(Versioned, frozen=True, kw_only=True, tag="published"):
    """The publisher has taken the order."""


class StatsRequest(Record, frozen=True, kw_only=True, tag="stats_request"):
    """Asks for the publisher's counters."""


class Announcement(Record, frozen=True, kw_only=True, tag="announcement"):
    """The newest version; repeated every heartbeat. `version` is None before the first."""

    epoch: int
    version: int | None = None

    @property
    def identity(self) -> WeightVersion | None:
        """(epoch, version) if there is a version."""
        return None if self.version is None else WeightVersion(self.epoch, self.version)


class ReceiverHeartbeat(Record, frozen=True, kw_only=True, tag="beat"):
    """A receiver is alive: where it serves others, and from whom it could not fetch."""

    node: str
    host: str
    relay: str
    suspect: str = ""
    """The relay endpoint that failed this receiver."""


class ReceiverLeaving(Record, frozen=True, kw_only=True, tag="leave"):
    """A receiver ends."""

    node: str


class ParentAssignment(Record, frozen=True, kw_only=True, tag="assignment"):
    """Fetch chunks from this endpoint, a relay's or the publisher's own."""

    parent: str
    relay: bool


class ManifestRequest(Record, frozen=True, kw_only=True, tag="manifest_request"):
    """Asks for the newest manifest."""


class ManifestReply(Record, frozen=True, kw_only=True, tag="manifest_reply"):
    """The newest manifest; None before the first version."""

    manifest: WeightManifest | None = None


class ChunkRequest(Versioned, frozen=True, kw_only=True, tag="chunk_request"):
    """Asks for one chunk, as a patch if `patch` is set and there is one. Safe to repeat."""

    index: int
    patch: bool
    signature: bytes

    def is_signed(self, key: bytes) -> bool:
        """Whether the sender of this request knows the key of the version."""
        return hmac.compare_digest(sign(key, self.identity, self.index, self.patch), self.signature)


class ChunkReply(Versioned, frozen=True, kw_only=True, tag="chunk_reply"):
    """The next frame holds the chunk, or the patch that makes it out of the base."""

    index: int
    patch: bool


class FetchDone(Versioned, frozen=True, kw_only=True, tag="done"):
    """This receiver needs no more chunks of this version from here."""


class VersionGone(Versioned, frozen=True, kw_only=True, tag="gone"):
    """This version is no longer served: ask for the newest manifest."""


class ChunkPending(Record, frozen=True, kw_only=True, tag="waiting"):
    """The requested chunk has not arrived here yet, but this server is alive; sent every heartbeat."""


TrainerOrder = Prepare | Publish | StatsRequest
TrackerRequest = ReceiverHeartbeat | ReceiverLeaving | ManifestRequest
TrackerReply = ParentAssignment | ManifestReply
ChunkOrder = ChunkRequest | FetchDone
ChunkAnswer = ChunkReply | VersionGone | ChunkPending


class PublisherStats(msgspec.Struct, kw_only=True, tag="publisher_stats", tag_field="kind"):
    """Counters of one publisher process."""

    versions: int = 0
    delta_versions: int = 0
    """Versions with patches."""
    encoded_bytes: int = 0
    """What a receiver that follows every version has to fetch of them."""
    waited_s: float = 0.0
    """How long the trainer waited for the encoder before it could copy."""
    served_bytes: int = 0
    """Chunks and patches sent."""
    served_chunks: int = 0
    fallbacks: dict[str, int] = {}
    """Versions that went dense under `auto` or `delta`, by reason."""
    receivers: int = 0
    direct_receivers: int = 0
    """Receivers that fetch from the publisher itself."""
    refused: int = 0
    """Peers without this run's key."""
    unsigned: int = 0
    """Chunk requests without the version's key."""


def sign(key: bytes, identity: WeightVersion, index: int, patch: bool) -> bytes:
    """The signature of a chunk request."""
    message = _SIGNED.pack(*identity, index, patch)
    return hashlib.blake2b(message, key=key, digest_size=SIGNATURE_BYTES).digest()

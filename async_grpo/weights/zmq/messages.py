"""Records on the wire between trainer, publisher and receivers, and the publisher's counters.

    trainer   --Prepare-->          publisher     "which slot may I write?"; the answer waits for the encoder
              <-Cleared---
              --Publish-->                        "the store holds v"
              <-Published-
              --StatsRequest--> <-PublisherStats-

    publisher --Announcement (PUB)--------> receivers    newest version, immediately and every heartbeat
              <--ReceiverHeartbeat (DEALER)--            registration, every heartbeat and at every change
              ---ParentAssignment (ROUTER)->             the parent to fetch from
              <--ManifestRequest------------
              ---ManifestReply-------------->
              <--ReceiverLeaving-------------

    publisher | relay  <--ChunkRequest (DEALER)--  receiver
                       ---ChunkReply + bytes | ChunkPending | VersionGone-->
                       <--FetchDone--------------

Records are MessagePack maps with named fields. Every chunk request is signed with the key of its version, which only
the manifest contains. So a peer that cannot read manifests gets no chunks, and a replayed request returns only the same
chunk again.
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
    """The publisher listens at these endpoints."""

    announce: str
    requests: str


class Prepare(Record, frozen=True, kw_only=True, tag="prepare"):
    """The trainer requests a slot to write."""


class Cleared(Record, frozen=True, kw_only=True, tag="cleared"):
    """The trainer may write a slot, except the slot of version `spare`, which is being fetched."""

    spare: tuple[int, int] | None = None


class Publish(Versioned, frozen=True, kw_only=True, tag="publish"):
    """The version is in the store: encode, serve and announce it."""


class Published(Versioned, frozen=True, kw_only=True, tag="published"):
    """The publisher has accepted `Publish`."""


class StatsRequest(Record, frozen=True, kw_only=True, tag="stats_request"):
    """Requests the publisher's counters."""


class Announcement(Record, frozen=True, kw_only=True, tag="announcement"):
    """The newest version, repeated every heartbeat. `version` is None before the first."""

    epoch: int
    version: int | None = None

    @property
    def identity(self) -> WeightVersion | None:
        """(epoch, version); None before the first version."""
        return None if self.version is None else WeightVersion(self.epoch, self.version)


class ReceiverHeartbeat(Record, frozen=True, kw_only=True, tag="beat"):
    """A receiver is alive."""

    node: str
    host: str
    relay: str
    """Endpoint where this receiver serves chunks to others."""
    suspect: str = ""
    """Endpoint of a relay from which this receiver could not fetch; empty if there is none."""


class ReceiverLeaving(Record, frozen=True, kw_only=True, tag="leave"):
    """A receiver is shutting down."""

    node: str


class ParentAssignment(Record, frozen=True, kw_only=True, tag="assignment"):
    """Fetch chunks from this endpoint, a relay's or the publisher's."""

    parent: str
    relay: bool


class ManifestRequest(Record, frozen=True, kw_only=True, tag="manifest_request"):
    """Requests the newest manifest."""


class ManifestReply(Record, frozen=True, kw_only=True, tag="manifest_reply"):
    """The newest manifest; None before the first version."""

    manifest: WeightManifest | None = None


class ChunkRequest(Versioned, frozen=True, kw_only=True, tag="chunk_request"):
    """Requests one chunk, as a patch if `patch` is set and there is one. Safe to repeat."""

    index: int
    patch: bool
    signature: bytes

    def is_signed(self, key: bytes) -> bool:
        """True if the request was signed with the version's key."""
        return hmac.compare_digest(sign(key, self.identity, self.index, self.patch), self.signature)


class ChunkReply(Versioned, frozen=True, kw_only=True, tag="chunk_reply"):
    """The next frame contains the chunk, or its patch if `patch` is set."""

    index: int
    patch: bool


class FetchDone(Versioned, frozen=True, kw_only=True, tag="done"):
    """The receiver needs no more chunks of this version from this server."""


class VersionGone(Versioned, frozen=True, kw_only=True, tag="gone"):
    """This version is no longer served: request the newest manifest."""


class ChunkPending(Record, frozen=True, kw_only=True, tag="waiting"):
    """The requested chunk has not arrived at this server yet. Sent every heartbeat as a sign of life."""


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
    """Bytes that a receiver of every version has to fetch."""
    waited_s: float = 0.0
    """Seconds that the trainer waited for the encoder before it could copy."""
    served_bytes: int = 0
    """Bytes of chunks and patches sent."""
    served_chunks: int = 0
    fallbacks: dict[str, int] = {}
    """Versions served dense with encoding `auto` or `delta`, by reason."""
    receivers: int = 0
    direct_receivers: int = 0
    """Receivers that fetch directly from the publisher."""
    refused: int = 0
    """Connections refused for a wrong or missing key."""
    unsigned: int = 0
    """Chunk requests refused for a wrong signature or chunk number."""


def sign(key: bytes, identity: WeightVersion, index: int, patch: bool) -> bytes:
    """Return the signature of a chunk request."""
    message = _SIGNED.pack(*identity, index, patch)
    return hashlib.blake2b(message, key=key, digest_size=SIGNATURE_BYTES).digest()

"""What a fetch asks for, and what it counts."""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from async_grpo.weights.manifest import Versioned, WeightVersion

SIGNATURE_BYTES = 16
_SIGNED = struct.Struct("<qqq?")


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


def sign(key: bytes, identity: WeightVersion, index: int, patch: bool) -> bytes:
    """The signature of a chunk request."""
    message = _SIGNED.pack(*identity, index, patch)
    return hashlib.blake2b(message, key=key, digest_size=SIGNATURE_BYTES).digest()


class ReceiverStats(msgspec.Struct, kw_only=True, tag="receiver_stats", tag_field="kind"):
    """Counters of one receiver process."""

    versions: int = 0
    interrupted: int = 0
    """Fetches given up: the version was replaced, or did not come in time."""
    skipped: int = 0
    """Versions that were announced after the one before and never fetched."""
    received_bytes: int = 0
    """Chunks and patches that came over the network."""
    dense_bytes: int = 0
    """Length of all versions that came whole."""
    patched_chunks: int = 0
    dense_chunks: int = 0
    unchanged_chunks: int = 0
    """Copied from the version before."""
    rerequests: int = 0
    """Chunks and manifests asked for more than once."""
    fallbacks: dict[str, int] = {}
    """Where a patch was offered and the dense chunks were fetched, by reason."""
    last_transfer_s: float = 0.0
    """Seconds from the manifest to the commit."""
    relayed_bytes: int = 0
    """Sent on to other receivers."""
    parents_lost: int = 0
    refused: int = 0


def count(reasons: dict[str, int], reason: str) -> None:
    """Add one to the count of `reason`."""
    reasons[reason] = reasons.get(reason, 0) + 1

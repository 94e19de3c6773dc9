"""The counters of a receiver process."""

from __future__ import annotations

import msgspec


class ReceiverStats(msgspec.Struct, kw_only=True, tag="receiver_stats", tag_field="kind"):
    """Counters of one receiver process."""

    versions: int = 0
    interrupted: int = 0
    """Abandoned fetches: the version was replaced, or did not arrive in time."""
    skipped: int = 0
    """Versions between two fetched ones that were never fetched."""
    received_bytes: int = 0
    """Bytes of chunks and patches received over the network."""
    dense_bytes: int = 0
    """Size of all received versions without patches."""
    patched_chunks: int = 0
    dense_chunks: int = 0
    unchanged_chunks: int = 0
    """Chunks copied from the previous version."""
    rerequests: int = 0
    """Chunks requested more than once."""
    fallbacks: dict[str, int] = {}
    """Cases in which patches were available but dense chunks were fetched, by reason."""
    last_transfer_s: float = 0.0
    """Seconds from the manifest to the commit."""
    relayed_bytes: int = 0
    """Bytes sent to other receivers."""
    parents_lost: int = 0
    refused: int = 0
    """Connections refused for a wrong or missing key."""

    def count_fallback(self, reason: str) -> None:
        """Count one fallback for `reason`."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

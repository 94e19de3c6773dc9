"""The counters of a receiver process."""

from __future__ import annotations

import msgspec


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

    def count_fallback(self, reason: str) -> None:
        """Add one to the fallbacks for `reason`."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

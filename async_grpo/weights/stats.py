"""What the weight plane counts. Totals since the start unless the name says `last`."""

from __future__ import annotations

import msgspec


class PublisherStats(msgspec.Struct, kw_only=True, tag="publisher_stats", tag_field="kind"):
    """Of one publisher process."""

    versions: int = 0
    delta_versions: int = 0
    """Of them, with patches."""
    dense_bytes: int = 0
    """What the published versions are long."""
    encoded_bytes: int = 0
    """What a receiver that follows every version has to fetch of them."""
    last_ratio: float = 1.0
    """Dense bytes by encoded bytes of the newest version."""
    last_snapshot_s: float = 0.0
    """The trainer's copy into shared memory."""
    last_hash_s: float = 0.0
    last_encode_s: float = 0.0
    last_wait_s: float = 0.0
    """How long the trainer waited for the encoder before it could copy."""
    waited_s: float = 0.0
    served_bytes: int = 0
    """Chunks and patches sent: the egress."""
    served_chunks: int = 0
    served_patches: int = 0
    fallbacks: dict[str, int] = {}
    """Versions that went dense under `auto` or `delta`, by reason."""
    receivers: int = 0
    direct_receivers: int = 0
    """Of them, those that fetch from the publisher."""
    most_behind: int = 0
    """Versions between the newest and the oldest that a receiver has."""
    refused: int = 0
    """Peers without this run's key."""
    unsigned: int = 0
    """Chunk requests without the version's key."""


class ReceiverStats(msgspec.Struct, kw_only=True, tag="receiver_stats", tag_field="kind"):
    """Of one receiver process."""

    versions: int = 0
    interrupted: int = 0
    """Fetches given up: the version was replaced, or did not come in time."""
    skipped: int = 0
    """Versions that were announced after the one before and never fetched."""
    received_bytes: int = 0
    """Chunks and patches that came over the network."""
    dense_bytes: int = 0
    """What the versions that came whole are long."""
    patched_chunks: int = 0
    dense_chunks: int = 0
    unchanged_chunks: int = 0
    """Copied from the version before."""
    rerequests: int = 0
    """Chunks and manifests asked for more than once."""
    fallbacks: dict[str, int] = {}
    """Where a patch was offered and the dense chunks were fetched, by reason."""
    transfer_s: float = 0.0
    last_transfer_s: float = 0.0
    """From the manifest to the commit."""
    verify_s: float = 0.0
    apply_s: float = 0.0
    slot_wait_s: float = 0.0
    """Waiting for engines and relayed receivers to finish with the slot that comes next."""
    versions_behind: int = 0
    relayed_bytes: int = 0
    """Sent on to other receivers."""
    parents_lost: int = 0
    refused: int = 0


def count(reasons: dict[str, int], reason: str, by: int = 1) -> None:
    """One more of `reason`."""
    reasons[reason] = reasons.get(reason, 0) + by

"""Samples with sampling masks, and their size in the buffer, for benches that compare them with samples without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from async_grpo.wire import Group, Sample, encode
from async_grpo.wire.sampling_mask import COUNT_DTYPE, ID_DTYPE

KEPT_TOKENS = 20
"""Tokens per position of a made mask: as many as top_k 20 keeps at most. A trained model with top_p keeps fewer."""


def add_sampling_mask(sample: Sample, vocabulary: int) -> Sample:
    """Return the sample with KEPT_TOKENS different tokens per position, the sampled one first."""
    ids = (sample.token_ids()[:, None] + np.arange(KEPT_TOKENS)) % vocabulary
    counts = np.full(sample.length, KEPT_TOKENS, COUNT_DTYPE)
    return structs.replace(sample, mask_ids=ids.astype(ID_DTYPE).tobytes(), mask_counts=counts.tobytes())


def measure_bytes_per_token(groups: Sequence[Group]) -> float:
    """Bytes of the groups' records per completion token."""
    tokens = sum(sample.length for group in groups for sample in group.samples)
    return sum(len(encode(group)) for group in groups) / tokens

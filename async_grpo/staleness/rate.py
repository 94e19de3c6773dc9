"""How far sampling may run ahead of inserting, and behind: the arithmetic of Reverb's rate limiter.

Source: Reverb, arXiv 2102.04736, section 3.3. With I groups inserted, U uses (groups sampled, each
time counted), R = samples_per_insert and the balance

    diff = R * I - U

an insert is allowed while  R * (I + 1) - U <= max_diff  or the table holds fewer than min_size, and a
batch of P may be sampled while  R * I - (U + P) >= min_diff  and the table holds at least min_size.
The defaults are no limit at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNLIMITED = 1e15
"""A diff that is never reached; a number that a script can be told exactly."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """`limits` says whether the ratio is limited; then a full buffer makes room by evicting its oldest
    READY group, as a Reverb table does."""

    min_size: int = 0
    samples_per_insert: float = 1.0
    min_diff: float = -UNLIMITED
    max_diff: float = UNLIMITED

    @classmethod
    def ratio(cls, samples_per_insert: float, *, min_size: int, error_buffer: float) -> RateLimit:
        """Hold uses : inserts near `samples_per_insert`, within error_buffer uses around the balance at
        which the table has just reached min_size."""
        start = samples_per_insert * min_size
        return cls(min_size, samples_per_insert, start - error_buffer, start + error_buffer)

    @property
    def limits(self) -> bool:
        """Whether uses and inserts depend on each other."""
        return self.max_diff < UNLIMITED

    def insertable(self, *, inserts: int, uses: int, size: int, needed_size: int) -> int:
        """Groups that may be inserted now, beside `inserts` that were, or are being made."""
        by_size = needed_size - size
        by_ratio = math.floor((self.max_diff + uses) / self.samples_per_insert) - inserts
        return max(0, by_size, by_ratio)

    def may_sample(self, batch: int, *, inserts: int, uses: int) -> bool:
        """Whether a batch may be sampled."""
        return self.samples_per_insert * inserts - (uses + batch) >= self.min_diff

"""FetchInterrupted: a fetch that is given up, and started over with the newest version."""

from __future__ import annotations

from async_grpo.errors import WeightsError


class FetchInterrupted(WeightsError):
    """This version cannot be had (any more): replaced by a newer one, or nobody answers. Never leaves the receiver."""

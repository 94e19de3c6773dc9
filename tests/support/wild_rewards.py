"""Rewards that a live run is tested with: one that misbehaves, what it does drawn from the completion so that every
kind comes up, and one that only differs within a group, so that there is a gradient."""

from __future__ import annotations

import zlib

from tests.support.tricky_rewards import tricky

DEEDS = ("hang", "raise", "eat memory", "print 100 MB")
ONE_IN = 24
"""Completions for one of each deed."""


def wild(completion: str, answer: str) -> object:
    """One of the deeds for a few completions; else a coin."""
    deed = zlib.crc32(completion.encode()) % ONE_IN
    if len(completion) > 1 and deed < len(DEEDS):
        return tricky(DEEDS[deed], answer, metadata={})
    return coin(completion, answer)


def coin(completion: str, answer: str) -> float:
    """0 or 1, by the completion alone."""
    return float(zlib.crc32(completion.encode()) // ONE_IN % 2)

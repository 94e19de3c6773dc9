"""A reward that misbehaves in a live run: what it does is drawn from the completion, so that every kind comes up."""

from __future__ import annotations

import zlib

from tests.support.tricky_rewards import tricky

DEEDS = ("hang", "raise", "eat memory", "print 100 MB")
ONE_IN = 24
"""Completions for one of each deed."""


def wild(completion: str, answer: str) -> object:
    """One of the deeds for a few completions; else a score that differs within a group, so that there is a gradient."""
    drawn = zlib.crc32(completion.encode())
    deed = drawn % ONE_IN
    if len(completion) > 1 and deed < len(DEEDS):
        return tricky(DEEDS[deed], answer, metadata={})
    return float(drawn // ONE_IN % 2)

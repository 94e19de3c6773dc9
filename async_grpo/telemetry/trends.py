"""Series of numbers made readable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over at most `window` values: point i uses nothing after i."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` bars from lowest to highest; longer series are averaged in equal pieces.

    >>> sparkline([0, 1, 2, 3], 8)
    '▁▃▆█'
    """
    if not values:
        return ""
    pieces = _pieces(values, min(width, len(values)))
    low, high = min(pieces), max(pieces)
    if high == low:
        return _BARS[0] * len(pieces)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in pieces)


def _pieces(values: Sequence[float], count: int) -> list[float]:
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]

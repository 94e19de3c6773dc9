"""How sizes are written."""

from __future__ import annotations

GIB = 1 << 30


def gib(size_bytes: float) -> str:
    """
    >>> gib(3 * 2**30)
    '3.0'
    """
    return f"{size_bytes / GIB:.1f}"

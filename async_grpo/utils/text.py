"""Text for people: model output made safe for terminals and Markdown, sizes, and series of numbers on one line."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from itertools import accumulate, pairwise

GIB = 1 << 30
_BARS = "▁▂▃▄▅▆▇█"
_KEPT = "\n\t"
_UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Control, format (direction overrides), surrogate, private-use and unassigned characters; line separators."""


def escape_controls(text: str, limit: int | None = None) -> str:
    r"""Return the text on one line, with unsafe characters as escapes. Text longer than `limit` is cut, with a note.

    >>> print(escape_controls("a\x1b[2Jb\nc"))
    a\x1b[2Jb\nc
    """
    shown = "".join(map(_spelled, text if limit is None else text[:limit]))
    if limit is not None and len(text) > limit:
        return f"{shown} [... {len(text) - limit:,} more characters]"
    return shown


def _spelled(character: str) -> str:
    if unicodedata.category(character) not in _INVISIBLE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode()


def short_digest(text: str) -> str:
    """Return eight hexadecimal digits of the SHA-256 of a text, to distinguish names that are cut or spelled alike.

    >>> short_digest("quickstart")
    'ed4f0b24'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def gib(size_bytes: float) -> str:
    """Format a size in GiB with one decimal.

    >>> gib(3 * 2**30)
    '3.0'
    """
    return f"{size_bytes / GIB:.1f}"


def figure(value: float | None, form: str) -> str:
    """Return the value in the format `form`; "-" for None."""
    return "-" if value is None else format(value, form)


def clean_text(text: str) -> str:
    """Remove control, direction-override, surrogate and private-use characters, except newline and tab."""
    return "".join(c for c in text if c in _KEPT or unicodedata.category(c) not in _UNSAFE_CATEGORIES)


def fenced(text: str, limit: int = 600) -> str:
    """Return the text as a code block that it cannot close: the fence is longer than any run of backticks in it."""
    text = clean_text(text)
    if len(text) > limit:
        text = f"{text[:limit]} [... {len(text) - limit} more characters]"
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and its neighbours, up to `window` // 2 on either side.

    Unlike a trailing mean, it does not lag.

    >>> smooth([1, 3, 8, 4, 5], 3)
    [2.0, 4.0, 5.0, 5.666666666666667, 4.5]
    """
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, at - window // 2), min(len(values), at + window // 2 + 1)) for at in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a series as at most `width` bars, scaled from its lowest to its highest value. Averages longer series.

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

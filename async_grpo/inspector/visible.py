"""Text that a model or a data set wrote, made harmless for a terminal: nothing in it is obeyed."""

from __future__ import annotations

import unicodedata

_UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Control, format (direction overrides), surrogate, private-use and unassigned characters; line separators."""


def visible(text: str, limit: int | None = None) -> str:
    r"""One line in which every unsafe character is spelled out; longer text is cut, and says so.

    >>> print(visible("a\x1b[2Jb\nc"))
    a\x1b[2Jb\nc
    """
    shown = "".join(map(_spelled, text if limit is None else text[:limit]))
    if limit is not None and len(text) > limit:
        return f"{shown} [... {len(text) - limit:,} more characters]"
    return shown


def _spelled(character: str) -> str:
    if unicodedata.category(character) not in _UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode()

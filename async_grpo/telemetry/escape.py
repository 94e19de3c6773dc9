"""Model output in a Markdown file: shown as it is, never interpreted."""

from __future__ import annotations

import re
import unicodedata

_UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_KEPT = "\n\t"


def clean_text(text: str) -> str:
    """Without control, bidirectional-override, surrogate and private-use characters (newline and tab stay)."""
    return "".join(c for c in text if c in _KEPT or unicodedata.category(c) not in _UNSAFE_CATEGORIES)


def fenced(text: str, limit: int = 600) -> str:
    """A code block that the text cannot close: its fence is longer than any run of backticks inside."""
    text = clean_text(text)
    if len(text) > limit:
        text = f"{text[:limit]} [... {len(text) - limit} more characters]"
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"

"""Turns token ids into text piece by piece, and finds stop texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 8
"""Most tokens that one character may be spread over; after that the bytes are not a character."""


class TextStream:
    """Decodes one completion. Text comes out once it cannot change any more, and never a part of a stop text."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._known: list[int] = []
        """The newest tokens whose text is out, as context: the text of a token depends on the one before."""
        self._fresh: list[int] = []
        self._held = ""
        self.is_stopped = False
        """True once a stop text came; no text follows."""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is now settled."""
        return "".join(self._checked(self._settled([token])) for token in tokens)

    def finish(self) -> str:
        """End the completion; returns the text that was held back."""
        rest = self._checked(self._new_text() if self._fresh else "")
        held, self._held = self._held, ""
        return rest if self.is_stopped else rest + held

    def _settled(self, tokens: Sequence[int]) -> str:
        self._fresh += tokens
        text = self._new_text()
        if text.endswith(_UNFINISHED) and len(self._fresh) < _LONGEST_CHARACTER:
            return ""
        if text:
            self._known = self._fresh
        self._fresh = []
        return text

    def _new_text(self) -> str:
        return self._decode([*self._known, *self._fresh])[len(self._decode(self._known)) :]

    def _checked(self, text: str) -> str:
        """The text up to a stop text, without what may be the beginning of one."""
        if self.is_stopped:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[-length:])), 0)

"""Decodes token ids incrementally, and detects stop texts.

Both delay text: bytes of an incomplete character are not text yet, and the end of the text may turn out to be the start
of a stop text.

    tokens --_decode_final--> text that no later token changes --_hold_back_stops--> text for the client
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
"""The decoder's output for bytes of an incomplete character."""
_MAX_CHARACTER_TOKENS = 8
"""Maximum tokens per character; more bytes than that are no character."""


class TextStream:
    """Decodes one completion. Returns text once it is final, and never a part of a stop text."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._context: list[int] = []
        """Newest tokens with final text: the text of a token depends on the one before."""
        self._pending: list[int] = []
        """Tokens without final text."""
        self._held_back = ""
        """End of the final text that may be the start of a stop text."""
        self.is_stopped = False
        """True after a stop text; no text follows."""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is now final."""
        return "".join(self._hold_back_stops(self._decode_final(token)) for token in tokens)

    def finish(self) -> str:
        """End the completion and return the remaining text."""
        text = self._hold_back_stops(self._decode_pending() if self._pending else "")
        if not self.is_stopped:
            text += self._held_back
        self._held_back = ""
        return text

    def _decode_final(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode_pending()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_CHARACTER_TOKENS:
            return ""
        if text:
            self._context = self._pending
        self._pending = []
        return text

    def _decode_pending(self) -> str:
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending])[len(before) :]

    def _hold_back_stops(self, text: str) -> str:
        """Return the text up to a stop text, without an end that may be the start of one."""
        if self.is_stopped:
            return ""
        text = self._held_back + text

        stop_positions = []
        for stop in self._stops:
            position = text.find(stop)
            if position >= 0:
                stop_positions.append(position)
        if stop_positions:
            self.is_stopped = True
            self._held_back = ""
            return text[: min(stop_positions)]

        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0

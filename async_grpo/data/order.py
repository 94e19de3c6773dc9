"""The order of a finite data set in an endless stream: every pass visits each row once, reshuffled."""

from __future__ import annotations

import random


class Passes:
    """Position in the stream -> row. Deterministic by seed; a pass is a permutation of the rows."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._pass = -1
        self._order = list(range(rows))

    def row(self, index: int) -> int:
        """The row at position `index` (>= 0)."""
        number, position = divmod(index, self._rows)
        if not self._shuffle:
            return position
        if number != self._pass:
            self._order = list(range(self._rows))
            random.Random(f"{self._seed}/pass/{number}").shuffle(self._order)
            self._pass = number
        return self._order[position]

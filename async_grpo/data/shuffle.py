"""The order of a finite data set in an endless stream: each pass visits every row once, reshuffled.

    index --> pass = index // N, position = index % N --> row = permutation(seed, pass)(position)

The row at an index is a pure function of (N, seed, index), in constant time and memory. So a run's only state is its
position in the stream: the buffer counts the tasks put into it, and the next server that feeds it continues there.

The permutation is a Feistel network over range(4^k), for the smallest 4^k >= N. It is applied repeatedly until the
result is below N: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). 4^k < 4 N for
N > 1, so this takes fewer than 4 applications on average.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

_ROUNDS = 8


class Permutation:
    """A permutation of range(size) that depends only on `key` and is never stored.

    >>> permutation = Permutation(10, "seed 1, pass 0")
    >>> sorted(permutation(position) for position in range(10)) == list(range(10))
    True
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        self._keys = struct.unpack(f"<{_ROUNDS}Q", hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest())

    def __call__(self, position: int) -> int:
        """Return the image of `position` in range(size). Raises IndexError for other positions."""
        if not 0 <= position < self._size:
            raise IndexError(f"position {position} is not in range({self._size})")
        value = self._mix(position)
        while value >= self._size:
            value = self._mix(value)
        return value

    def _mix(self, value: int) -> int:
        """A bijection of range(4 ** half_bits): each round is a bijection for any function of `right`."""
        left = value >> self._half_bits
        right = value & self._mask
        for key in self._keys:
            scrambled = xxhash.xxh3_64_intdigest(right.to_bytes(8, "little"), key)
            left, right = right, left ^ (scrambled & self._mask)
        return left << self._half_bits | right


class ShuffledPasses:
    """Maps positions in the stream to rows. Deterministic for a seed; each pass is a permutation of all rows."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._pass_number: int | None = None
        """Pass of the cached permutation."""
        self._permutation = Permutation(rows, "")

    def row_at(self, index: int) -> int:
        """Return the row at position `index` (>= 0) of the stream."""
        number, position = divmod(index, self._rows)
        if not self._shuffle:
            return position
        if number != self._pass_number:
            self._permutation = Permutation(self._rows, f"{self._seed}/pass/{number}")
            self._pass_number = number
        return self._permutation(position)

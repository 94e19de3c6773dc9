"""FollowedFiles: the growing files of a run, read in parts, and from the start when another run takes their folder.

    samples/*.jsonl   --+
    timeline/*.jsonl  --+-- FollowedFiles --lines--> a reader's columns
    metrics.jsonl     --+         |
                                  +-- are_replaced(): the reader drops its columns and creates FollowedFiles again

A run that is started with `--fresh`, or after `runs clean`, writes files with the same names. A reader that kept its
offsets would show the old run and skip the start of the new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from async_grpo.telemetry.jsonl import RowFollower

SLICE_BYTES = 1 << 20
"""Bytes read between two checks of the time budget."""

AddLines = Callable[[Path, int, list[bytes]], None]
"""Receives new lines: their file, the byte offset of the first one, and the lines, each with its line break."""


class FollowedFiles:
    """The files of a folder that match a pattern; files that appear later are followed too. Not thread-safe."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder = folder
        self._pattern = pattern
        self._followers: dict[Path, RowFollower] = {}

    def are_replaced(self) -> bool:
        """True if one of the files is no longer the one that was read."""
        return any(follower.is_replaced() for follower in self._followers.values())

    def read_lines(self, add: AddLines, until: float) -> float:
        """Pass new lines to `add` until `time.monotonic()` reaches `until`; at least one slice per call.

        Returns the share of all bytes that has been read; 1 means that nothing is left.
        """
        for path in sorted(self._folder.glob(self._pattern)):
            self._followers.setdefault(path, RowFollower(path))
        for path, follower in self._followers.items():
            offset = follower.read_bytes
            while True:
                lines = follower.read_new_lines(SLICE_BYTES)
                if not lines:
                    break
                add(path, offset, lines)
                offset = follower.read_bytes
                if time.monotonic() > until:
                    return self._share_read()
        return 1.0

    def _share_read(self) -> float:
        followers = self._followers.values()
        unread = sum(max(0, follower.unread_bytes()) for follower in followers)
        read = sum(follower.read_bytes for follower in followers)
        return read / (read + unread)

"""Requests and acknowledgements of a worker, a JSON line each, written before the worker continues.

A line is one write(2). Written data survives when the process is killed. No machine fails here, so nothing needs to be
synced.
"""

from __future__ import annotations

import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from async_grpo.wire import Group, encode

TAIL_BYTES = 1 << 16


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request (`what` ends with "?") or an acknowledgement. Times are those of the machine's monotonic clock."""

    what: str
    at_s: float
    seq: int = -1
    attempt: int = 0
    digest: str = ""
    reason: str = ""
    oldest: int = 0
    """Version of the oldest token of a group."""
    epoch: int = 0
    version: int = 0
    replayed: bool = False
    seqs: list[int] = []
    digests: list[str] = []
    ages: list[int] = []
    active: int = 0
    counters: list[int] = []
    inconsistencies: list[str] = []


class Journal:
    """An append-only file, one per process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: str, **facts: Any) -> None:
        """Write an entry. Once this returns, the entry survives the process."""
        line = msgspec.json.encode(Entry(what=what, at_s=time.monotonic(), **facts)) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError("the disk is full: an incomplete journal proves nothing")


def read_entries(folder: Path) -> list[Entry]:
    """Return the entries of all journals by time, without incomplete last lines."""
    lines = [line for path in folder.iterdir() for line in path.read_bytes().split(b"\n")[:-1]]
    return sorted((msgspec.json.decode(line, type=Entry) for line in lines), key=lambda entry: entry.at_s)


def is_waiting_for_reply(path: Path) -> bool:
    """True if the newest entry is a request."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    return len(lines) > 1 and msgspec.json.decode(lines[-2], type=Entry).what.endswith("?")


def digest_group(group: Group) -> str:
    """Return a digest of all bytes of a group."""
    return blake2b(encode(group), digest_size=12).hexdigest()

"""What a worker was about to ask, and what was acknowledged: a JSON line each, written before it goes on.

A line is one write(2), and what a process has written stays when it is killed; no machine dies here, so
nothing needs to be synced.
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
    """`what` ends with "?" where an answer is still to come. Times are the machine's monotonic clock."""

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
    complaints: list[str] = []


class Journal:
    """Append-only; one a process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: str, **facts: Any) -> None:
        """Write an entry; on return it will survive this process."""
        line = msgspec.json.encode(Entry(what=what, at_s=time.monotonic(), **facts)) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError("the disk is full: a journal that lacks a line proves nothing")


def entries(folder: Path) -> list[Entry]:
    """Of all journals, by time. A last line that its process could not finish is no entry."""
    lines = [line for path in folder.iterdir() for line in path.read_bytes().split(b"\n")[:-1]]
    return sorted((msgspec.json.decode(line, type=Entry) for line in lines), key=lambda entry: entry.at_s)


def in_a_call(path: Path) -> bool:
    """Whether the newest line says that an answer is awaited."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    return len(lines) > 1 and msgspec.json.decode(lines[-2], type=Entry).what.endswith("?")


def digest(group: Group) -> str:
    """Two groups with the same digest are the same, byte by byte."""
    return blake2b(encode(group), digest_size=12).hexdigest()

"""The Lua scripts in lua/: one a transition, called by digest, loaded where the server does not know them.

The second line of a script may name the parts, in lua/parts/, that are put before it, in this order: a server makes
all functions of a script anew at every call, so each gets those that it needs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

AFTER = "-- After: "


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the SHA-1 under which a server knows it once it is loaded."""

    name: str
    source: str
    digest: str

    @property
    def only_reads(self) -> bool:
        """Whether there is nothing that a replica could miss."""
        return "no-writes" in self.source.split("\n", 1)[0]


@cache
def script(name: str) -> Script:
    """`lua/<name>.lua`, its parts put between its flags (the first line) and its body."""
    flags, body = _read(name).split("\n", 1)
    first = body.split("\n", 1)[0]
    parts = first.removeprefix(AFTER).split() if first.startswith(AFTER) else []
    source = "\n".join([flags, *(_read(f"parts/{part}") for part in parts), body])
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return (files("buffer.redis") / "lua" / f"{name}.lua").read_text()

"""Names of lease holders: a server's name and its life.

    rollout-0/1764000000000      the server rollout-0, started at this Unix time in milliseconds

The life distinguishes the leases of a dead server from those of its replacement of the same name. Lives of one name are
ordered: a later start has a larger number.
"""

from __future__ import annotations


def holder_name(name: str, life: int) -> str:
    """Return the holder name of a server in this life."""
    return f"{name}/{life}"


def is_life_of(holder: str | None, name: str, *, upto: int) -> bool:
    """True if the holder is the server `name` in a life up to `upto`. Never true of a holder without a life."""
    if holder is None:
        return False
    server, _, life = holder.rpartition("/")
    return server == name and life.isdecimal() and int(life) <= upto

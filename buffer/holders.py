"""Names of lease holders: a server's name and its life, which tells the leases of a dead server from those of the one
that was started in its place.

    rollout-0/1764000000000      the server rollout-0, started at this Unix time in milliseconds

Lives of one name are ordered: a later start has a larger number.
"""

from __future__ import annotations


def holder_of(name: str, life: int) -> str:
    """The holder of the leases that a server takes in this life."""
    return f"{name}/{life}"


def is_life_of(holder: str, name: str, *, upto: int) -> bool:
    """True if the holder is the server `name` in a life up to `upto`. A holder without a life is never one."""
    server, _, life = holder.rpartition("/")
    return server == name and life.isdecimal() and int(life) <= upto

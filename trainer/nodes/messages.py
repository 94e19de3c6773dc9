"""What the nodes of a trainer tell each other. A frame is its length (4 bytes, big-endian) and one record.

node R --Hello--> node 0      --Refused, Busy, Look, Start--> node R
       --Seen--->
both:  Beat, Stop, Stopped, Ended      and the connection itself, which ends when either process does
"""

from __future__ import annotations

import struct

from async_grpo.wire.records import Record

MAX_FRAME_BYTES = 1 << 20
LENGTH = struct.Struct(">I")


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """Node `rank` is there, and what it would train with."""

    id: str
    rank: int
    config: str
    """The resolved configuration, as YAML."""
    model: str
    """Fingerprint of the folder of the first policy."""


class Refused(Record, frozen=True, kw_only=True, tag="refused"):
    """There will be no training with this node as it is."""

    reason: str


class Busy(Record, frozen=True, kw_only=True, tag="busy"):
    """The nodes have met without this one, or with an earlier life of it: ask again."""


class Look(Record, frozen=True, kw_only=True, tag="look"):
    """There is a file of this name in the folder of the checkpoints."""

    name: str


class Seen(Record, frozen=True, kw_only=True, tag="seen"):
    """Whether it is there here, too; and the name of a file that this node has put beside it."""

    found: bool
    folder: str
    name: str


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """All nodes are there and agree: start the ranks."""


class Beat(Record, frozen=True, kw_only=True, tag="beat"):
    """Still there."""


class Stop(Record, frozen=True, kw_only=True, tag="stop"):
    """Somebody wants the trainer to stop (SIGTERM to the node that says so); rank 0 decides when."""


class Stopped(Record, frozen=True, kw_only=True, tag="stopped"):
    """SIGTERM has ended a rank before it had joined the run: there is nothing to save, and no rank will lead the others
    to an end. The last word of a node, like `Ended`."""


class Ended(Record, frozen=True, kw_only=True, tag="ended"):
    """The ranks of this node have ended; "" is as they should."""

    reason: str


Message = Hello | Refused | Busy | Look | Seen | Start | Beat | Stop | Stopped | Ended

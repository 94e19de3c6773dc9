"""What the bench tells its worker processes, and what they answer: one JSON line each.

    bench --Job--> worker: connects, prepares --READY--> bench --GO--> worker: works --Done--> bench

The clock is the machine's monotonic one, which all its processes share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

READY, GO = b"ready\n", b"go\n"
WAIT_S = 120.0
"""For whatever a worker waits for: a bench that takes longer is broken."""

System = Literal["buffer", "plain"]
Role = Literal["producer", "consumer"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of one loop over `groups` groups of the run `run`."""

    url: str
    run: str
    system: System
    role: Role
    worker: int
    """Producers count from 0; each makes its own groups."""
    groups: int
    max_staleness: int
    groups_per_step: int
    horizon: int
    interval_s: float = 0.0
    """Between two groups of a paced producer; 0: as fast as it can."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """`latencies_s`: of every group, from just before its insert until the consumer had it decoded."""

    started_s: float = 0.0
    ended_s: float = 0.0
    latencies_s: list[float] = []
    error: str = ""

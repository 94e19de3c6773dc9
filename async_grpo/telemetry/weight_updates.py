"""The seconds of weight updates, from the timelines of the rollout servers.

    manifest --transfer_s--> everything received ... [ stop --load_s--> resume ]
                                                      <------ pause_s ------->

A transfer stops nobody. The pause stops the engine, and loading is the part of it in which weights are copied.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from async_grpo.telemetry.rows import Facts, Row, numbers

UPDATE_TRACK = "weights"
"""Track of a server's timeline with one span for each update."""
UPDATE_PARTS = ("transfer_s", "pause_s", "load_s")


def update_seconds(rows: Iterable[Row]) -> Facts:
    """Number of updates in these rows of timelines, and the median of each part; None if no row states it."""
    updates = [row.get("args") or {} for row in rows if row.get("track") == UPDATE_TRACK]
    facts: Facts = {"updates": len(updates)}
    for part in UPDATE_PARTS:
        seconds = numbers(updates, part)
        facts[part] = statistics.median(seconds) if seconds else None
    return facts

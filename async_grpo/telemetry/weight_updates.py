"""Duration of weight updates, from the timelines of the rollout servers.

    manifest --transfer_s--> everything received ... [ stop --load_s--> resume ]
                                                      <------ pause_s ------->

Generation continues during a transfer. The engine stops for the pause; loading is the part of the pause in which
weights are copied.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from async_grpo.telemetry.rows import Facts, Row, numbers

UPDATE_TRACK = "weights"
"""Track of a server's timeline with one span per update."""
UPDATE_PARTS = ("transfer_s", "pause_s", "load_s")


def update_seconds(rows: Iterable[Row]) -> Facts:
    """Return the number of updates in these timeline rows, and the median of each part; None for parts without
    values."""
    updates = [row.get("args") or {} for row in rows if row.get("track") == UPDATE_TRACK]
    facts: Facts = {"updates": len(updates)}
    for part in UPDATE_PARTS:
        seconds = numbers(updates, part)
        facts[part] = statistics.median(seconds) if seconds else None
    return facts

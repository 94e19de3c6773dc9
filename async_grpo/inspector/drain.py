"""Bringing a live run to rest: nothing new is admitted, and what is in flight comes to its end.

    stop admission --> look twice a second --> nothing INFLIGHT

An INFLIGHT group ends when its server inserts or discards it. If the server dies, its lease expires,
and the next server that asks goes on with it: that is no admission, so it goes on while admission is
stopped. Only if no server is left at all do groups stay INFLIGHT, and the wait ends by its timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from async_grpo.errors import WaitTimeout
from buffer.inspect import Inspector, Overview

LOOK_EVERY_S = 0.5


async def wait_until_drained(inspector: Inspector, timeout_s: float, show: Callable[[Overview], None]) -> Overview:
    """The first look at which nothing is INFLIGHT; every look is shown. Raises WaitTimeout, which says what
    is left and why."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        overview = await inspector.overview()
        show(overview)
        if overview.stats.inflight == 0:
            return overview
        left_s = deadline - loop.time()
        if left_s <= 0:
            raise _still_in_flight(overview, timeout_s)
        await asyncio.sleep(min(LOOK_EVERY_S, left_s))


def _still_in_flight(overview: Overview, timeout_s: float) -> WaitTimeout:
    held, unheld = overview.held, overview.expired + overview.given_back
    waited_for = f"the {overview.stats.inflight} groups in flight ({held} held by a server, {unheld} by nobody)"
    fix = "Admission stays stopped: wait again with a longer --timeout, or undo it with --resume"
    if unheld:
        fix = f"Nobody goes on with those {unheld}: start a rollout server. {fix}"
    return WaitTimeout(waited_for, timeout_s, fix)

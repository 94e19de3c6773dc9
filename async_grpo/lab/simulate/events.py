"""Simulated time: the actions to come, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class EventLoop:
    """Actions at points of simulated time. Those of the same moment run in the order in which they were scheduled.

    A `recurring` action reschedules itself, such as a look at the load, or follows from one that does. A run of which
    only recurring actions are left may have stalled.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action, bool]] = []
        self._recurring = 0
        """Number of recurring actions to come."""
        self._numbers = count()

    def call_at(self, time_s: float, action: Action) -> None:
        """Run the action at that time, or now if it has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), action, False))

    def call_later(self, delay_s: float, action: Action, *, recurring: bool = False) -> None:
        """Run the action after `delay_s` seconds."""
        self._recurring += recurring
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action, recurring))

    def run(self, until: Callable[[], bool], *, is_stalled: Callable[[], bool]) -> bool:
        """Run one action after another until `until()` is true. False if no action is left before that, or only
        recurring ones are and `is_stalled()` is true."""
        events, pop = self._events, heapq.heappop
        while not until():
            if len(events) == self._recurring and (not events or is_stalled()):
                return False
            self.now_s, _, action, recurring = pop(events)
            self._recurring -= recurring
            action()
        return True

"""Simulated time: what happens next, and a clock that jumps there."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class EventQueue:
    """Actions at points of simulated time, in order; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Action) -> None:
        """Do it then, or now if that has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do it that many seconds from now."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, until: Callable[[], bool]) -> bool:
        """Do what is due, one after another, until `until()` is true. False if nothing was left to happen before."""
        events, pop = self._events, heapq.heappop
        while not until():
            if not events:
                return False
            self.now_s, _, action = pop(events)
            action()
        return True

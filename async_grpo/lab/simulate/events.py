"""Simulated time: the actions to come, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class EventLoop:
    """Actions at points of simulated time. Those of the same moment run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def call_at(self, time_s: float, action: Action) -> None:
        """Run the action at that time, or now if it has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), action))

    def call_later(self, delay_s: float, action: Action) -> None:
        """Run the action after `delay_s` seconds."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, until: Callable[[], bool]) -> bool:
        """Run one action after another until `until()` is true. False if no action is left before that."""
        events, pop = self._events, heapq.heappop
        while not until():
            if not events:
                return False
            self.now_s, _, action = pop(events)
            action()
        return True

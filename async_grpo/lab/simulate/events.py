"""Simulated time: a queue of scheduled actions, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class EventLoop:
    """Actions scheduled in simulated time. Actions of the same moment run in the order of scheduling.

    A `background` action reschedules itself, such as a periodic load check, or follows from one that does. There is
    always a next one, so a run in which only background actions are left may have stalled.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action, bool]] = []
        """Heap of time, sequence number, action and background. The number keeps the order within a moment."""
        self._numbers = count()
        self._scheduled_background = 0

    def call_at(self, time_s: float, action: Action) -> None:
        """Run the action at that time, or now if it has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), action, False))

    def call_later(self, delay_s: float, action: Action, *, background: bool = False) -> None:
        """Run the action after `delay_s` seconds."""
        if background:
            self._scheduled_background += 1
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action, background))

    def run(self, until: Callable[[], bool], *, is_stalled: Callable[[], bool]) -> bool:
        """Run actions until `until()` is true. Returns False if it never will be: no action is left, or only background
        ones are and `is_stalled()` is true."""
        # Local names: this loop runs some 100,000 times per simulation.
        events = self._events
        pop = heapq.heappop

        while not until():
            if len(events) == self._scheduled_background and (not events or is_stalled()):
                return False
            self.now_s, _, action, background = pop(events)
            if background:
                self._scheduled_background -= 1
            action()
        return True

"""Work beside the training: one job on one thread, whose failure is kept until somebody asks.

The thread makes no collective calls, so it cannot get in the way of those of the step. It is a
daemon: a trainer that ends with an error does not stay for a file that is half written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum


class State(IntEnum):
    """How far a job is."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


class Job:
    """Runs `work` at once, on a thread named `name`."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        """Does not wait."""
        if self._thread.is_alive():
            return State.RUNNING
        return State.DONE if self._failure is None else State.FAILED

    @property
    def failure(self) -> str:
        """Why it failed; "" if it did not (yet)."""
        return f"{type(self._failure).__name__}: {self._failure}" if self._failure is not None else ""

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or the time is over."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # kept, and raised by whoever settles the job: torch's are no Exceptions
            self._failure = error

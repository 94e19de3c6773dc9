"""How long a process waited for a processor that it could have used.

    /proc/PID/task/TID/schedstat   seconds on a processor, seconds ready to run without one, since the thread's begin

A thread that computes is in one of these two states, one that waits for data in neither. So of the threads that wanted
a processor most, the longest wait is the time that others took: another process on the same cores, too many threads, or
a container's CPU limit. Linux only; elsewhere nothing is known and nothing is said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from async_grpo.utils.process_tree import descendants, parents

NEARLY = 0.9
"""Threads that wanted a processor for so large a share of the longest time count as those that wanted it most."""

ThreadTimes = dict[tuple[int, int], tuple[float, float]]
"""(process, thread) -> seconds on a processor, and seconds ready to run without one."""


def thread_times(processes: Iterable[int]) -> ThreadTimes:
    """The times of all threads of these processes. What has ended, or has no schedstat, is left out."""
    return {
        (process, thread): (ran_ns / 1e9, waited_ns / 1e9)
        for process in processes
        for thread in _threads(process)
        for ran_ns, waited_ns in _schedstat(f"/proc/{process}/task/{thread}/schedstat")
    }


def own_tree() -> list[int]:
    """This process and all that descend from it."""
    return [os.getpid(), *descendants(os.getpid(), parents())]


def longest_wait(before: ThreadTimes, now: ThreadTimes) -> float:
    """Seconds between the two looks for which a busy thread was ready and had no processor.

    >>> longest_wait({(1, 1): (0.0, 0.0)}, {(1, 1): (3.0, 1.0), (1, 2): (0.1, 0.5)})
    1.0
    """
    rows = [
        (ran - before.get(key, (0.0, 0.0))[0], wait - before.get(key, (0.0, 0.0))[1])
        for key, (ran, wait) in now.items()
    ]
    wanted = max((ran + waited for ran, waited in rows), default=0.0)
    return max((waited for ran, waited in rows if ran + waited >= NEARLY * wanted), default=0.0)


@dataclass(frozen=True, slots=True)
class Contention:
    """A stretch of time (Unix seconds), and the seconds of it that were spent waiting for a processor."""

    began_s: float
    ended_s: float
    waited_s: float

    @property
    def share(self) -> float:
        """Of the time, the part spent waiting."""
        return self.waited_s / (self.ended_s - self.began_s) if self.ended_s > self.began_s else 0.0


class ContentionWatch:
    """Measures from one look to the next. `processes` names those that count (default: this one alone)."""

    def __init__(self, processes: Callable[[], Iterable[int]] = lambda: (os.getpid(),)) -> None:
        self._processes = processes
        self._times = thread_times(processes())
        self._at_s = time.time()

    def look(self) -> Contention:
        """What happened since the last look."""
        times, began_s = thread_times(self._processes()), self._at_s
        before, self._times, self._at_s = self._times, times, time.time()
        seconds = max(0.0, self._at_s - began_s)
        return Contention(began_s, self._at_s, min(seconds, longest_wait(before, times)))


def _threads(process: int) -> list[int]:
    try:
        with os.scandir(f"/proc/{process}/task") as entries:
            return [int(entry.name) for entry in entries]
    except OSError:
        return []


def _schedstat(path: str) -> Iterator[tuple[int, int]]:
    """Nanoseconds on a processor and without one, if the kernel says so. Does not use pathlib, which would take most of
    the time."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        ran, waited, *_ = os.read(descriptor, 128).split()
        yield int(ran), int(waited)
    except (OSError, ValueError):
        return
    finally:
        os.close(descriptor)

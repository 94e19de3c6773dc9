"""CPU contention: time in which a process was ready to run but had no processor.

    /proc/PID/task/TID/schedstat   seconds on a processor, seconds ready to run without one, since the thread started

A thread that computes is in one of these two states; a thread that waits for data is in neither. Among the busiest
threads, the longest wait is therefore the time lost to contention: to another process on the same cores, to too many
threads, or to a container's CPU limit. Linux only; other systems report no contention.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from async_grpo.utils.process_tree import descendants, parents

NEARLY = 0.9
"""A thread counts as busy if its running and waiting time is at least this fraction of the busiest thread's."""

ThreadTimes = dict[tuple[int, int], tuple[float, float]]
"""(process, thread) -> seconds on a processor, and seconds ready to run without one."""


def read_thread_times(processes: Iterable[int]) -> ThreadTimes:
    """Return the times of all threads of these processes. Threads that have ended or have no schedstat are omitted."""
    times: ThreadTimes = {}
    for process in processes:
        for thread in _list_threads(process):
            nanoseconds = _read_schedstat(f"/proc/{process}/task/{thread}/schedstat")
            if nanoseconds is not None:
                ran_ns, waited_ns = nanoseconds
                times[process, thread] = (ran_ns / 1e9, waited_ns / 1e9)
    return times


def own_process_tree() -> list[int]:
    """Return the PIDs of this process and all its descendants."""
    return [os.getpid(), *descendants(os.getpid(), parents())]


def longest_wait(before: ThreadTimes, now: ThreadTimes) -> float:
    """Return the longest time, in seconds between the two samples, for which a busy thread had no processor.

    >>> longest_wait({(1, 1): (0.0, 0.0)}, {(1, 1): (3.0, 1.0), (1, 2): (0.1, 0.5)})
    1.0
    """
    differences = []
    for key, (ran_s, waited_s) in now.items():
        ran_before_s, waited_before_s = before.get(key, (0.0, 0.0))
        differences.append((ran_s - ran_before_s, waited_s - waited_before_s))
    busiest_s = max((ran_s + waited_s for ran_s, waited_s in differences), default=0.0)
    busy_waits = [waited_s for ran_s, waited_s in differences if ran_s + waited_s >= NEARLY * busiest_s]
    return max(busy_waits, default=0.0)


@dataclass(frozen=True, slots=True)
class Contention:
    """A time interval (Unix seconds) and the seconds of it that were spent waiting for a processor."""

    start_s: float
    end_s: float
    wait_s: float

    @property
    def share(self) -> float:
        """Fraction of the interval that was spent waiting."""
        if self.end_s <= self.start_s:
            return 0.0
        return self.wait_s / (self.end_s - self.start_s)


class ContentionWatch:
    """Measures contention between successive calls. `processes` returns the PIDs to watch; by default this process."""

    def __init__(self, processes: Callable[[], Iterable[int]] = lambda: (os.getpid(),)) -> None:
        self._processes = processes
        self._times = read_thread_times(processes())
        self._measured_s = time.time()

    def measure(self) -> Contention:
        """Return the contention since the last call, and start the next interval."""
        before = self._times
        start_s = self._measured_s
        self._times = read_thread_times(self._processes())
        self._measured_s = time.time()
        # A clock that is set back, and the time of reading itself, must not give a share below 0 or above 1.
        interval_s = max(0.0, self._measured_s - start_s)
        wait_s = min(interval_s, longest_wait(before, self._times))
        return Contention(start_s, self._measured_s, wait_s)


def _list_threads(process: int) -> list[int]:
    try:
        with os.scandir(f"/proc/{process}/task") as entries:
            return [int(entry.name) for entry in entries]
    except OSError:
        return []


def _read_schedstat(path: str) -> tuple[int, int] | None:
    """Return the nanoseconds on a processor and ready without one; None if the kernel does not report them."""
    # Not pathlib: with hundreds of threads, it would take most of the time.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        ran, waited, *_ = os.read(descriptor, 128).split()
        return int(ran), int(waited)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)

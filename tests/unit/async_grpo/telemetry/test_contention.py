"""How long a process waited for a processor: of its busy threads, the longest wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.telemetry.contention import ContentionWatch, longest_wait, own_process_tree, read_thread_times

NEEDS_SCHEDSTAT = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no times of its run queues"
)


def test_of_the_busy_threads_the_longest_wait_counts() -> None:
    before = {(1, 1): (10.0, 5.0), (1, 2): (10.0, 0.0), (1, 3): (0.0, 9.0)}
    now = {(1, 1): (10.6, 5.3), (1, 2): (10.5, 0.4), (1, 3): (0.1, 9.6)}
    assert longest_wait(before, now) == pytest.approx(0.4)  # 0.9 s wanted by two threads, 0.7 s by the third
    assert longest_wait({}, {}) == 0.0


def test_a_thread_that_began_since_counts_from_its_begin() -> None:
    assert longest_wait({(1, 1): (5.0, 5.0)}, {(1, 1): (5.0, 5.0), (1, 2): (1.0, 2.0)}) == 2.0


@NEEDS_SCHEDSTAT
def test_two_processes_on_one_core_wait_for_it_and_an_idle_one_does_not() -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\n"
    compute = f"{pinned}while True: pass"
    sleep = f"{pinned}input()"
    both = [subprocess.Popen([sys.executable, "-c", compute], stdout=subprocess.PIPE) for _ in range(2)]
    idle = subprocess.Popen([sys.executable, "-c", sleep], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        for process in (*both, idle):
            assert process.stdout is not None and process.stdout.readline()
        busy, quiet = ContentionWatch(lambda: [both[0].pid]), ContentionWatch(lambda: [idle.pid])

        def computed_s() -> float:
            return sum(sum(times) for times in read_thread_times([both[0].pid]).values())

        # The first two have computed since they started, which may be long before the watches were made.
        start_s = computed_s()
        while computed_s() < start_s + 0.4:
            pass  # so that all three have been on the run queue for some time slices
        assert busy.measure().share > 0.2
        assert quiet.measure().share < 0.1
        assert idle.pid in own_process_tree()
    finally:
        for process in (*both, idle):
            process.kill()
            process.communicate()


def test_a_process_that_is_gone_says_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert read_thread_times([ended.pid]) == {}

"""One part of the machine for each side, and what the two cost each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_grpo.errors import ConfigError
from async_grpo.launch.cores import pin

_SIBLINGS = "/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
_TIMED_S = 1.0


@dataclass(frozen=True, slots=True)
class Split:
    """Cores by side; () where this system pins no process to a core."""

    rollout: tuple[int, ...]
    trainer: tuple[int, ...]

    def as_config(self) -> dict[str, list[int]]:
        """`launch.cores`."""
        return {"rollout": list(self.rollout), "trainer": list(self.trainer)}


def split_cores(here: Sequence[int], each: int, sibling_of: Callable[[int], int] | None = None) -> Split:
    """`each` cores a side, of different physical cores as far as there are any. Raises ConfigError if they are too few.

    `sibling_of`: the first hardware thread of the physical core that a core belongs to.

    >>> split_cores([0, 1, 2, 3], 1, sibling_of=lambda core: core // 2 * 2)
    Split(rollout=(0,), trainer=(2,))
    """
    if not here:
        return Split((), ())
    if len(here) < 2 * each:
        raise ConfigError(
            f"--cores is {each} a side, which makes {2 * each}, and this process may use {len(here)}: the sides would "
            "take time from each other. Lower --cores, or measure on a larger machine"
        )
    ordered = _one_thread_each_first(here, sibling_of or first_sibling)
    return Split(tuple(ordered[:each]), tuple(ordered[each : 2 * each]))


def _one_thread_each_first(here: Sequence[int], first: Callable[[int], int]) -> list[int]:
    """A thread of every physical core, then the second threads, and so on; the first thread may be missing."""
    threads: dict[int, list[int]] = {}
    for core in sorted(here):
        threads.setdefault(first(core), []).append(core)
    return sorted(here, key=lambda core: (threads[first(core)].index(core), core))


def first_sibling(core: int) -> int:
    """As the kernel says; the core itself where it does not."""
    try:
        text = Path(_SIBLINGS.format(core=core)).read_text()
    except OSError:
        return core
    return int(text.replace("-", ",").split(",")[0])


def speed_beside(split: Split) -> float | None:
    """Speed of a core while the other side's computes too, to its speed alone: 1 where they share nothing. Takes two
    seconds; None without cores to pin to."""
    if not split.rollout:
        return None
    pair = [split.rollout[0], split.trainer[0]]
    with ThreadPoolExecutor(2) as threads:
        alone = [threads.submit(_speed, core).result() for core in pair]
        beside = list(threads.map(_speed, pair))
    return sum(beside) / sum(alone)


def _speed(core: int) -> float:
    """Rounds a second of arithmetic that fits into the core's own cache; numpy computes it without the GIL."""
    before = os.sched_getaffinity(0)
    pin((core,))
    try:
        values, rounds, started_s = np.linspace(0.0, 1.0, 32_768), 0, time.perf_counter()
        while time.perf_counter() - started_s < _TIMED_S / 2:
            np.exp(values, out=values)
            np.negative(values, out=values)
            rounds += 1
        return rounds / (time.perf_counter() - started_s)
    finally:
        pin(tuple(before))

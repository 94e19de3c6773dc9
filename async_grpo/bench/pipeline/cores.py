"""One part of the machine for each side, and what the two cost each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
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
    """`each` cores a side. The sides share no physical core if that can be helped, and a side uses as many as it can.

    Raises ConfigError if there are too few.

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
    physical = _physical_cores(here, sibling_of or first_sibling)
    near, far = physical[: len(physical) // 2], physical[(len(physical) + 1) // 2 :]  # an odd one out is nobody's half
    rollout = (_one_thread_each_first(near) + _one_thread_each_first(physical[len(near) :]))[:each]
    rest = _one_thread_each_first(far) + _one_thread_each_first(physical[: len(physical) - len(far)])
    trainer = [core for core in rest if core not in rollout][:each]
    return Split(tuple(sorted(rollout)), tuple(sorted(trainer)))


def _physical_cores(here: Sequence[int], first: Callable[[int], int]) -> list[list[int]]:
    """The hardware threads of each; its first thread may be missing."""
    threads: dict[int, list[int]] = {}
    for core in sorted(here):
        threads.setdefault(first(core), []).append(core)
    return list(threads.values())


def _one_thread_each_first(physical: Sequence[list[int]]) -> list[int]:
    """A thread of every physical core, then the second threads, and so on."""
    return [core for round_ in zip_longest(*physical) for core in round_ if core is not None]


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

"""Selection of the groups of the next batch, and of those too old for one. Pure.

All selectors look at ticket sequences, never at the order in which groups were finished.

    fifo, windowed_fifo   scan the open groups upwards; one in flight at sequence h ends the scan at h + W
    exact_age             as fifo; the take waits until the whole window is READY
    freshest              the P highest READY sequences
    uniform               P ranks among the READY sequences, drawn without replacement

A batch is delivered in ticket order, whatever the selector. lua/take_batch.lua has the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from async_grpo.staleness import ReplayPolicy, age
from async_grpo.wire import Group

_MODULUS, _MULTIPLIER = 2**31 - 1, 48271
"""The generator of Park and Miller ("minstd"). Its products are exact in the double-precision numbers of Lua."""
_STEP_STRIDE = 1_000_003
"""Distance between the seeds of two steps."""
_SKIPPED = 3
"""Numbers dropped at the start: the first ones of a small seed are small themselves."""


def select_groups(
    policy: ReplayPolicy, trainer_version: int, open_groups: Sequence[tuple[int, bool]], size: int
) -> list[int]:
    """Return `size` groups for the batch, or as many as may be taken now, in ticket order.

    `open_groups`: (sequence, True if READY or False if in flight), sorted by sequence.
    """
    ready = [seq for seq, is_ready in open_groups if is_ready]
    match policy.selector:
        case "fifo" | "windowed_fifo" | "exact_age":
            chosen = list(_scan_in_order(open_groups, size, policy.selector_window))
        case "freshest":
            chosen = ready[-size:]
        case "uniform":
            chosen = _draw(ready, size, policy.seed, trainer_version)
    return sorted(chosen)


def too_old_to_train(policy: ReplayPolicy, trainer_version: int, group: Group) -> bool:
    """True if no batch from `trainer_version` on may contain the READY group."""
    match policy.on_stale:
        case "wait":
            return False
        case "drop":
            version = group.oldest_version
        case "mask":
            version = group.newest_version
    return age(trainer_version, version) > policy.window.max_staleness


def too_old_to_finish(policy: ReplayPolicy, version: int, start_version: int) -> bool:
    """True if a group in flight, whose oldest token is of `start_version`, could only be dropped once finished."""
    return policy.on_stale == "drop" and age(version, start_version) > policy.window.max_staleness


def _scan_in_order(open_groups: Sequence[tuple[int, bool]], size: int, selector_window: int) -> Iterator[int]:
    """Yield up to `size` READY sequences, of which those behind an unfinished group lie within the window."""
    first_in_flight: int | None = None
    for seq, is_ready in open_groups:
        if size == 0 or (first_in_flight is not None and seq >= first_in_flight + selector_window):
            return
        if is_ready:
            size -= 1
            yield seq
        elif first_in_flight is None:
            first_in_flight = seq


def _draw(ready: list[int], size: int, seed: int, trainer_version: int) -> list[int]:
    remaining = list(ready)
    numbers = _random_numbers(seed, trainer_version)
    chosen = []
    for _ in range(min(size, len(remaining))):
        chosen.append(remaining.pop(next(numbers) % len(remaining)))
    return chosen


def _random_numbers(seed: int, trainer_version: int) -> Iterator[int]:
    """Random integers, the same at every repetition of a step."""
    state = (seed % _MODULUS + trainer_version * _STEP_STRIDE) % _MODULUS or 1
    for _ in range(_SKIPPED):
        state = state * _MULTIPLIER % _MODULUS
    while True:
        state = state * _MULTIPLIER % _MODULUS
        yield state

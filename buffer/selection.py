"""Which groups make the next batch, and which are too old for one: decided from facts alone.

All selectors look at ticket sequences, never at the order in which groups were finished.

    fifo, windowed_fifo   walk the open groups upwards; one in flight at sequence h ends the walk at h + W
    exact_age             as fifo; the take waits until the whole window is READY
    freshest              the P highest READY sequences
    uniform               P ranks among the READY sequences, drawn without replacement

A batch is delivered in ticket order, whatever the selector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from async_grpo.staleness import ReplayPolicy, age
from async_grpo.wire import Group

_MODULUS, _MULTIPLIER, _STRIDE, _SKIPPED = 2**31 - 1, 48271, 1_000_003, 3
"""The generator of Park and Miller ("minstd"): its products are exact in a script's double numbers."""


def select(policy: ReplayPolicy, trainer_version: int, open_groups: Sequence[tuple[int, bool]], size: int) -> list[int]:
    """`size` groups for the batch, or as many as may be taken now; in ticket order.

    `open_groups`: (sequence, whether it is READY; else it is in flight), by sequence.
    """
    ready = [seq for seq, is_ready in open_groups if is_ready]
    match policy.selector:
        case "fifo" | "windowed_fifo" | "exact_age":
            chosen = list(_walk(open_groups, size, policy.selector_window))
        case "freshest":
            chosen = ready[-size:]
        case "uniform":
            chosen = _draw(ready, size, policy.seed, trainer_version)
    return sorted(chosen)


def too_old_to_train(policy: ReplayPolicy, trainer_version: int, group: Group) -> bool:
    """Whether no batch from `trainer_version` on may contain the READY group."""
    match policy.on_stale:
        case "wait":
            return False
        case "drop":
            version = group.oldest_version
        case "mask":
            version = group.newest_version
    return age(trainer_version, version) > policy.window.max_staleness


def too_old_to_finish(policy: ReplayPolicy, version: int, begun_version: int) -> bool:
    """Whether a group in flight, whose oldest token is of `begun_version`, could no longer be trained whole."""
    return policy.on_stale == "drop" and age(version, begun_version) > policy.window.max_staleness


def _walk(open_groups: Sequence[tuple[int, bool]], size: int, selector_window: int) -> Iterator[int]:
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
    left, numbers = list(ready), _numbers(seed, trainer_version)
    return [left.pop(next(numbers) % len(left)) for _ in range(min(size, len(left)))]


def _numbers(seed: int, trainer_version: int) -> Iterator[int]:
    """Random integers, the same for the same step."""
    state = (seed % _MODULUS + trainer_version * _STRIDE) % _MODULUS or 1
    for _ in range(_SKIPPED):
        state = state * _MULTIPLIER % _MODULUS
    while True:
        state = state * _MULTIPLIER % _MODULUS
        yield state

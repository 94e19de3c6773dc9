"""Staleness arithmetic: how many groups may be admitted, how they are selected, how old they may get. Pure.

    ReplayPolicy = StalenessWindow + Selector + OnStale + RateLimit + max_uses

Symbols (the same in docs/staleness.md and in the Lua scripts):

    S         max_staleness            P    groups_per_step        v    published policy version
    W         selector_window          k    max_uses
    admitted  groups ever admitted     released  groups ever released     active = admitted - released

    admission:  active < (S + 1) * P        so that always       active <= (S + 1) * P
    age:        trainer version - version of the oldest token    <= S

Why the age is bounded when groups are trained in order of admission: let group s (counted from 0)
be admitted at version v, when `released = v*P + d`, d of them discarded untrained. Admission needs
s - (v*P + d) < (S+1)*P. It is trained at version v' only after v'*P others before it, and d of the
s groups before it never will be, so v'*P <= s - d < (v + S + 1)*P, that is v' - v <= S. No token of
the group is older than v, because a server starts it only with weights of version >= v.

`RateLimit` bounds how far sampling may run ahead of inserting, or fall behind it, with the arithmetic of Reverb's rate
limiter (arXiv 2102.04736, section 3.3). With I groups inserted, U uses (a group counts each time it is sampled),
R = samples_per_insert and the balance

    diff = R * I - U

an insert is allowed while  R * (I + 1) - U <= max_diff  or the table holds fewer than min_size groups, and a batch of P
may be sampled while  R * I - (U + P) >= min_diff  and the table holds at least min_size. The defaults limit nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

UNLIMITED = 1e15
"""A diff that is never reached. A Lua number holds it exactly."""

Selector = Literal["fifo", "windowed_fifo", "freshest", "uniform", "exact_age"]
SELECTORS: dict[Selector, str] = {
    "fifo": "in the order of their tickets, waiting for unfinished ones",
    "windowed_fifo": "up to window - 1 may overtake an unfinished one",
    "freshest": "the newest tickets first",
    "uniform": "any, with equal chance",
    "exact_age": "fifo once the whole window is finished, so that from step S on every token is exactly S steps old",
}
"""Which READY groups make the next batch, in words."""
WALKING: frozenset[Selector] = frozenset({"fifo", "windowed_fifo", "exact_age"})
"""Selectors that go through the groups in ticket order, so that a batch may come in parts and the age of what they
choose is bounded. The others choose a whole batch, and what grows too old meanwhile must be dropped or masked."""

OnStale = Literal["wait", "drop", "mask"]
"""What happens to tokens older than S when their batch is taken.

wait: nothing; the order of a walking selector bounds their age. drop: their group ends, READY ones as stale, unfinished
ones (with their partial) as expired. mask: they stay as context and get no gradient; a group that has only such tokens
ends as stale.
"""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Bounds on the balance of uses and inserts. While it `limits` the ratio, a full buffer makes room by evicting its
    oldest READY group, as a Reverb table does."""

    min_size: int = 0
    samples_per_insert: float = 1.0
    min_diff: float = -UNLIMITED
    max_diff: float = UNLIMITED

    @classmethod
    def ratio(cls, samples_per_insert: float, *, min_size: int, error_buffer: float) -> RateLimit:
        """Keep uses : inserts near `samples_per_insert`: within error_buffer uses of the balance at which the table has
        just reached min_size."""
        start = samples_per_insert * min_size
        return cls(min_size, samples_per_insert, start - error_buffer, start + error_buffer)

    @property
    def limits(self) -> bool:
        """Whether the ratio of uses to inserts is limited."""
        return self.max_diff < UNLIMITED

    def insertable(self, *, inserts: int, uses: int, size: int, needed_size: int) -> int:
        """Number of groups that may be inserted now, in addition to `inserts` that were inserted or are being made."""
        by_size = needed_size - size
        by_ratio = math.floor((self.max_diff + uses) / self.samples_per_insert) - inserts
        return max(0, by_size, by_ratio)

    def may_sample(self, batch: int, *, inserts: int, uses: int) -> bool:
        """Whether a batch may be sampled."""
        return self.samples_per_insert * inserts - (uses + batch) >= self.min_diff


@dataclass(frozen=True, slots=True)
class StalenessWindow:
    """S, P and the horizon: the number of groups that the whole run trains, with repetitions (steps * P).

    S bounds the age. `staleness` is the effective S, at most S: groups are admitted as if it were S. A group keeps the
    bound of its admission, so that the effective S may rise and fall while the run is live, and nothing is lost.
    """

    max_staleness: int
    groups_per_step: int
    horizon: int
    staleness: int | None = None
    """None: S itself."""

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness >= self.max_staleness:
            object.__setattr__(self, "staleness", None)

    @property
    def in_force(self) -> int:
        """Effective S: groups are admitted by it."""
        return self.max_staleness if self.staleness is None else self.staleness

    @property
    def capacity(self) -> int:
        """(effective S + 1) * P groups."""
        return (self.in_force + 1) * self.groups_per_step

    @property
    def largest(self) -> StalenessWindow:
        """The window with the largest effective S that the run may have."""
        return replace(self, staleness=None)


def age(trainer_version: int, oldest_version: int) -> int:
    """Age in optimizer steps of tokens sampled from `oldest_version` when trained at `trainer_version`.

    A trainer that replays steps after a crash may train tokens of a version that it has not reached again; their age
    is 0.
    """
    return max(0, trainer_version - oldest_version)


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """All settings of the buffer. Raises ValueError for a combination that would stall or have no effect."""

    window: StalenessWindow
    selector: Selector = "fifo"
    selector_window: int = 1
    on_stale: OnStale = "drop"
    rate: RateLimit = field(default_factory=RateLimit)
    max_uses: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for check in (self._check_selector, self._check_uses, self._check_rate):
            check()

    @property
    def age_bound(self) -> int:
        """No token that gets a gradient is older than this many optimizer steps.

        It is S if older tokens are dropped or masked. Under `wait` it follows from the order: when a group is admitted,
        at most (S+1)*P - 1 others are active, and at most W - 1 later ones overtake it. Each is trained at most k
        times, and the group itself at most k - 1 times before its last. That is at most ((S+1)*P + W - 1) * k - 1 uses,
        P in each step. With k = 1: S + ceil((W-1) / P).
        """
        if self.on_stale != "wait":
            return self.window.max_staleness
        most = (self.window.largest.capacity + self.selector_window - 1) * self.max_uses
        return (most - 1) // self.window.groups_per_step

    @property
    def walks(self) -> bool:
        """Whether the selector goes through the groups in ticket order, so that a batch may come in parts."""
        return self.selector in WALKING

    @property
    def min_ready(self) -> int:
        """READY groups with which a step may begin, while that many are left to train.

        exact_age waits for the whole window: then nothing is in flight when a version is published, each version
        generates the P groups that its predecessor's batch made room for, and they are trained S steps later.
        """
        return self.window.capacity if self.selector == "exact_age" else self.rate.min_size

    @property
    def size_to_take(self) -> int:
        """Number of READY groups that a take needs, while that many are left to train."""
        return max(self.min_ready, self.window.groups_per_step)

    @property
    def least_staleness(self) -> int:
        """The smallest effective S with room for a batch: (S + 1) * P >= max(W, min_size). exact_age and a limited
        ratio count on the whole window."""
        if self.selector == "exact_age" or self.rate.limits:
            return self.window.max_staleness
        return -(-max(1, self.selector_window, self.rate.min_size) // self.window.groups_per_step) - 1

    def with_staleness(self, in_force: int) -> ReplayPolicy:
        """The same with another effective S, kept between `least_staleness` and S."""
        bounded = max(self.least_staleness, min(in_force, self.window.max_staleness))
        return replace(self, window=replace(self.window, staleness=bounded))

    def mask_below(self, trainer_version: int) -> int:
        """Tokens of versions below this get no gradient at `trainer_version`; 0: all get one."""
        if self.on_stale != "mask":
            return 0
        return max(0, trainer_version - self.window.max_staleness)

    def _check_selector(self) -> None:
        capacity = self.window.capacity
        if self.selector != "windowed_fifo" and self.selector_window != 1:
            raise ValueError(
                f"selector.window ({self.selector_window}) is a dial of windowed_fifo, but the selector is "
                f"{self.selector}: it would have no effect. Remove it, or set selector.kind to windowed_fifo"
            )
        if not 1 <= self.selector_window <= capacity:
            raise ValueError(
                f"selector.window ({self.selector_window}) exceeds the capacity (S + 1) * P = {capacity}: there are "
                "never that many groups to choose from. Lower selector.window or raise max_staleness"
            )
        if self.selector == "exact_age" and (self.max_uses > 1 or self.rate != RateLimit()):
            raise ValueError(
                "selector exact_age gives every token the age S: with max_uses above 1 a group would be trained at "
                "several ages, and an admission rule would have no effect or break the order. Set max_uses to 1 and "
                "admission.kind to staleness_window"
            )
        if self.on_stale == "wait" and not self.walks:
            raise ValueError(
                f"on_stale wait with selector {self.selector}: groups that are overtaken again and again would grow "
                "old without bound and hold their slots for ever. Set on_stale to drop or mask"
            )

    def _check_uses(self) -> None:
        most = self.window.max_staleness + 1
        if self.on_stale != "wait" and self.max_uses > most:
            raise ValueError(
                f"max_uses ({self.max_uses}) cannot be reached: with on_stale {self.on_stale} a group is of use for "
                f"S + 1 = {most} steps. Lower max_uses or raise max_staleness"
            )

    def _check_rate(self) -> None:
        capacity, size = self.window.capacity, self.window.groups_per_step
        if self.rate.min_size > capacity:
            raise ValueError(
                f"admission.min_size ({self.rate.min_size}) exceeds the capacity (S + 1) * P = {capacity}: training "
                "would never start. Lower admission.min_size or raise max_staleness"
            )
        if self.rate.samples_per_insert > self.max_uses:
            raise ValueError(
                f"admission.samples_per_insert ({self.rate.samples_per_insert:g}) exceeds max_uses ({self.max_uses}): "
                "a group is not trained that often, and admission would wait for ever. "
                "Raise max_uses or lower admission.samples_per_insert"
            )
        slack = self.rate.max_diff - self.rate.min_diff
        need = size + self.rate.samples_per_insert
        if slack < need:
            raise ValueError(
                f"admission.error_buffer leaves max_diff - min_diff = {slack:g}, but a batch of P = {size} and one "
                f"insert of {self.rate.samples_per_insert:g} need {need:g}: neither side could move. "
                f"Set admission.error_buffer to at least {need / 2:g}"
            )

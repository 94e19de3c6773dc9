"""Staleness arithmetic: how many groups may be admitted, how batches are selected, how old tokens may get. Pure.

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
limiter (arXiv 2102.04736, section 3.3). With I groups inserted, U uses (a group counts each time that it is sampled),
R = samples_per_insert and the balance

    diff = R * I - U

an insert is allowed while  R * (I + 1) - U <= max_diff  or the table holds fewer than min_size groups, and a batch of P
may be sampled while  R * I - (U + P) >= min_diff  and the table holds at least min_size. The defaults limit nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

UNLIMITED = 1e15
"""A balance that is never reached. A Lua number represents it exactly."""

Selector = Literal["fifo", "windowed_fifo", "freshest", "uniform", "exact_age"]
SELECTORS: dict[Selector, str] = {
    "fifo": "in the order of their tickets, waiting for unfinished ones",
    "windowed_fifo": "up to window - 1 may overtake an unfinished one",
    "freshest": "the newest tickets first",
    "uniform": "any, with equal chance",
    "exact_age": "fifo once the whole window is finished, so that from step S on every token is exactly S steps old",
}
"""Selector -> description of the READY groups that it puts into the next batch."""
ORDERED_SELECTORS: frozenset[Selector] = frozenset({"fifo", "windowed_fifo", "exact_age"})
"""Selectors that take groups in ticket order.

A batch can then be taken in parts, and the order bounds the age of its groups. The other selectors choose a whole
batch, and groups that they pass over grow old without bound unless they are dropped or masked.
"""

OnStale = Literal["wait", "drop", "mask"]
"""Treatment of tokens older than S when their batch is taken.

wait: none; an ordered selector bounds their age. drop: their group ends, READY ones as stale, unfinished ones (with
their partial) as expired. mask: they stay as context and get no gradient; a group with only such tokens ends as stale.
"""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Bounds on the balance of uses and inserts.

    If it `limits` the ratio, a full buffer evicts its oldest READY group to make room, as a Reverb table does.
    """

    min_size: int = 0
    samples_per_insert: float = 1.0
    min_diff: float = -UNLIMITED
    max_diff: float = UNLIMITED

    @classmethod
    def from_ratio(cls, samples_per_insert: float, *, min_size: int, error_buffer: float) -> RateLimit:
        """Keep uses : inserts near `samples_per_insert`.

        The balance may deviate by `error_buffer` uses from its value when the table first reaches min_size.
        """
        start = samples_per_insert * min_size
        return cls(min_size, samples_per_insert, start - error_buffer, start + error_buffer)

    @property
    def limits(self) -> bool:
        """True if the ratio of uses to inserts is limited."""
        return self.max_diff < UNLIMITED

    def allowed_inserts(self, *, inserts: int, uses: int, size: int, needed_size: int) -> int:
        """Number of further groups that may be inserted; `inserts` includes the groups in flight."""
        by_size = needed_size - size
        by_ratio = math.floor((self.max_diff + uses) / self.samples_per_insert) - inserts
        return max(0, by_size, by_ratio)

    def allows_sample(self, batch: int, *, inserts: int, uses: int) -> bool:
        """True if a batch of `batch` groups may be sampled."""
        return self.samples_per_insert * inserts - (uses + batch) >= self.min_diff


@dataclass(frozen=True, slots=True)
class StalenessWindow:
    """S, P and the horizon: the number of groups that the whole run trains, repetitions included (steps * P).

    S bounds the age. `staleness` is the effective S, at most S: groups are admitted as if it were S. Each group keeps
    the bound of its admission, so the effective S may change while the run is live, and no group is lost.
    """

    max_staleness: int
    groups_per_step: int
    horizon: int
    staleness: int | None = None
    """Effective S; None: S itself."""

    def __post_init__(self) -> None:
        # One spelling per window, so that equal windows compare equal.
        if self.staleness is not None and self.staleness >= self.max_staleness:
            object.__setattr__(self, "staleness", None)

    @property
    def effective_staleness(self) -> int:
        """Effective S, which bounds admission."""
        return self.max_staleness if self.staleness is None else self.staleness

    @property
    def capacity(self) -> int:
        """Maximum number of active groups: (effective S + 1) * P."""
        return (self.effective_staleness + 1) * self.groups_per_step

    @property
    def at_max_staleness(self) -> StalenessWindow:
        """The same window with the largest effective S."""
        return replace(self, staleness=None)


def age(trainer_version: int, oldest_version: int) -> int:
    """Age in optimizer steps of tokens sampled from `oldest_version` when trained at `trainer_version`.

    A trainer that replays steps after a crash can train tokens of a version that it has not reached again. Their age
    is 0.
    """
    return max(0, trainer_version - oldest_version)


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """All settings of the buffer. Raises ValueError for settings that would stall the run or have no effect."""

    window: StalenessWindow
    selector: Selector = "fifo"
    selector_window: int = 1
    on_stale: OnStale = "drop"
    rate: RateLimit = field(default_factory=RateLimit)
    max_uses: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_selector()
        self._check_uses()
        self._check_rate()

    @property
    def age_bound(self) -> int:
        """Maximum age in optimizer steps of a token that gets a gradient.

        It is S if older tokens are dropped or masked. Under `wait` it follows from the order: when a group is admitted,
        at most (S+1)*P - 1 others are active, and at most W - 1 later ones overtake it. Each is trained at most k
        times, and the group itself at most k - 1 times before its last. That is at most ((S+1)*P + W - 1) * k - 1 uses,
        P in each step. With k = 1: S + ceil((W-1) / P).
        """
        if self.on_stale != "wait":
            return self.window.max_staleness
        total_uses = (self.window.at_max_staleness.capacity + self.selector_window - 1) * self.max_uses
        return (total_uses - 1) // self.window.groups_per_step

    @property
    def preserves_ticket_order(self) -> bool:
        """True if the selector takes groups in ticket order, so that a batch may be taken in parts."""
        return self.selector in ORDERED_SELECTORS

    @property
    def min_ready(self) -> int:
        """Number of READY groups required to start a step, while that many are left to train.

        exact_age waits for the whole window: then nothing is in flight when a version is published, each version
        generates the P groups that its predecessor's batch made room for, and they are trained S steps later.
        """
        return self.window.capacity if self.selector == "exact_age" else self.rate.min_size

    @property
    def ready_groups_needed(self) -> int:
        """Number of READY groups required to take a batch, while that many are left to train."""
        return max(self.min_ready, self.window.groups_per_step)

    @property
    def smallest_staleness(self) -> int:
        """Smallest effective S with room for a batch: (S + 1) * P >= max(W, min_size).

        exact_age and a limited ratio need the whole window.
        """
        if self.selector == "exact_age" or self.rate.limits:
            return self.window.max_staleness
        return -(-max(1, self.selector_window, self.rate.min_size) // self.window.groups_per_step) - 1

    def with_staleness(self, effective_staleness: int) -> ReplayPolicy:
        """The same policy with another effective S, bounded by `smallest_staleness` and S."""
        bounded = max(self.smallest_staleness, min(effective_staleness, self.window.max_staleness))
        return replace(self, window=replace(self.window, staleness=bounded))

    def mask_below(self, trainer_version: int) -> int:
        """Oldest version whose tokens get a gradient at `trainer_version`; 0: all tokens do."""
        if self.on_stale != "mask":
            return 0
        return max(0, trainer_version - self.window.max_staleness)

    def _check_choices(self) -> None:
        # Literals are not checked at run time, and Lua would not fail either: it would neither drop nor mask the old
        # tokens under an unknown on_stale, so they would be trained without any bound on their age.
        if self.selector not in SELECTORS:
            raise ValueError(
                f"selector {self.selector!r} is unknown, so no batch could be chosen. "
                f"Set selector.kind to one of {', '.join(SELECTORS)}"
            )
        if self.on_stale not in get_args(OnStale):
            raise ValueError(
                f"on_stale {self.on_stale!r} is unknown, so nothing would bound the age of tokens. "
                f"Set on_stale to one of {', '.join(get_args(OnStale))}"
            )

    def _check_selector(self) -> None:
        capacity = self.window.capacity
        if self.selector != "windowed_fifo" and self.selector_window != 1:
            raise ValueError(
                f"selector.window ({self.selector_window}) is a setting of windowed_fifo, but the selector is "
                f"{self.selector}: it would have no effect. Remove it, or set selector.kind to windowed_fifo"
            )
        if not 1 <= self.selector_window <= capacity:
            raise ValueError(
                f"selector.window ({self.selector_window}) is not between 1 and the capacity (S + 1) * P = {capacity}: "
                "there are never more groups to choose from. Lower selector.window or raise max_staleness"
            )
        if self.selector == "exact_age" and (self.max_uses > 1 or self.rate != RateLimit()):
            raise ValueError(
                "selector exact_age gives every token the age S: with max_uses above 1 a group would be trained at "
                "several ages, and an admission rule would have no effect or break the order. Set max_uses to 1 and "
                "admission.kind to staleness_window"
            )
        if self.on_stale == "wait" and not self.preserves_ticket_order:
            raise ValueError(
                f"on_stale wait with selector {self.selector}: groups that are overtaken again and again would grow "
                "old without bound and occupy their slots for ever. Set on_stale to drop or mask"
            )

    def _check_uses(self) -> None:
        usable_steps = self.window.max_staleness + 1
        if self.on_stale != "wait" and self.max_uses > usable_steps:
            raise ValueError(
                f"max_uses ({self.max_uses}) cannot be reached: with on_stale {self.on_stale} a group can be trained "
                f"in S + 1 = {usable_steps} steps. Lower max_uses or raise max_staleness"
            )

    def _check_rate(self) -> None:
        capacity = self.window.capacity
        batch = self.window.groups_per_step
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
        needed_slack = batch + self.rate.samples_per_insert
        if slack < needed_slack:
            raise ValueError(
                f"admission.error_buffer leaves max_diff - min_diff = {slack:g}, but a batch of P = {batch} and one "
                f"insert of {self.rate.samples_per_insert:g} need {needed_slack:g}: neither side could proceed. "
                f"Set admission.error_buffer to at least {needed_slack / 2:g}"
            )

"""max_staleness: auto. A controller that moves the effective S between two bounds, based on the last steps.

    the trainer waits, and the window is full       raise S: servers have slots, but no group may be admitted
    that made no step faster                        revert, and pause increases for a while
    the trainer does not wait, batches are ready    lower S: these batches only age
    the window is never full                        lower S: the servers' slots are the limit, not the window
    importance weights or clipping pass a limit     lower S: tokens are too old to learn from

The bound of the age stays `max_staleness`, the largest effective S. Every decision needs `patience` steps that agree,
and no step counts while an earlier decision takes effect. After a decrease that had to be reverted, the next decrease
needs twice as many steps. There is no clock and no randomness: trainer and simulation feed the same steps and get the
same decisions.

    observing --decision--> settling (steps are ignored) --> observing
    an increase also starts a trial; a trial without gain is reverted and pauses increases
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from async_grpo.telemetry.bottleneck import HARDLY_WAITS, WAITS, WORTHWHILE
from async_grpo.telemetry.rows import Row, number

if TYPE_CHECKING:
    from async_grpo.config.buffer import AutoStalenessConfig
    from async_grpo.staleness import ReplayPolicy
    from buffer.base import BufferStats

OTHER_REGIME = 0.3
"""Relative change of the run's speed after which an increase without gain is tried again."""
RECOVERY_MARGIN = 1.1
"""Factor by which the effective sample size must be above its limit, and clipping below, before S rises."""
PAUSE_PATIENCES = 8
"""Length of the pause after an increase without gain, in units of `patience`."""
MAX_BACKOFF = 8
"""Maximum factor on the steps that a decrease needs."""


@dataclass(frozen=True, slots=True)
class StalenessFigures:
    """The controller's input from one step."""

    idle: float
    """Fraction of the step that the trainer waited for groups."""
    tokens_per_s: float
    """Trained tokens per second of the step."""
    active: int
    """Groups that occupy a slot of the window after the release of the step's own."""
    ready: int
    """READY groups at that time."""
    ess: float | None = None
    """Effective sample size of the importance weights, 0 to 1."""
    clip_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class StalenessDecision:
    """A change of the effective S with its reason."""

    before: int
    staleness: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Trial:
    """One or more increases in succession, whose gain is not known yet.

    It is measured once the whole window has been trained: at first, a fuller engine only makes every group slower.
    """

    before: int
    """S before the first increase."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class _Pause:
    """Steps for which S does not rise, after an increase without gain."""

    remaining_steps: int
    tokens_per_s: float
    """Speed at the start of the pause. If the speed changes much, the pause ends early."""


class StalenessController:
    """Decides after each step. `staleness` is the effective S."""

    def __init__(self, config: AutoStalenessConfig, *, groups_per_step: int, smallest: int, staleness: int) -> None:
        """`smallest`: the smallest S that the buffer's other settings allow."""
        self._config = config
        self._groups = groups_per_step
        self._min_staleness = max(config.min, smallest)
        self._max_staleness = config.max
        self.staleness = staleness
        self._steps: list[StalenessFigures] = []
        """Steps since the last decision took effect."""
        self._settling_steps = 0
        """Number of steps to ignore, until the last decision has taken effect."""
        self._trial: _Trial | None = None
        self._pause: _Pause | None = None
        self._backoff = 1
        self._last_was_decrease = False

    def observe_step(self, step: StalenessFigures) -> StalenessDecision | None:
        """Record a step and decide."""
        if self._settling_steps:
            self._settling_steps -= 1
            return None
        self._steps.append(step)
        self._update_pause()
        # In this order: old tokens harm learning, so they outweigh speed. A trial is judged after a further increase
        # was considered, because an increase extends it.
        return (
            self._lower_for_quality()
            or self._raise_for_speed()
            or self._revert_useless_trial()
            or self._lower_to_need()
        )

    def _update_pause(self) -> None:
        if self._pause is None:
            return
        speed = self._pause.tokens_per_s
        has_changed = True
        if speed:
            has_changed = abs(self._mean(lambda step: step.tokens_per_s) / speed - 1) > OTHER_REGIME
        remaining = self._pause.remaining_steps - 1
        if remaining <= 0 or (has_changed and self._has_steps(1)):
            self._pause = None
        else:
            self._pause = _Pause(remaining, speed)

    def _lower_for_quality(self) -> StalenessDecision | None:
        """Lower S by one if the tokens are too old to learn from."""
        if not self._has_steps(1) or self.staleness <= self._min_staleness:
            return None
        problem = self._find_quality_problem(1.0)
        if problem is None:
            return None
        return self._decide(self.staleness - 1, f"{problem}: tokens are too old")

    def _find_quality_problem(self, margin: float) -> str | None:
        """Return the metric that is past its limit, which `margin` makes stricter; None if there is none."""
        config = self._config
        ess = self._mean(lambda step: step.ess if step.ess is not None else 1.0)
        clipped = self._mean(lambda step: step.clip_fraction)
        if ess < min(1.0, config.min_ess * margin):
            return f"the effective sample size is {ess:.2f} (limit {config.min_ess:g})"
        if clipped > config.max_clip_fraction / margin:
            return f"{clipped:.0%} of the tokens are clipped (limit {config.max_clip_fraction:.0%})"
        return None

    def _raise_for_speed(self) -> StalenessDecision | None:
        """Double S if the trainer waits although the window is full."""
        if not self._has_steps(1) or self.staleness >= self._max_staleness or self._pause is not None:
            return None
        idle = self._mean(lambda step: step.idle)
        full_fraction = self._mean(lambda step: float(self._was_full(step)))
        if idle <= WAITS or full_fraction < 0.5 or self._find_quality_problem(RECOVERY_MARGIN) is not None:
            return None

        if self._last_was_decrease:  # which was too much, so that we must now revert it
            self._backoff = min(MAX_BACKOFF, 2 * self._backoff)
        if self._trial is None:
            self._trial = _Trial(self.staleness, self._mean(lambda step: step.tokens_per_s))
        higher = min(self._max_staleness, max(self.staleness + 1, 2 * self.staleness))
        return self._decide(higher, f"the trainer waits {idle:.0%} of its time, and the window is full")

    def _revert_useless_trial(self) -> StalenessDecision | None:
        """End the trial once the window has been trained. Revert it if it made no step faster."""
        trial = self._trial
        if trial is None or len(self._steps) < self.staleness + 1 + self._config.patience:
            return None
        self._trial = None
        speed = self._mean(lambda step: step.tokens_per_s)
        gain = speed / trial.tokens_per_s - 1 if trial.tokens_per_s else 1.0
        if gain >= WORTHWHILE:
            return None
        self._pause = _Pause(PAUSE_PATIENCES * self._config.patience, speed)
        return self._decide(trial.before, f"tokens/s changed by {gain:+.0%} since S = {trial.before}: no gain")

    def _lower_to_need(self) -> StalenessDecision | None:
        """Lower S if batches wait for the trainer, or if the servers do not fill the window."""
        patiences = 2 * self._backoff
        if not self._has_steps(patiences) or self.staleness <= self._min_staleness:
            return None
        recent = self._recent_steps(patiences)

        spare_batches = min(step.ready // self._groups - 1 for step in recent)
        idle = self._mean(lambda step: step.idle, patiences)
        if idle < HARDLY_WAITS and spare_batches > 0:
            decrease = min(spare_batches, max(1, self.staleness // 2))
            return self._decide(
                self.staleness - decrease,
                f"the trainer waits {idle:.0%} of its time, and {spare_batches} more batches are ready than it needs",
            )

        unused = self._capacity - self._groups - max(step.active for step in recent)
        # After the decrease there must still be room. Otherwise the window would be full, and S would rise again.
        if unused >= 2 * self._groups:
            return self._decide(self.staleness - 1, f"the window has room for {unused} groups that did not come")
        return None

    def _decide(self, staleness: int, reason: str) -> StalenessDecision:
        """Change the effective S, and ignore steps until the window has that size."""
        before = self.staleness
        self.staleness = min(self._max_staleness, max(self._min_staleness, staleness))
        self._steps = []
        self._last_was_decrease = self.staleness < before
        if self._last_was_decrease:
            self._trial = None
        # Each step of the run shrinks the window by one batch at most.
        self._settling_steps = max(1, before - self.staleness) + 1
        return StalenessDecision(before, self.staleness, reason)

    @property
    def _capacity(self) -> int:
        return (self.staleness + 1) * self._groups

    def _was_full(self, step: StalenessFigures) -> bool:
        """True if the window was full until the step's own groups were released."""
        return step.active >= self._capacity - self._groups

    def _has_steps(self, patiences: int) -> bool:
        return len(self._steps) >= patiences * self._config.patience

    def _recent_steps(self, patiences: int) -> list[StalenessFigures]:
        return self._steps[-patiences * self._config.patience :]

    def _mean(self, value: Callable[[StalenessFigures], float | None], patiences: int = 1) -> float:
        """Mean over the recent steps that have the value; 0 if none has."""
        values = []
        for step in self._recent_steps(patiences):
            step_value = value(step)
            if step_value is not None:
                values.append(step_value)
        return fmean(values) if values else 0.0


def make_controller(
    config: AutoStalenessConfig | None, policy: ReplayPolicy, staleness: int | None = None
) -> StalenessController | None:
    """Return the controller of a run; None if its S is a number.

    `staleness`: current effective S; None: that of the policy.
    """
    if config is None:
        return None
    window = policy.window
    if staleness is None:
        staleness = window.effective_staleness
    return StalenessController(
        config, groups_per_step=window.groups_per_step, smallest=policy.smallest_staleness, staleness=staleness
    )


def staleness_figures(row: Row, stats: BufferStats) -> StalenessFigures:
    """Return the controller's input from a step row and the buffer's counters after the release of the step's
    groups."""
    step_s = number(row, "step_s") or 0.0
    wait_s = number(row, "wait_s") or 0.0
    return StalenessFigures(
        idle=wait_s / step_s if step_s else 0.0,
        tokens_per_s=number(row, "tokens_per_s") or 0.0,
        active=stats.active,
        ready=stats.ready,
        ess=number(row, "ess"),
        clip_fraction=number(row, "clip_fraction"),
    )

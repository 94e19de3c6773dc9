"""max_staleness: auto. A controller that moves the effective S between two bounds, by what the last steps were like.

    the trainer waits, and the window is full       raise S: servers have slots that nothing may be admitted for
    that made no step faster                        take it back, and leave it for a while
    the trainer does not wait, batches lie ready    lower S: that many batches age for nothing
    the window is never full                        lower S: slots bound what is generated, and not the window
    importance weights or clipping pass a limit     lower S: tokens are too old to learn from

The bound of the age stays `max_staleness`, the largest effective S. Every decision needs `patience` steps
that agree, and nothing counts while an earlier decision takes effect. A decrease that had to be taken back makes the
controller twice as patient with the next one. There is no clock and no randomness: trainer and simulation feed the same
steps and get the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from async_grpo.telemetry.bottleneck import NEVER_WAITS, WAITS, WORTHWHILE
from async_grpo.telemetry.rows import Row, number

if TYPE_CHECKING:
    from async_grpo.config.buffer import AutoStalenessConfig
    from async_grpo.staleness import ReplayPolicy
    from buffer.base import BufferStats

OTHER_REGIME = 0.3
"""Change of the run's speed, as a share, after which an increase that gave nothing is tried again."""
RECOVERED = 1.1
"""By how much the effective sample size must be above its limit, and clipping below, before S rises."""
HOLD, MOST_BACKOFF = 8, 8
"""How many times `patience` an increase that gave nothing is left alone; the most that patience is multiplied by."""


@dataclass(frozen=True, slots=True)
class StalenessFigures:
    """What a step says to the controller."""

    idle: float
    """Share of the step that the trainer waited for groups."""
    tokens_per_s: float
    """Trained tokens over the step's seconds."""
    active: int
    """Groups that hold a slot of the window once the step's own are released."""
    ready: int
    """Finished groups then."""
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
    """Increases, one soon after the other, whose gain is known once the window has been trained once: at first a fuller
    engine only makes every group slower."""

    before: int
    tokens_per_s: float


class StalenessController:
    """Decides after each step. `staleness` is the effective S."""

    def __init__(self, config: AutoStalenessConfig, *, groups_per_step: int, least: int, staleness: int) -> None:
        """`least`: the smallest S that the buffer's other settings leave room for."""
        self._config = config
        self._groups = groups_per_step
        self._least = max(config.min, least)
        self._most = config.max
        self.staleness = staleness
        self._steps: list[StalenessFigures] = []
        """Those since the last decision took effect."""
        self._settling = 0
        """Steps that do not count any more."""
        self._trial: _Trial | None = None
        self._held: tuple[int, float] | None = None
        """Steps for which S does not rise, and the run's speed when that began."""
        self._backoff = 1
        self._lowered = False
        """Whether the last decision was a decrease."""

    def observe(self, step: StalenessFigures) -> StalenessDecision | None:
        """Take note of a step, and decide."""
        if self._settling:
            self._settling -= 1
            return None
        self._steps.append(step)
        if self._held is not None:
            left, speed = self._held
            changed = abs(self._mean(lambda one: one.tokens_per_s) / speed - 1) > OTHER_REGIME if speed else True
            self._held = None if left <= 1 or (changed and self._is_enough(1)) else (left - 1, speed)
        return self._quality() or self._raised() or self._tried() or self._lowered_to_need()

    def _is_enough(self, times: int) -> bool:
        return len(self._steps) >= times * self._config.patience

    def _recent(self, times: int) -> list[StalenessFigures]:
        return self._steps[-times * self._config.patience :]

    def _mean(self, value: Callable[[StalenessFigures], float | None], times: int = 1) -> float:
        found = [number for one in self._recent(times) if (number := value(one)) is not None]
        return fmean(found) if found else 0.0

    def _quality(self) -> StalenessDecision | None:
        if not self._is_enough(1) or self.staleness <= self._least:
            return None
        if trouble := self._trouble(1.0):
            return self._decide(self.staleness - 1, f"{trouble}: tokens are too old")
        return None

    def _trouble(self, margin: float) -> str:
        """What is past its limit, which is made tighter by the margin; "" if nothing is."""
        config = self._config
        ess = self._mean(lambda one: one.ess if one.ess is not None else 1.0)
        clipped = self._mean(lambda one: one.clip_fraction)
        if ess < min(1.0, config.min_ess * margin):
            return f"the effective sample size is {ess:.2f} (limit {config.min_ess:g})"
        if clipped > config.max_clip_fraction / margin:
            return f"{clipped:.0%} of the tokens are clipped (limit {config.max_clip_fraction:.0%})"
        return ""

    def _tried(self) -> StalenessDecision | None:
        trial = self._trial
        if trial is None or len(self._steps) < self.staleness + 1 + self._config.patience:
            return None
        self._trial = None
        speed = self._mean(lambda one: one.tokens_per_s)
        gain = speed / trial.tokens_per_s - 1 if trial.tokens_per_s else 1.0
        if gain >= WORTHWHILE:
            return None
        self._held = (HOLD * self._config.patience, speed)
        return self._decide(trial.before, f"tokens/s changed by {gain:+.0%} since S = {trial.before}: it gives nothing")

    def _raised(self) -> StalenessDecision | None:
        if not self._is_enough(1) or self.staleness >= self._most or self._held is not None:
            return None
        idle, full = self._mean(lambda one: one.idle), self._mean(lambda one: float(self._is_full(one)))
        if idle <= WAITS or full < 0.5 or self._trouble(RECOVERED):
            return None
        if self._lowered:
            self._backoff = min(MOST_BACKOFF, 2 * self._backoff)
        self._trial = self._trial or _Trial(self.staleness, self._mean(lambda one: one.tokens_per_s))
        further = min(self._most, max(self.staleness + 1, 2 * self.staleness))
        return self._decide(further, f"the trainer waits {idle:.0%} of its time, and the window is full")

    def _lowered_to_need(self) -> StalenessDecision | None:
        times = 2 * self._backoff
        if not self._is_enough(times) or self.staleness <= self._least:
            return None
        recent = self._recent(times)
        spare = min(one.ready // self._groups - 1 for one in recent)
        idle = self._mean(lambda one: one.idle, times)
        if idle < NEVER_WAITS and spare > 0:
            fewer = min(spare, max(1, self.staleness // 2))
            return self._decide(
                self.staleness - fewer,
                f"the trainer waits {idle:.0%} of its time, and batches lie ready: {spare} to spare",
            )
        unused = self._capacity - self._groups - max(one.active for one in recent)
        if unused >= 2 * self._groups:  # after the decrease there is still room, so that the window is not full
            return self._decide(self.staleness - 1, f"the window has room for {unused} groups that did not come")
        return None

    @property
    def _capacity(self) -> int:
        return (self.staleness + 1) * self._groups

    def _is_full(self, step: StalenessFigures) -> bool:
        """Whether the window was full until the step's own groups were released."""
        return step.active >= self._capacity - self._groups

    def _decide(self, staleness: int, reason: str) -> StalenessDecision | None:
        """Change the effective S, and wait until the window has that size."""
        before, self.staleness = self.staleness, min(self._most, max(self._least, staleness))
        self._steps = []
        self._lowered = self.staleness < before
        if self._lowered:
            self._trial = None
        self._settling = max(1, before - self.staleness) + 1
        return StalenessDecision(before, self.staleness, reason)


def controller_for(
    config: AutoStalenessConfig | None, policy: ReplayPolicy, staleness: int | None = None
) -> StalenessController | None:
    """The controller of a run; None if its S is a number. `staleness`: effective S now, if it is not that of the
    policy."""
    if config is None:
        return None
    window = policy.window
    now = window.effective_staleness if staleness is None else staleness
    return StalenessController(
        config, groups_per_step=window.groups_per_step, least=policy.smallest_staleness, staleness=now
    )


def figures_of(row: Row, stats: BufferStats) -> StalenessFigures:
    """The figures of a step row, with the buffer's counters once the step's groups were released."""
    step_s = number(row, "step_s") or 0.0
    return StalenessFigures(
        idle=(number(row, "wait_s") or 0.0) / step_s if step_s else 0.0,
        tokens_per_s=number(row, "tokens_per_s") or 0.0,
        active=stats.active,
        ready=stats.ready,
        ess=number(row, "ess"),
        clip_fraction=number(row, "clip_fraction"),
    )

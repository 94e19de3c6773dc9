"""Estimate of the number of rollout servers that a run can use: the gauge that autoscalers follow.

    rows of metrics.jsonl --add_step--------> ServerDemand --Rates--> servers_wanted
    heartbeats            --add_heartbeats-->

Symbols (P, S and capacity as in async_grpo/staleness.py):

    a, b    one token of a sample takes  a + b n  seconds on a server that runs n samples
    M       slots of a server            W   tokens of a batch          L   tokens of its longest completion
    B       seconds that the trainer computes in a step                 D   seconds per step, with N servers

Generating a batch takes  T = max(a L + b W / N, L (a + b n))  seconds. The first term holds if the batch is alone on
its servers. The second holds if generation takes longer than a step, so that batches overlap: a server that generates
w tokens per step then runs  n = a w / (D - b w) <= M  samples. The groups of a batch are admitted `lag` + 1 steps
before the step that trains them ends, so step v ends at

    t_v = max(t_(v-1), t_(v-1-lag) + T_v) + B_v        lag = S, unless the selector waits for more or fewer groups

D, the mean of t_v - t_(v-1), is at least  W (a / M + b) / N, the time with all slots in use. More servers shorten D
until the trainer never waits (D = B) or until the longest completion alone on its server is the limit. The result is
the smallest number of servers for which D is within `WORTHWHILE` of D with the maximum number.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.staleness import ReplayPolicy
from async_grpo.telemetry.bottleneck import WORTHWHILE
from async_grpo.telemetry.rows import Row, number
from async_grpo.wire.board import ServerBeat

MAX_SERVERS = 64
"""Maximum number of servers in the comparison if the configuration sets no maximum."""
STEPS = 16
"""Number of recent steps in the estimate."""
MIN_STEPS = 3
"""Minimum number of steps for an estimate."""
BLOCKS = 128
"""Number of recent speed measurements in the estimate."""
BLOCK_BEATS = 4
"""Heartbeats per speed measurement. One heartbeat alone shows only a momentary load."""
MIN_BLOCKS = 3
"""Minimum number of speed measurements for an estimate."""
MIN_SPREAD = 0.1
"""Minimum ratio of standard deviation to mean of the load. With less, the fit of b would only show noise."""
_BISECTIONS = 20
"""Halvings of the interval in which `step_period` searches."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Time and tokens of one step."""

    compute_s: float
    """Seconds of the step without waiting for a batch (B)."""
    tokens: float
    """Completion tokens that servers generate for such a step (W)."""
    longest: float
    """Tokens of the longest completion (L)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured rates of a run, and its limits."""

    token_s: float
    """a."""
    load_s: float
    """b."""
    slots: int
    """M."""
    samples: int
    """Samples that servers generate for one step."""
    window: int
    """Samples of the groups that may be active at the same time. The model divides them evenly among the servers."""
    lag: int
    steps: Sequence[StepWork]
    streaming: bool = False
    """True if the trainer trains the parts of a batch as they arrive."""


def generation_lag(policy: ReplayPolicy) -> int:
    """Number of steps during which a batch may be generated while other batches are trained.

    It is smaller for a selector that waits for more READY groups than a batch has, and larger for one that lets groups
    overtake each other.
    """
    size = policy.window.groups_per_step
    return (policy.window.capacity - policy.ready_groups_needed) // size + (policy.selector_window - 1) // size


def servers_wanted(rates: Rates, most: int = MAX_SERVERS) -> int:
    """Return the smallest number of servers, from 1 to `most`, that trains nearly as fast as `most` servers."""
    most = min(most, rates.window)
    max_period_s = (1 + WORTHWHILE) * step_period(rates, most)

    # Bisection, because more servers never make the period longer.
    low = 1
    high = most
    while low < high:
        middle = (low + high) // 2
        if step_period(rates, middle) <= max_period_s:
            high = middle
        else:
            low = middle + 1
    return low


def step_period(rates: Rates, servers: int) -> float:
    """Return D, the mean seconds per step with `servers` servers.

    D is the fixed point of `_simulated_period`: the load of the engines depends on the period, and the period on the
    load. A longer period means fewer concurrent samples, which finish sooner, so bisection finds it.
    """
    tokens = statistics.fmean(step.tokens for step in rates.steps)
    with_all_slots_s = tokens * (rates.token_s / rates.slots + rates.load_s) / servers
    low = max(with_all_slots_s, statistics.fmean(step.compute_s for step in rates.steps))
    high = max(low, _simulated_period(rates, servers, low))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _simulated_period(rates, servers, middle) <= middle:
            high = middle
        else:
            low = middle
    return high


def _simulated_period(rates: Rates, servers: int, period_s: float) -> float:
    """Simulate the recorded steps in sequence, with the engine load that a period of `period_s` causes. Returns the
    mean seconds per step."""
    ends: list[float] = []
    rounds = max(2, -(-4 * (rates.lag + 1) // len(rates.steps)))
    for step in list(rates.steps) * rounds:
        last = ends[-1] if ends else 0.0
        admitted = ends[-1 - rates.lag] if len(ends) > rates.lag else 0.0
        generated = admitted + _generation_s(rates, servers, step, period_s)
        if rates.streaming:
            ends.append(max(last + step.compute_s, generated))
        else:
            ends.append(max(last, generated) + step.compute_s)

    # The second half only, and a multiple of lag + 1 steps: steps may end in bursts of that length.
    counted = len(ends) // 2 // (rates.lag + 1) * (rates.lag + 1)
    return (ends[-1] - ends[-1 - counted]) / counted


def _generation_s(rates: Rates, servers: int, step: StepWork, period_s: float) -> float:
    """Return T, the seconds until the last completion of a batch."""
    tokens = step.tokens / servers
    depth = step.longest
    if rates.samples > servers * rates.slots:
        # There are more samples than slots, so the last ones start only when earlier ones have finished.
        depth = max(depth, tokens / rates.slots + step.longest / 2)
    running = _running_samples(rates, tokens, period_s)
    return max(rates.token_s * depth + rates.load_s * tokens, (rates.token_s + rates.load_s * running) * depth)


def _running_samples(rates: Rates, tokens: float, period_s: float) -> float:
    """Mean number of concurrent samples on a server that generates `tokens` per period (n)."""
    free_s = period_s - rates.load_s * tokens
    if free_s <= 0:
        return rates.slots
    return min(rates.slots, rates.token_s * tokens / free_s)


class ServerDemand:
    """Measures the rates of a live run from its rows and heartbeats, and estimates how many servers it can use."""

    def __init__(self, policy: ReplayPolicy, *, started_samples: int, slots: int, streaming: bool) -> None:
        """`started_samples`: samples per group, including over-sampled ones. `slots`: rollout.max_concurrency."""
        self._policy = policy
        self._slots = slots
        self._streaming = streaming
        self._started_samples = started_samples
        self._steps: deque[StepWork] = deque(maxlen=STEPS)
        self._blocks: deque[tuple[float, float]] = deque(maxlen=BLOCKS)
        """(concurrent samples, seconds per token) of each speed measurement."""
        self._last_beats: dict[str, ServerBeat] = {}
        self._open_blocks: dict[str, list[tuple[float, float]]] = {}
        """Server -> (concurrent samples, tokens per second) of the heartbeats of its unfinished measurement."""

    @classmethod
    def of(cls, config: RunConfig) -> ServerDemand:
        """Return the demand estimator of a configured run."""
        rollout = config.rollout
        return cls(
            config.replay_policy,
            started_samples=config.group_size + rollout.oversample,
            slots=rollout.max_concurrency,
            streaming=config.trainer.streaming,
        )

    def add_step(self, row: Row) -> None:
        """Add a row of metrics.jsonl. Rows without a trained batch are ignored."""
        mean = number(row, "completion_tokens_mean")
        longest = number(row, "completion_tokens_max")
        step_s = number(row, "step_s")
        wait_s = number(row, "wait_s")
        if row.get("replayed") or mean is None or longest is None or step_s is None or wait_s is None:
            return

        samples = self._policy.window.groups_per_step * self._started_samples / self._policy.max_uses
        self._steps.append(StepWork(max(0.0, step_s - wait_s), mean * samples, longest))
        staleness = number(row, "staleness")
        if staleness is not None:
            self._policy = self._policy.with_staleness(int(staleness))

    def add_heartbeats(self, beats: Iterable[ServerBeat]) -> None:
        """Add the newest heartbeat of each server. A heartbeat that was added before is ignored."""
        for beat in beats:
            before = self._last_beats.get(beat.name)
            self._last_beats[beat.name] = beat
            if before is None or before.time_s == beat.time_s:
                continue

            # tokens_per_s covers the time between the two heartbeats, so the load is their mean. Without samples at
            # either end, the server was idle for an unknown part of that time.
            running = (before.running + beat.running) / 2
            if min(before.running, beat.running) and beat.tokens_per_s > 0:
                block = self._open_blocks.setdefault(beat.name, [])
                block.append((running, beat.tokens_per_s))
                if len(block) == BLOCK_BEATS:
                    self._add_block(self._open_blocks.pop(beat.name))

    def _add_block(self, block: Sequence[tuple[float, float]]) -> None:
        """Add the mean load and the mean seconds per token of some heartbeats, weighted by concurrent samples."""
        running = sum(load for load, _ in block)
        self._blocks.append((sum(load**2 for load, _ in block) / running, running / sum(rate for _, rate in block)))

    def rates(self) -> Rates | None:
        """Return the measured rates; None if there are too few measurements."""
        if len(self._steps) < MIN_STEPS or len(self._blocks) < MIN_BLOCKS:
            return None
        token_s, load_s = fit_token_times(self._blocks)
        samples = self._policy.window.groups_per_step * self._started_samples
        return Rates(
            token_s=token_s,
            load_s=load_s,
            slots=self._slots,
            samples=-(-samples // self._policy.max_uses),
            window=self._policy.window.capacity * self._started_samples,
            lag=generation_lag(self._policy),
            steps=list(self._steps),
            streaming=self._streaming,
        )

    def estimate_servers(self, most: int = MAX_SERVERS) -> int | None:
        """Return the number of servers that the run can use, at most `most`; None if there are too few measurements."""
        rates = self.rates()
        if rates is None:
            return None
        return servers_wanted(rates, most)


def fit_token_times(blocks: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Fit a and b to pairs of (concurrent samples, seconds per token).

    If all loads are alike, b cannot be fitted, and half of the time is assumed to depend on the load. A change of the
    number of servers then produces other loads.

    >>> fit_token_times([(2, 0.012), (4, 0.014), (8, 0.018)])
    (0.01, 0.001)
    """
    pairs = list(blocks)
    loads = [load for load, _ in pairs]
    seconds = [token_s for _, token_s in pairs]
    mean_load = statistics.fmean(loads)
    mean_s = statistics.fmean(seconds)
    if statistics.pstdev(loads) < MIN_SPREAD * mean_load:
        return mean_s / 2, mean_s / 2 / mean_load

    slope, intercept = statistics.linear_regression(loads, seconds)
    if slope <= 0:
        return mean_s, 0.0
    if intercept < 0:
        return 0.0, mean_s / mean_load
    return round(intercept, 9), round(slope, 9)

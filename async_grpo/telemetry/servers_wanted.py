"""How many rollout servers a run can use: the gauge that autoscalers follow.

    rows of metrics.jsonl --step--> ServerDemand --Rates--> servers_wanted
    heartbeats          --beats-->

Symbols (P, S and capacity as in async_grpo/staleness.py):

    a, b    one token of a sample takes  a + b n  seconds on a server that runs n samples
    M       slots of a server            W   tokens of a batch          L   tokens of its longest completion
    B       seconds that the trainer computes in a step                 D   seconds from step to step, with N servers

A batch is generated in  T = max(a L + b W / N, L (a + b n)): alone on its servers, or beside others
if it takes longer than a step, with  n = a w / (D - b w) <= M  samples on a server that generates w tokens a step. Its
groups are admitted when the step `lag` + 1 before its own ends, so that step v ends at

    t_v = max(t_(v-1), t_(v-1-lag) + T_v) + B_v        lag = S, unless the selector waits for more or less

and D, the mean of t_v - t_(v-1), is at least  W (a / M + b) / N, which the slots allow. D falls with N until the
trainer is never without a batch (B), or until a completion alone on its server is what takes longest. Wanted are the
fewest servers with which D is within `WORTHWHILE` of that with the most.
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

MOST = 64
"""Servers that are compared with where the configuration names no most."""
STEPS, LEAST_STEPS = 16, 3
"""Steps that are remembered, and those without which nothing is said."""
BLOCKS, BLOCK_BEATS, LEAST_BLOCKS = 128, 4, 3
"""Speeds that are remembered. One is the mean of `BLOCK_BEATS` heartbeats, which show the load of a moment."""
LEAST_SPREAD = 0.1
"""Spread of the load over its mean below which the speed's dependence on it cannot be told."""
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step took and trained."""

    compute_s: float
    """Everything but waiting."""
    tokens: float
    """Completion tokens that servers generate for one such step."""
    longest: float
    """Tokens of the longest completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a run was measured to do, and what bounds it."""

    token_s: float
    """a."""
    load_s: float
    """b."""
    slots: int
    """M."""
    samples: int
    """Samples that servers generate for one step."""
    window: int
    """Samples of the groups that may be active at once, which all servers share evenly."""
    lag: int
    steps: Sequence[StepWork]
    streaming: bool = False
    """Whether the trainer trains the parts of a batch as they come."""


def lag_of(policy: ReplayPolicy) -> int:
    """Steps for which the groups of a batch may be in the making while others are trained.

    A selector that waits for more READY groups than a batch leaves fewer; one that lets groups overtake leaves more.
    """
    size = policy.window.groups_per_step
    return (policy.window.capacity - policy.ready_groups_needed) // size + (policy.selector_window - 1) // size


def servers_wanted(rates: Rates, most: int = MOST) -> int:
    """The fewest of 1 to `most` servers with which steps follow each other nearly as fast as with `most`."""
    most = min(most, rates.window)
    enough = (1 + WORTHWHILE) * step_period(rates, most)
    low, high = 1, most
    while low < high:  # the period never grows with the servers
        middle = (low + high) // 2
        low, high = (low, middle) if step_period(rates, middle) <= enough else (middle + 1, high)
    return low


def step_period(rates: Rates, servers: int) -> float:
    """D: mean seconds from step to step with so many servers."""
    work = statistics.fmean(step.tokens for step in rates.steps)
    full = work * (rates.token_s / rates.slots + rates.load_s) / servers
    low = max(full, statistics.fmean(step.compute_s for step in rates.steps))
    high = max(low, _simulated_period(rates, servers, low))
    for _ in range(_ROUNDS):  # a longer period means fewer samples at once, which end sooner
        middle = (low + high) / 2
        low, high = (low, middle) if _simulated_period(rates, servers, middle) <= middle else (middle, high)
    return high


def _simulated_period(rates: Rates, servers: int, period_s: float) -> float:
    """The period of the remembered steps, one after another, if engines are as loaded as with `period_s`."""
    ends: list[float] = []
    rounds = max(2, -(-4 * (rates.lag + 1) // len(rates.steps)))
    for step in list(rates.steps) * rounds:
        last = ends[-1] if ends else 0.0
        admitted = ends[-1 - rates.lag] if len(ends) > rates.lag else 0.0
        made = admitted + _generation_s(rates, servers, step, period_s)
        ends.append(max(last + step.compute_s, made) if rates.streaming else max(last, made) + step.compute_s)
    counted = len(ends) // 2 // (rates.lag + 1) * (rates.lag + 1)  # whole windows, since ends may come in bursts of one
    return (ends[-1] - ends[-1 - counted]) / counted


def _generation_s(rates: Rates, servers: int, step: StepWork, period_s: float) -> float:
    """T: seconds until the last completion of a batch."""
    share = step.tokens / servers  # servers share the window evenly
    waves = step.longest
    if rates.samples > servers * rates.slots:  # its last completions start when others have made room
        waves = max(waves, share / rates.slots + step.longest / 2)
    running = _running(rates, share, period_s)
    return max(rates.token_s * waves + rates.load_s * share, (rates.token_s + rates.load_s * running) * waves)


def _running(rates: Rates, tokens: float, period_s: float) -> float:
    """Samples that run on a server at once, in the mean, if it generates so many tokens a period."""
    free_s = period_s - rates.load_s * tokens
    return min(rates.slots, rates.token_s * tokens / free_s) if free_s > 0 else rates.slots


class ServerDemand:
    """Learns the rates of a live run from its rows and its servers' heartbeats."""

    def __init__(self, policy: ReplayPolicy, *, started_samples: int, slots: int, streaming: bool) -> None:
        """`started_samples`: those of a group, over-sampled ones included. `slots`: rollout.max_concurrency."""
        self._policy, self._slots, self._streaming = policy, slots, streaming
        self._started = started_samples
        self._steps: deque[StepWork] = deque(maxlen=STEPS)
        self._blocks: deque[tuple[float, float]] = deque(maxlen=BLOCKS)
        self._newest: dict[str, ServerBeat] = {}
        self._open: dict[str, list[tuple[float, float]]] = {}

    @classmethod
    def of(cls, config: RunConfig) -> ServerDemand:
        """That of a configured run."""
        rollout = config.rollout
        return cls(
            config.replay_policy,
            started_samples=config.group_size + rollout.oversample,
            slots=rollout.max_concurrency,
            streaming=config.trainer.streaming,
        )

    def step(self, row: Row) -> None:
        """Learn from a row of metrics.jsonl; one without a trained batch says nothing."""
        mean, longest = number(row, "completion_tokens_mean"), number(row, "completion_tokens_max")
        spent, waited = number(row, "step_s"), number(row, "wait_s")
        if row.get("replayed") or None in (mean, longest, spent, waited):
            return
        assert mean is not None and longest is not None and spent is not None and waited is not None
        samples = self._policy.window.groups_per_step * self._started / self._policy.max_uses
        self._steps.append(StepWork(max(0.0, spent - waited), mean * samples, longest))
        if (staleness := number(row, "staleness")) is not None:
            self._policy = self._policy.with_staleness(int(staleness))

    def beats(self, beats: Iterable[ServerBeat]) -> None:
        """Learn from the newest heartbeats; one that was seen before counts once."""
        for beat in beats:
            before, self._newest[beat.name] = self._newest.get(beat.name), beat
            if before is None or before.time_s == beat.time_s:
                continue
            running = (before.running + beat.running) / 2  # the tokens are those made between the two
            if min(before.running, beat.running) and beat.tokens_per_s > 0:
                block = self._open.setdefault(beat.name, [])
                block.append((running, beat.tokens_per_s))
                if len(block) == BLOCK_BEATS:
                    self._close(self._open.pop(beat.name))

    def _close(self, block: Sequence[tuple[float, float]]) -> None:
        """Keep the load that a token meets, and the time that it takes."""
        running = sum(load for load, _ in block)
        self._blocks.append((sum(load**2 for load, _ in block) / running, running / sum(rate for _, rate in block)))

    def rates(self) -> Rates | None:
        """What has been measured; None as long as that is too little."""
        if len(self._steps) < LEAST_STEPS or len(self._blocks) < LEAST_BLOCKS:
            return None
        token_s, load_s = fitted(self._blocks)
        samples = self._policy.window.groups_per_step * self._started
        return Rates(
            token_s=token_s,
            load_s=load_s,
            slots=self._slots,
            samples=-(-samples // self._policy.max_uses),
            window=self._policy.window.capacity * self._started,
            lag=lag_of(self._policy),
            steps=list(self._steps),
            streaming=self._streaming,
        )

    def wanted(self, most: int = MOST) -> int | None:
        """The number of servers that the run can use, at most `most`; None as long as too little was measured."""
        rates = self.rates()
        return None if rates is None else servers_wanted(rates, most)


def fitted(blocks: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """a and b from loads and the seconds that a token took at each.

    Where all loads are alike, half of that time is taken to depend on the load: another number of servers will tell.

    >>> fitted([(2, 0.012), (4, 0.014), (8, 0.018)])
    (0.01, 0.001)
    """
    pairs = list(blocks)
    loads, seconds = [load for load, _ in pairs], [spent for _, spent in pairs]
    load, spent = statistics.fmean(loads), statistics.fmean(seconds)
    if statistics.pstdev(loads) < LEAST_SPREAD * load:
        return spent / 2, spent / 2 / load
    slope, start = statistics.linear_regression(loads, seconds)
    if slope <= 0:
        return spent, 0.0
    return (0.0, spent / load) if start < 0 else (round(start, 9), round(slope, 9))

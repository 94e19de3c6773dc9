"""Fits the engine's speed to the start and end times of groups, given what else ran at those times.

A running sample gets a token in every decoding step, so between the start and the end of a group

    longest = integral of  dt / (slowdown(t) * (step_s + request_s * running(t)))

Nothing is integrated while weights are loaded or, for `prompt_s` from the start of every group, its prompt is read.
`slowdown` is 1 except while the trainer computes, and the last `latency_s` belong to the verifiers. `running(t)`
follows from the lengths: each sample ends where the same integral reaches its length. Speeds and sample ends are solved
for in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from async_grpo.lab.simulate.recorded import RecordedGroup, RecordedRun, RecordedServer
from async_grpo.telemetry.idle import Span, merged

Floats = npt.NDArray[np.float64]
ROUNDS = 4
"""Number of times that speeds and sample ends are solved for in turn."""
PRIOR_RUNNING = 50
"""Prior: number of running samples at which a decoding step takes twice its fixed time."""
PRIOR_WEIGHT = 0.1
"""Weight of that prior. It matters only if the engine's load was constant, so that the groups do not show how its speed
depends on the load."""
MIN_GROUPS = 8
MIN_RECORDED_FRACTION = 0.9
"""Minimum fraction of a server's groups with recorded lengths. Otherwise the engine's load is unknown."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Fitted speeds of an engine, and their error."""

    step_s: float
    request_s: float
    latency_s: float
    slowdown: float
    """Factor by which decoding is slower while the trainer computes."""
    prompt_s: float
    """Seconds to read the prompt of one group."""
    error: float = 0.0
    """Mean absolute error of a group's tokens, as a fraction."""


def fit_engine(runs: Sequence[RecordedRun], *, fits_slowdown: bool) -> EngineFit | None:
    """Fit the speeds to the groups of these runs. None if too few groups have recorded lengths."""
    from scipy.optimize import least_squares

    servers = [
        _ServerGroups(server, run.computing) for run in runs for server in run.servers if _has_recorded_lengths(server)
    ]
    if sum(len(server.fitted) for server in servers) < MIN_GROUPS:
        return None

    # The parameters are logarithms, so that all speeds stay positive.
    def speeds_from(logs: Floats) -> EngineFit:
        step_s, request_s, latency_s, extra_slowdown, prompt_s = (float(value) for value in np.exp(logs))
        slowdown = 1 + extra_slowdown if fits_slowdown else 1.0
        return EngineFit(step_s, request_s, latency_s, slowdown, prompt_s)

    def group_errors(logs: Floats) -> Floats:
        return np.concatenate([server.compute_errors(speeds_from(logs)) for server in servers])

    def group_errors_and_prior(logs: Floats) -> Floats:
        log_step_s, log_request_s = logs[0], logs[1]
        prior_error = PRIOR_WEIGHT * (log_request_s - log_step_s + math.log(PRIOR_RUNNING))
        return np.append(group_errors(logs), prior_error)

    token_s = float(np.median(np.concatenate([server.token_s for server in servers])))
    logs = np.log([token_s / 2, token_s / 100, 0.003, 0.1, token_s])
    low = np.log([token_s / 1000, token_s / 1e5, 1e-5, 1e-3, token_s / 1e4])
    high = np.log([token_s * 2, token_s, 1.0, 4.0, token_s * 100])
    for _ in range(ROUNDS):
        for server in servers:
            server.update_sample_ends(speeds_from(logs))
        # The soft loss limits the effect of single groups that something else has delayed.
        logs = least_squares(group_errors_and_prior, logs, bounds=(low, high), loss="soft_l1", f_scale=0.05).x

    error = float(np.abs(group_errors(logs)).mean())
    return replace(speeds_from(logs), error=error)


def _has_recorded_lengths(server: RecordedServer) -> bool:
    recorded = sum(bool(group.lengths) for group in server.groups)
    return recorded >= MIN_RECORDED_FRACTION * max(1, len(server.groups))


class _ServerGroups:
    """The groups of one server as arrays, with the events that ran in parallel.

    Shapes: G groups, N samples of all groups.
    """

    def __init__(self, server: RecordedServer, computing: Sequence[Span]) -> None:
        groups = [group for group in server.groups if group.lengths and group.ended_s > group.started_s]
        self._start_G = np.array([_running_since_s(group, server) for group in groups])
        self._end_G = np.array([group.ended_s for group in groups])
        self._longest_G = np.array([float(max(group.lengths)) for group in groups])
        self._group_of_N = np.repeat(np.arange(len(groups)), [len(group.lengths) for group in groups])
        self._length_N = np.array([float(length) for group in groups for length in group.lengths])
        self._loads = merged((start, end) for start, end, _ in server.loads)
        self._computing = list(computing)
        self.token_s = (self._end_G - self._start_G) / self._longest_G
        """Seconds per token of each group's longest sample."""
        # The requests of evaluations are not recorded, so groups in parallel with one ran at an unknown load.
        self.fitted = np.flatnonzero([not _overlaps_any(group, server.evaluations) for group in groups])
        """Indices of the groups that did not run during an evaluation."""
        self._sample_end_N = self._start_G[self._group_of_N] + self._length_N * self.token_s[self._group_of_N]

    def compute_errors(self, speeds: EngineFit) -> Floats:
        """Relative error of the tokens that the speeds predict for the longest sample of each fitted group."""
        times, tokens = self._integrate_tokens(speeds)
        start = self._start_G[self.fitted]
        end = np.maximum(start, self._end_G[self.fitted] - speeds.latency_s)
        predicted = np.interp(end, times, tokens) - np.interp(start, times, tokens)
        return np.asarray(predicted / self._longest_G[self.fitted] - 1)

    def update_sample_ends(self, speeds: EngineFit) -> None:
        """End each sample where the speeds predict it, but not after its group."""
        times, tokens = self._integrate_tokens(speeds)
        end_tokens = np.interp(self._start_G, times, tokens)[self._group_of_N] + self._length_N
        latest_end = np.maximum(self._start_G, self._end_G - speeds.latency_s)[self._group_of_N]
        self._sample_end_N = np.minimum(np.interp(end_tokens, tokens, times), latest_end)

    def _integrate_tokens(self, speeds: EngineFit) -> tuple[Floats, Floats]:
        """Times at which anything changes, and the tokens that a sample running from the start has at each."""
        times, running, is_blocked, is_slowed = self._find_intervals(speeds.prompt_s)
        slowdown = np.where(is_slowed, speeds.slowdown, 1.0)
        token_s = slowdown * (speeds.step_s + speeds.request_s * np.maximum(1, running))
        tokens_per_s = np.where(is_blocked, 0.0, 1 / token_s)
        return times, np.concatenate([[0.0], np.cumsum(tokens_per_s * np.diff(times))])

    def _find_intervals(self, prompt_s: float) -> tuple[Floats, Floats, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Times at which anything changes. For each interval between them: the number of running samples, True if
        weights were loaded or prompts read, and True if the trainer computed."""
        read_start_G = _start_one_at_a_time(self._start_G, prompt_s)
        # Times, and by how much the three counts change there: running, blocked, slowed.
        changes: list[tuple[Floats, int, int, int]] = [
            (self._start_G[self._group_of_N], 1, 0, 0),
            (self._sample_end_N, -1, 0, 0),
            (read_start_G, 0, 1, 0),
            (read_start_G + prompt_s, 0, -1, 0),
        ]
        for start, end in self._loads:
            changes.append((np.array([start]), 0, 1, 0))
            changes.append((np.array([end]), 0, -1, 0))
        for start, end in self._computing:
            changes.append((np.array([start]), 0, 0, 1))
            changes.append((np.array([end]), 0, 0, -1))

        times = np.concatenate([change[0] for change in changes])
        order = np.argsort(times, kind="stable")
        counts: list[npt.NDArray[np.int_]] = []
        for column in (1, 2, 3):
            steps = np.concatenate([np.full(len(change[0]), change[column]) for change in changes])
            counts.append(np.cumsum(steps[order])[:-1])
        running, blocked, slowed = counts
        return times[order], running.astype(np.float64), blocked > 0, slowed > 0


def _start_one_at_a_time(ready: Floats, seconds: float) -> Floats:
    """Start times of jobs that become ready at these times and run one at a time, each for `seconds`.

    In order of readiness, start_i = max over k <= i of (ready_k + (i - k) * seconds).
    """
    order = np.argsort(ready, kind="stable")
    offsets = np.arange(len(ready)) * seconds
    started = np.empty_like(ready)
    started[order] = np.maximum.accumulate(ready[order] - offsets) + offsets
    return started


def _running_since_s(group: RecordedGroup, server: RecordedServer) -> float:
    """Time at which the group started to run: when the engine had the weights of its ticket's version."""
    loaded_s = next((end for _, end, version in server.loads if version >= group.version), group.started_s)
    return min(max(group.started_s, loaded_s), group.ended_s - 1e-6)


def _overlaps_any(group: RecordedGroup, spans: Sequence[Span]) -> bool:
    return any(start < group.ended_s and group.started_s < end for start, end in spans)

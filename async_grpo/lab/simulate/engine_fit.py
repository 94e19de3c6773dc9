"""The engine's speed from when groups began and ended, whatever else ran at those times.

A sample that runs gets a token in every decoding step, so that between the begin and the end of a group

    longest = integral of  dt / (beside(t) * (step_s + request_s * running(t)))

where nothing counts while weights are loaded or, for `prompt_s` from the begin of every group, its prompt is read;
`beside` is 1 except while the trainer computes, and the last `latency_s` belong to the verifiers. `running(t)` follows
from the lengths: each sample ends where the same integral reaches its length. Both are solved in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from async_grpo.lab.simulate.recorded import RecordedGroup, RecordedRun, RecordedServer
from async_grpo.telemetry.idle import Span, merged

Times = npt.NDArray[np.float64]
ROUNDS = 4
"""How often samples' ends and speeds are solved in turn."""
USUAL_HALF, PRIOR = 50, 0.1
"""Samples beside which a step takes twice as long, and the weight of that guess: it decides only where the engine was
always as full, so that the groups do not say how its speed depends on that."""
LEAST_GROUPS = 8
"""Groups that a fit needs."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Speeds of an engine, and how far they are from the groups they were fitted to."""

    step_s: float
    request_s: float
    latency_s: float
    beside: float
    prompt_s: float
    """Seconds to read the prompt of one group."""
    error: float = 0.0
    """Mean absolute error of a group's tokens, as a share."""


def fit_engine(runs: Sequence[RecordedRun], *, fits_beside: bool) -> EngineFit | None:
    """The speeds that explain the groups of these runs best; None if too few have known lengths."""
    from scipy.optimize import least_squares

    servers = [_ServerGroups(server, run.computing) for run in runs for server in run.servers if _is_known(server)]
    if sum(len(server.counted) for server in servers) < LEAST_GROUPS:
        return None

    def speeds_of(logs: npt.NDArray[np.float64]) -> EngineFit:
        step_s, request_s, latency_s, more, prompt_s = (float(value) for value in np.exp(logs))
        return EngineFit(step_s, request_s, latency_s, 1 + more if fits_beside else 1.0, prompt_s)

    def errors(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.concatenate([server.errors(speeds_of(logs)) for server in servers])

    def errors_and_prior(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        usual = PRIOR * (logs[1] - logs[0] + math.log(USUAL_HALF))
        return np.append(errors(logs), usual)

    alone_s = float(np.median(np.concatenate([server.pace for server in servers])))
    logs = np.log([alone_s / 2, alone_s / 100, 0.003, 0.1, alone_s])
    low = np.log([alone_s / 1000, alone_s / 1e5, 1e-5, 1e-3, alone_s / 1e4])
    high = np.log([alone_s * 2, alone_s, 1.0, 4.0, alone_s * 100])
    for _ in range(ROUNDS):
        for server in servers:
            server.end_samples(speeds_of(logs))
        logs = least_squares(errors_and_prior, logs, bounds=(low, high), loss="soft_l1", f_scale=0.05).x
    found = speeds_of(logs)
    return replace(found, error=float(np.abs(errors(logs)).mean()))


def _is_known(server: RecordedServer) -> bool:
    """Whether the lengths of nearly all groups are known: else what ran beside a group is not."""
    return sum(bool(group.lengths) for group in server.groups) >= 0.9 * max(1, len(server.groups))


class _ServerGroups:
    """The groups of one server as arrays, and what happened beside them."""

    def __init__(self, server: RecordedServer, computing: Sequence[Span]) -> None:
        groups = [group for group in server.groups if group.lengths and group.ended_s > group.started_s]
        self._begin = np.array([_begun(group, server) for group in groups])
        self._end = np.array([group.ended_s for group in groups])
        self._longest = np.array([float(max(group.lengths)) for group in groups])
        self._place = np.repeat(np.arange(len(groups)), [len(group.lengths) for group in groups])
        self._lengths = np.array([float(length) for group in groups for length in group.lengths])
        self._loads = merged((begin, end) for begin, end, _ in server.loads)
        self._computing = list(computing)
        self.pace = (self._end - self._begin) / self._longest
        """Seconds of each group for a token of its longest sample."""
        self.counted = np.flatnonzero([not _evaluated(group, server.evaluations) for group in groups])
        """Places of the groups that ran apart from evaluations, whose requests are not known."""
        self._sample_ends = self._begin[self._place] + self._lengths * self.pace[self._place]

    def errors(self, speeds: EngineFit) -> npt.NDArray[np.float64]:
        """Tokens that the speeds give each group's longest sample, over those that it has, less 1."""
        times, tokens = self._tokens(speeds)
        begin, end = self._begin[self.counted], self._end[self.counted]
        end = np.maximum(begin, end - speeds.latency_s)
        made = np.interp(end, times, tokens) - np.interp(begin, times, tokens)
        return np.asarray(made / self._longest[self.counted] - 1)

    def end_samples(self, speeds: EngineFit) -> None:
        """Let every sample end where the speeds say so, though not after its group."""
        times, tokens = self._tokens(speeds)
        goal = np.interp(self._begin, times, tokens)[self._place] + self._lengths
        latest = np.maximum(self._begin, self._end - speeds.latency_s)[self._place]
        self._sample_ends = np.minimum(np.interp(goal, tokens, times), latest)

    def _tokens(self, speeds: EngineFit) -> tuple[Times, Times]:
        """Times at which anything changes, and the tokens that a sample would have got until each of them."""
        times, running, is_blocked, is_beside = self._steps(speeds.prompt_s)
        slower = np.where(is_beside, speeds.beside, 1.0) * (speeds.step_s + speeds.request_s * np.maximum(1, running))
        speed = np.where(is_blocked, 0.0, 1 / slower)
        return times, np.concatenate([[0.0], np.cumsum(speed * np.diff(times))])

    def _steps(self, prompt_s: float) -> tuple[Times, Times, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """The times at which anything changes; and between them the running samples, whether weights were loaded or
        prompts read, and whether the trainer computed."""
        read = _one_after_another(self._begin, prompt_s)
        changes = [
            (self._begin[self._place], 1, 0, 0),
            (self._sample_ends, -1, 0, 0),
            (read, 0, 1, 0),
            (read + prompt_s, 0, -1, 0),
            *((np.array([span[side]]), 0, 1 - 2 * side, 0) for span in self._loads for side in (0, 1)),
            *((np.array([span[side]]), 0, 0, 1 - 2 * side) for span in self._computing for side in (0, 1)),
        ]
        times = np.concatenate([at for at, *_ in changes])
        order = np.argsort(times, kind="stable")
        counts = [
            np.cumsum(np.concatenate([np.full(len(change[0]), change[which]) for change in changes])[order])[:-1]
            for which in (1, 2, 3)
        ]
        return times[order], counts[0].astype(np.float64), counts[1] > 0, counts[2] > 0


def _one_after_another(begin: Times, seconds: float) -> Times:
    """When each of several jobs of that length starts, if they become ready at these times and one runs at a time."""
    order = np.argsort(begin, kind="stable")
    places = np.arange(len(begin)) * seconds
    started = np.empty_like(begin)
    started[order] = np.maximum.accumulate(begin[order] - places) + places
    return started


def _begun(group: RecordedGroup, server: RecordedServer) -> float:
    """When the group began to run: once the engine had the weights of its ticket."""
    loaded = next((end for _, end, version in server.loads if version >= group.version), group.started_s)
    return min(max(group.started_s, loaded), group.ended_s - 1e-6)


def _evaluated(group: RecordedGroup, evaluations: Sequence[Span]) -> bool:
    return any(begin < group.ended_s and group.started_s < end for begin, end in evaluations)

"""Timings of a run, fitted to its own files, and how well they fit.

    trainer   seconds of computing of every step against the tokens that it read: base_s + token_s * tokens, the
              residuals' spread as variation; where an engine worked beside it, trainer_beside
    engine    the time of every group against its longest sample and what ran beside it (`engine_fit`)
    weights   publishing (stall), from there to the server (transfer), loading; medians
    lengths   those of the run, in the order of its groups

One run has one mixture of overlap, so that how much the two sides slow each other follows only from two runs that
differ, such as S = 0 and S = 2. At the end the engine's speed is scaled so that the runs, simulated, are as fast and as
idle as they were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.app.simulate.engine_fit import fit_engine
from async_grpo.app.simulate.lengths import LengthModel
from async_grpo.app.simulate.recorded import RecordedGroup, RecordedRun, overlap_share
from async_grpo.app.simulate.results import WARM_STEPS, SimulatedFigures, figures_of
from async_grpo.app.simulate.settings import SimulatedSettings
from async_grpo.app.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings, VerifierTimings
from async_grpo.app.simulate.world import simulate
from async_grpo.errors import DataError
from async_grpo.telemetry.idle import merged, rollout_idle_share, trainer_idle_share
from async_grpo.telemetry.rows import Row, number, numbers

MOST_CALL_S = 0.1
"""Longest time between a publication and the ticket that it made room for."""
MOST_SCALE = 1.0
"""Largest logarithm of the factor by which the engine's speed is adjusted to whole runs."""
_BESIDES = np.linspace(1.0, 2.5, 61)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Timings, and how far they are from what they were fitted to."""

    timings: Timings
    trainer_error: float
    """Mean absolute error of a step's computing time, as a share of its mean."""
    engine_error: float
    """Mean absolute error of the time from a group's begin to its end, as a share of its mean."""
    notes: tuple[str, ...]
    """What could not be told from the runs, and what was assumed instead."""


def calibrate(runs: Sequence[RecordedRun]) -> Calibration:
    """Fit timings to one run, or to several of the same work. Raises DataError if they do not say enough."""
    notes: list[str] = []
    prompt_tokens = _prompt_tokens(runs)
    trainer, trainer_beside, trainer_error = _fit_trainer(runs, notes)
    engine, verifier, engine_beside, engine_error = _fit_engine(runs, notes)
    timings = Timings(
        source="calibrated on " + ", ".join(str(run.path) for run in runs),
        prompt_tokens=prompt_tokens,
        lengths=LengthModel(kind="recorded", recorded=_most_lengths(runs)),
        engine=engine,
        trainer=trainer,
        sync=_fit_sync(runs),
        verifier=verifier,
        trainer_beside=trainer_beside,
        engine_beside=engine_beside,
    )
    return Calibration(_balanced(timings, runs), trainer_error, engine_error, tuple(notes))


def _balanced(timings: Timings, runs: Sequence[RecordedRun]) -> Timings:
    """The timings with the engine's speed scaled so that the runs, simulated, are as fast and each side as idle as they
    were: small errors of single groups must not make the wrong side the bottleneck."""
    from scipy.optimize import minimize_scalar

    measured = [measure(run) for run in runs]
    settings = [SimulatedSettings.of(run.config) for run in runs]

    def misfit(log_scale: float) -> float:
        scaled = _scaled(timings, math.exp(log_scale))
        found = [figures_of(simulate(each, scaled)) for each in settings]
        return sum(_distance(figures, actual) for figures, actual in zip(found, measured, strict=True))

    best = minimize_scalar(misfit, bounds=(-MOST_SCALE, MOST_SCALE), method="bounded", options={"xatol": 0.01})
    return _scaled(timings, math.exp(best.x)) if best.fun < 0.8 * misfit(0.0) else timings


def _scaled(timings: Timings, scale: float) -> Timings:
    engine = timings.engine
    slower = {"step_s": engine.step_s * scale, "request_s": engine.request_s * scale}
    return timings.model_copy(update={"engine": engine.model_copy(update=slower)})


def _distance(figures: SimulatedFigures, actual: Measured) -> float:
    idle = (figures.trainer_idle - actual.trainer_idle) ** 2
    if actual.rollout_idle is not None:
        idle += (figures.rollout_idle - actual.rollout_idle) ** 2
    return idle + math.log(figures.tokens_per_s / actual.tokens_per_s) ** 2


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a recorded run, over the steps that `results.in_stride` would take."""

    tokens_per_s: float
    trainer_idle: float
    rollout_idle: float | None
    age_mean: float


def measure(run: RecordedRun) -> Measured:
    """The figures of a run that was made."""
    head = run.config.max_staleness + 1 + WARM_STEPS
    rows = run.steps[head : len(run.steps) - run.config.max_staleness]
    rows = rows if len(rows) >= 2 else run.steps[1:]
    spent_s, tokens = sum(numbers(rows, "step_s")), sum(numbers(rows, "trained_tokens"))
    ages = sum((number(row, "age_mean") or 0.0) * (number(row, "trained_tokens") or 0.0) for row in rows)
    busy = [
        [{"track": "generation", "start_s": g.started_s, "end_s": g.ended_s} for g in s.groups] for s in run.servers
    ]
    return Measured(
        tokens_per_s=tokens / spent_s,
        trainer_idle=trainer_idle_share(rows) or 0.0,
        rollout_idle=rollout_idle_share(rows, busy),
        age_mean=ages / max(1.0, tokens),
    )


def _generation(group: RecordedGroup) -> Row:
    return {"track": "generation", "start_s": group.started_s, "end_s": group.ended_s}


def _most_lengths(runs: Sequence[RecordedRun]) -> list[list[int]]:
    """The lengths of the run that knows most of them."""
    found = max((run.lengths for run in runs), key=len)
    if not found:
        raise DataError(
            f"{runs[0].path} has no lengths of completions: its timeline is of an older release, and it wrote no "
            "samples. Run it again, or give the lengths in a file of --timings"
        )
    return found


def _prompt_tokens(runs: Sequence[RecordedRun]) -> float:
    """Mean length of a prompt: what was read beyond the completions, whose last token is not read."""
    read = samples = completions = 0.0
    for run in runs:
        size = run.config.group_size
        known = [sum(lengths) / len(lengths) for lengths in run.lengths]
        for row in _whole(run.steps):
            count = (number(row, "groups") or 0) * size
            mean = number(row, "completion_tokens_mean") or (statistics.fmean(known) if known else 0.0)
            read, samples, completions = (
                read + (number(row, "read_tokens") or 0),
                samples + count,
                completions + count * mean,
            )
    return max(1.0, (read - completions) / samples + 1) if samples else 1.0


def _whole(steps: Iterable[Row]) -> list[Row]:
    """The steps that were trained, apart from the first of every process."""
    return [row for row in steps if number(row, "read_tokens") and number(row, "step_s") and not number(row, "start_s")]


# The trainer


def _fit_trainer(runs: Sequence[RecordedRun], notes: list[str]) -> tuple[TrainerTimings, float, float]:
    tokens, seconds, beside = (np.array(column) for column in zip(*_computing(runs), strict=True))
    spread = float(beside.max() - beside.min()) if len(runs) > 1 else 0.0
    slower = _BESIDES if spread > 0.3 else np.ones(1)
    found = [_line(tokens, seconds / (1 + (factor - 1) * beside)) for factor in slower]
    errors = [
        float(np.abs((base + slope * tokens) * (1 + (factor - 1) * beside) - seconds).mean())
        for (base, slope), factor in zip(found, slower, strict=True)
    ]
    best = int(np.argmin(errors))
    (base, slope), factor = found[best], float(slower[best])
    if spread <= 0.3:
        notes.append("how much engines slow the trainer down: one run does not tell; its own overlap is assumed")
    predicted = (base + slope * tokens) * (1 + (factor - 1) * beside)
    variation = float(np.std(seconds / predicted)) if len(seconds) > 4 else 0.0
    saves = [spent for run in runs for row in run.steps if (spent := number(row, "checkpoint_s") or 0) > 0.001]
    timings = TrainerTimings(
        base_s=base,
        token_s=slope,
        variation=variation,
        checkpoint_s=statistics.fmean(saves) if saves else 0.0,
        take_s=_median(_takes(runs), 0.002),
    )
    return timings, factor, errors[best] / float(seconds.mean())


def _computing(runs: Sequence[RecordedRun]) -> list[tuple[float, float, float]]:
    """Of every step: tokens read, seconds beside waiting and publishing, and in which share of it an engine worked."""
    found = []
    for run in runs:
        working = merged((group.started_s, group.ended_s) for group in run.groups)
        for row in _whole(run.steps):
            end, step_s = number(row, "time_s") or 0.0, number(row, "step_s") or 0.0
            idle = sum(number(row, key) or 0.0 for key in ("wait_s", "publish_s", "checkpoint_s"))
            spent = step_s - idle
            found.append((number(row, "read_tokens") or 0.0, spent, overlap_share((end - spent, end), working)))
    if not found:
        raise DataError(f"{runs[0].path} has no step after the first: nothing to fit the trainer's speed to")
    return found


def _line(tokens: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Base and slope, neither negative, with the least squared error."""
    from scipy.optimize import nnls

    solution, _ = nnls(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
    return float(solution[0]), float(solution[1])


def _takes(runs: Sequence[RecordedRun]) -> list[float]:
    """Seconds from the last group that a batch needed to the end of the trainer's wait."""
    found = []
    for run in runs:
        ends = np.array(sorted(group.ended_s for group in run.groups))
        for begin, end in run.waits:
            place = int(np.searchsorted(ends, end, side="right")) - 1
            if place >= 0 and end - begin > 0.01 and ends[place] > begin:
                found.append(float(end - ends[place]))
    return found


# Weights


def _fit_sync(runs: Sequence[RecordedRun]) -> SyncTimings:
    stalls = [end - begin for run in runs for begin, end in run.published.values()]
    transfers, loads = [], []
    for run in runs:
        for server in run.servers:
            for begin, end, version in server.loads[1:]:
                loads.append(end - begin)
                if version in run.published:
                    transfers.append(max(0.0, begin - run.published[version][1]))
    return SyncTimings(stall_s=_median(stalls, 0.0), transfer_s=_median(transfers, 0.0), load_s=_median(loads, 0.0))


def _median(values: Sequence[float], otherwise: float) -> float:
    return statistics.median(values) if values else otherwise


# The engine


def _fit_engine(runs: Sequence[RecordedRun], notes: list[str]) -> tuple[EngineTimings, VerifierTimings, float, float]:
    beside = [overlap_share((group.started_s, group.ended_s), run.computing) for run in runs for group in run.groups]
    fits_beside = len(runs) > 1 and max(beside) - min(beside) > 0.3
    if not fits_beside:
        notes.append("how much the trainer slows engines down: one run does not tell; its own overlap is assumed")
    fit = fit_engine(runs, fits_beside=fits_beside)
    if fit is None:
        raise DataError(
            f"{runs[0].path}: too few groups have known lengths to fit the engine's speed. Its timeline is of an older "
            "release; run it again"
        )
    engine = EngineTimings(
        step_s=fit.step_s, request_s=fit.request_s, prefill_s=0.0, call_s=_median(_calls(runs), 0.001)
    )
    return engine, VerifierTimings(latency_s=fit.latency_s), fit.beside, fit.error


def _calls(runs: Sequence[RecordedRun]) -> list[float]:
    """Seconds from the end of a publication to the ticket that waited for it."""
    found = []
    for run in runs:
        ends = np.array(sorted(end for _, end in run.published.values()))
        for server in run.servers:
            for begin, end in server.ticket_waits:
                place = int(np.searchsorted(ends, end, side="right")) - 1
                if place >= 0 and begin < ends[place] and end - ends[place] < MOST_CALL_S:
                    found.append(float(end - ends[place]))
    return found

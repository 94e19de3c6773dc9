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
from dataclasses import dataclass, replace

import numpy as np

from async_grpo.errors import DataError
from async_grpo.lab.simulate.engine_fit import fit_engine
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.recorded import RecordedGroup, RecordedRun, overlap_share, slowness
from async_grpo.lab.simulate.results import WARM_UP_STEPS, SimulatedMetrics, summarize_run
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings, VerifierTimings
from async_grpo.telemetry.idle import length, merged, overlap, rollout_idle_share, trainer_idle_share
from async_grpo.telemetry.metrics import COMPUTE
from async_grpo.telemetry.rows import Row, number, numbers

MOST_CALL_S = 0.1
"""Longest time between a publication and the ticket that it made room for."""
MOST_SCALE, MOST_TRIALS = 1.0, 60
"""Largest logarithm of the factors by which the engine's speed is adjusted to whole runs, and how many are tried."""
SLOW_JUDGING, STARVED = 0.1, 0.5
"""Share of a group's time from which on verifiers are slow, and of the run's from which on the source of tasks is."""
MOST_CONTENDED = 0.95
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
    factors = slowness(runs[-1].servers)
    generating = [_generating_alone(run) for run in runs]
    engine, latency_s, engine_beside, engine_error = _fit_engine(
        [_without_slow_servers(run) for run in generating], prompt_tokens, notes
    )
    timings = Timings(
        source="calibrated on " + ", ".join(str(run.path) for run in runs),
        prompt_tokens=prompt_tokens,
        lengths=LengthModel(kind="recorded", recorded=_most_lengths(runs)),
        engine=engine,
        trainer=trainer,
        sync=_fit_sync(runs),
        verifier=fit_verifier(runs, latency_s),
        trainer_beside=trainer_beside,
        engine_beside=engine_beside,
        task_s=fit_source(runs),
        slow_servers=[factor for factor in factors if factor > 1],
        engine_contended=statistics.fmean(_contended(run) for run in runs),
        trainer_contended=statistics.fmean(_trainer_contended(run) for run in runs),
    )
    balanced = _balanced(timings, generating, fits_beside=engine_beside > 1)
    return Calibration(balanced, trainer_error, engine_error, tuple(notes))


def _balanced(timings: Timings, runs: Sequence[RecordedRun], *, fits_beside: bool) -> Timings:
    """The timings with the engine's speed scaled so that the runs, simulated, are as fast and each side as idle as they
    were: small errors of single groups must not make the wrong side the bottleneck. `fits_beside`: how much slower it
    is beside the trainer is scaled too, since the runs tell the two apart.

    Evaluations are scaled to their own recorded seconds, before and after. If they were not, an evaluation that is
    simulated too long would be made up for by an engine that is too fast between evaluations: the throughput would
    agree, and every advice about either would be wrong."""
    from scipy.optimize import minimize

    measured = [measure(run) for run in runs]
    settings = [SimulatedSettings.from_config(run.config) for run in runs]

    start = [0.0, 0.0] if fits_beside else [0.0]
    bounds = [(-MOST_SCALE, MOST_SCALE)] * len(start)
    evaluates = any(actual.evaluations_s for actual in measured)
    for first_step in (0.1, 0.03) if evaluates else (0.1,):
        timings = _with_recorded_evaluations(timings, settings, measured)
        now = timings

        def misfit(logs: Sequence[float], now: Timings = now) -> float:
            found = [summarize_run(simulate(each, _scaled(now, *logs))) for each in settings]
            return sum(_distance(figures, actual) for figures, actual in zip(found, measured, strict=True))

        axes = range(len(start))
        simplex = [start, *([first_step * (axis == other) for other in axes] for axis in axes)]
        options = {"initial_simplex": simplex, "xatol": 0.01, "fatol": 1e-4, "maxfev": MOST_TRIALS}
        best = minimize(misfit, start, method="Nelder-Mead", bounds=bounds, options=options)
        timings = _scaled(timings, *best.x)
    return _with_recorded_evaluations(timings, settings, measured)


def _with_recorded_evaluations(
    timings: Timings, settings: Sequence[SimulatedSettings], measured: Sequence[Measured]
) -> Timings:
    """The timings with evaluations that take, simulated, as long as those of the runs."""
    pairs: list[tuple[float, float]] = []
    for each, actual in zip(settings, measured, strict=True):
        if actual.evaluations_s:
            simulated_s = [end - start for start, end in simulate(each, timings).evaluations]
            pairs += zip(simulated_s, actual.evaluations_s, strict=False)
    if not pairs:
        return timings
    ratio = sum(recorded for _, recorded in pairs) / sum(simulated for simulated, _ in pairs)
    return timings.model_copy(update={"evaluation_factor": timings.evaluation_factor * ratio})


def _scaled(timings: Timings, log_scale: float, log_beside: float = 0.0) -> Timings:
    """Engines slower by one factor, and beside the trainer by another one as well."""
    slower = {key: getattr(timings.engine, key) * math.exp(log_scale) for key in ("step_s", "request_s", "prefill_s")}
    engine = timings.engine.model_copy(update=slower)
    beside = max(1.0, timings.engine_beside * math.exp(log_beside))
    return timings.model_copy(update={"engine": engine, "engine_beside": beside})


def _distance(figures: SimulatedMetrics, actual: Measured) -> float:
    idle = (figures.trainer_idle - actual.trainer_idle) ** 2
    if actual.rollout_idle is not None:
        idle += (figures.rollout_idle - actual.rollout_idle) ** 2
    return idle + math.log(figures.tokens_per_s / actual.tokens_per_s) ** 2


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a recorded run, over the steps that `results.select_steady_steps` would take."""

    tokens_per_s: float
    trainer_idle: float
    rollout_idle: float | None
    age_mean: float
    evaluations_s: tuple[float, ...] = ()
    """Seconds of every evaluation, in their order. That of the final version is left out: a simulation ends before it,
    and it has the probe."""


def measure(run: RecordedRun) -> Measured:
    """The figures of a run that was made."""
    head = run.config.max_staleness + 1 + WARM_UP_STEPS
    rows = run.steps[head : len(run.steps) - run.config.max_staleness]
    rows = list(run.undisturbed(rows if len(rows) >= 2 else run.steps[1:]))
    spent_s, tokens = sum(numbers(rows, "step_s")), sum(numbers(rows, "trained_tokens"))
    ages = sum((number(row, "age_mean") or 0.0) * (number(row, "trained_tokens") or 0.0) for row in rows)
    evaluations = sorted(span for server in run.servers for span in server.evaluations)
    if len(run.steps) == run.config.steps:
        evaluations = evaluations[:-1]
    busy = [
        [{"track": "generation", "start_s": g.started_s, "end_s": g.ended_s} for g in s.groups] for s in run.servers
    ]
    return Measured(
        tokens_per_s=tokens / spent_s,
        trainer_idle=trainer_idle_share(rows) or 0.0,
        rollout_idle=rollout_idle_share(rows, busy),
        age_mean=ages / max(1.0, tokens),
        evaluations_s=tuple(end - start for start, end in evaluations),
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


def _fit_engine(
    runs: Sequence[RecordedRun], prompt_tokens: float, notes: list[str]
) -> tuple[EngineTimings, float, float, float]:
    """The engine, the seconds from a group's last token to its end, how much slower it is beside the trainer, and the
    error."""
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
        step_s=fit.step_s,
        request_s=fit.request_s,
        prefill_s=fit.prompt_s / prompt_tokens,
        call_s=_median(_calls(runs), 0.001),
    )
    return engine, fit.latency_s, fit.beside, fit.error


def _without_slow_servers(run: RecordedRun) -> RecordedRun:
    factors = slowness(run.servers)
    return replace(run, servers=[server for server, factor in zip(run.servers, factors, strict=True) if factor == 1])


def _generating_alone(run: RecordedRun) -> RecordedRun:
    """The run with groups that end with their last token, if its verifiers are slow."""
    if not _judges_slowly(run):
        return run
    servers = [
        replace(
            server,
            groups=[replace(group, ended_s=group.ended_s - group.judged_s, judged_s=0.0) for group in server.groups],
        )
        for server in run.servers
    ]
    return replace(run, servers=servers)


# What holds engines up


def _judges_slowly(run: RecordedRun) -> bool:
    spans = [group.ended_s - group.started_s for group in run.groups]
    return statistics.median(group.judged_s for group in run.groups) >= SLOW_JUDGING * statistics.median(spans)


def fit_verifier(runs: Sequence[RecordedRun], latency_s: float) -> VerifierTimings:
    """Slow verifiers: seconds of a sample, from how many were judged while any was."""
    slow = [run for run in runs if _judges_slowly(run)]
    if not slow:
        return VerifierTimings(latency_s=latency_s)
    found, workers = [], slow[0].config.rewards.workers
    for run in slow:
        for server in run.servers:
            busy_s = length(merged((group.ended_s - group.judged_s, group.ended_s) for group in server.groups))
            waiting = sum(group.judged_s for group in server.groups) * run.config.group_size / busy_s
            found.append(busy_s * min(workers, waiting) / (len(server.groups) * run.config.group_size))
    return VerifierTimings(latency_s=latency_s, sample_s=statistics.fmean(found), workers=workers)


def fit_source(runs: Sequence[RecordedRun]) -> float:
    """Seconds of a slow source for one task: of the time without tasks, what each group took that began in it or right
    after. 0 if there mostly were tasks."""
    found = []
    for run in runs:
        spans = ((begin, end + MOST_CALL_S) for server in run.servers for begin, end in server.starved)
        starved = overlap([run.window], merged(spans))
        begun = sum(any(begin <= group.started_s < end for begin, end in starved) for group in run.groups)
        if begun and length(starved) >= STARVED * (run.window[1] - run.window[0]):
            found.append(length(starved) / begun)
    return _median(found, 0.0)


def _contended(run: RecordedRun) -> float:
    """Share of the time in which engines generated for which they waited for a processor."""
    waited = sum(server.contended_s(run.window) for server in run.servers)
    generated = [merged((group.started_s, group.ended_s) for group in server.groups) for server in run.servers]
    return min(MOST_CONTENDED, waited / max(1e-9, sum(length(overlap([run.window], spans)) for spans in generated)))


def _trainer_contended(run: RecordedRun) -> float:
    computing_s = sum(sum(numbers(run.steps[1:], f"{phase}_s")) for phase in COMPUTE)
    return min(MOST_CONTENDED, sum(numbers(run.steps[1:], "cpu_wait_s")) / max(1e-9, computing_s))


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

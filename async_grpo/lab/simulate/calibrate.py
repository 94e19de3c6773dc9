"""Fits timings to the files of recorded runs.

    trainer   computing seconds of each step against the tokens that it read: base_s + token_s * tokens; the spread of
              the residuals is `variation`; the slowdown while an engine works is trainer_beside
    engine    seconds of each group against its longest sample and its load (`engine_fit`)
    weights   medians of publishing (stall), of the time from there to the server (transfer), and of loading
    lengths   those of the run, in the order of its groups

In one run, the overlap of the two sides is nearly constant, so how much they slow each other follows only from two runs
that differ, such as S = 0 and S = 2. Finally the engine's speed is scaled so that the simulated runs have the speed and
the idle fractions of the recorded ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from async_grpo.errors import DataError
from async_grpo.lab.simulate.engine_fit import fit_engine
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.recorded import RecordedRun, covered_fraction, server_slowdowns
from async_grpo.lab.simulate.results import WARM_UP_STEPS, SimulatedMetrics, summarize_run
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings, VerifierTimings
from async_grpo.telemetry.idle import length, merged, overlap, rollout_idle_share, trainer_idle_share
from async_grpo.telemetry.metrics import COMPUTE
from async_grpo.telemetry.rows import Row, number, numbers

Floats = npt.NDArray[np.float64]
MAX_CALL_S = 0.1
"""Maximum seconds from a publication to the ticket that it made room for."""
MAX_LOG_SCALE = 1.0
"""Bound on the logarithm of the factors that scale the engine's speed to whole runs."""
MAX_TRIALS = 60
"""Maximum number of factors that are tried."""
SLOW_JUDGING = 0.1
"""Fraction of a group's time from which verifiers count as slow."""
STARVED = 0.5
"""Fraction of a run without tasks from which its task source counts as slow."""
MAX_CONTENDED = 0.95
MIN_OVERLAP_SPREAD = 0.3
"""Minimum difference in overlap between steps, or groups, for a fit of how much one side slows the other."""
_SLOWDOWNS = np.linspace(1.0, 2.5, 61)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted timings and their errors."""

    timings: Timings
    trainer_error: float
    """Mean absolute error of a step's computing time, as a fraction of its mean."""
    engine_error: float
    """Mean absolute error of the time from a group's start to its end, as a fraction of its mean."""
    notes: tuple[str, ...]
    """What the runs leave open, and what was assumed instead."""


@dataclass(frozen=True, slots=True)
class MeasuredMetrics:
    """Metrics of a recorded run over its steady-state steps. The field names are keys of tune.json."""

    tokens_per_s: float
    trainer_idle: float
    rollout_idle: float | None
    age_mean: float
    evaluations_s: tuple[float, ...] = ()
    """Seconds of every evaluation, in their order. The final version's is left out: a simulation ends before it, and it
    includes the probe."""


def calibrate(runs: Sequence[RecordedRun]) -> Calibration:
    """Fit timings to one run, or to several of the same work. Raises DataError if their files hold too little."""
    notes: list[str] = []
    prompt_tokens = _mean_prompt_tokens(runs)
    trainer = _fit_trainer(runs, notes)
    generation_runs = [_without_slow_judging(run) for run in runs]
    engine = _fit_engine([_without_slow_servers(run) for run in generation_runs], prompt_tokens, notes)

    timings = Timings(
        source="calibrated on " + ", ".join(str(run.path) for run in runs),
        prompt_tokens=prompt_tokens,
        lengths=LengthModel(kind="recorded", recorded=_recorded_lengths(runs)),
        engine=engine.timings,
        trainer=trainer.timings,
        sync=_fit_sync(runs),
        verifier=fit_verifier(runs, engine.latency_s),
        trainer_beside=trainer.slowdown,
        engine_beside=engine.slowdown,
        task_s=fit_task_source(runs),
        slow_servers=[factor for factor in server_slowdowns(runs[-1].servers) if factor > 1],
        engine_contended=statistics.fmean(_contended_engine_fraction(run) for run in runs),
        trainer_contended=statistics.fmean(_contended_trainer_fraction(run) for run in runs),
    )
    timings = _scale_to_runs(timings, generation_runs, fits_slowdown=engine.slowdown > 1)
    return Calibration(timings, trainer.error, engine.error, tuple(notes))


def measure_run(run: RecordedRun) -> MeasuredMetrics:
    """Compute the metrics of a recorded run over the steps that `results.select_steady_steps` would select."""
    first = run.config.max_staleness + 1 + WARM_UP_STEPS
    rows = run.steps[first : len(run.steps) - run.config.max_staleness]
    if len(rows) < 2:
        rows = run.steps[1:]
    rows = list(run.without_outages(rows))

    steady_s = sum(numbers(rows, "step_s"))
    tokens = sum(numbers(rows, "trained_tokens"))
    token_ages = sum((number(row, "age_mean") or 0.0) * (number(row, "trained_tokens") or 0.0) for row in rows)

    evaluations = sorted(span for server in run.servers for span in server.evaluations)
    if len(run.steps) == run.config.steps:
        evaluations = evaluations[:-1]

    generation: list[list[Row]] = []
    for server in run.servers:
        generation.append(
            [{"track": "generation", "start_s": group.started_s, "end_s": group.ended_s} for group in server.groups]
        )
    return MeasuredMetrics(
        tokens_per_s=tokens / steady_s,
        trainer_idle=trainer_idle_share(rows) or 0.0,
        rollout_idle=rollout_idle_share(rows, generation),
        age_mean=token_ages / max(1.0, tokens),
        evaluations_s=tuple(end - start for start, end in evaluations),
    )


# Scaling to whole runs


def _scale_to_runs(timings: Timings, runs: Sequence[RecordedRun], *, fits_slowdown: bool) -> Timings:
    """Scale the engine's speed so that the simulated runs have the speed and the idle fractions of the recorded ones.

    Otherwise small errors of single groups could make the wrong side the bottleneck. `fits_slowdown`: the engine's
    slowdown next to the trainer is scaled, too, because the runs distinguish it from the speed.

    Evaluations are scaled to their own recorded seconds, before and after. If they were not, too long a simulated
    evaluation would be compensated by an engine that is too fast between evaluations: the throughput would agree, but
    every advice about either would be wrong.
    """
    from scipy.optimize import minimize

    measured = [measure_run(run) for run in runs]
    settings = [SimulatedSettings.from_config(run.config) for run in runs]
    has_evaluations = any(metrics.evaluations_s for metrics in measured)

    start = [0.0, 0.0] if fits_slowdown else [0.0]
    bounds = [(-MAX_LOG_SCALE, MAX_LOG_SCALE)] * len(start)
    for first_step in (0.1, 0.03) if has_evaluations else (0.1,):
        timings = _scale_evaluations(timings, settings, measured)
        unscaled = timings

        def misfit(logs: Sequence[float], unscaled: Timings = unscaled) -> float:
            scaled = _scale_engine(unscaled, *logs)
            simulated = [summarize_run(simulate(run_settings, scaled)) for run_settings in settings]
            return sum(_distance(metrics, actual) for metrics, actual in zip(simulated, measured, strict=True))

        # The default first simplex of Nelder-Mead is far too small for a start at 0.
        simplex = [start]
        for axis in range(len(start)):
            simplex.append([first_step if axis == other else 0.0 for other in range(len(start))])
        options = {"initial_simplex": simplex, "xatol": 0.01, "fatol": 1e-4, "maxfev": MAX_TRIALS}
        best = minimize(misfit, start, method="Nelder-Mead", bounds=bounds, options=options)
        timings = _scale_engine(timings, *best.x)
    return _scale_evaluations(timings, settings, measured)


def _scale_evaluations(
    timings: Timings, settings: Sequence[SimulatedSettings], measured: Sequence[MeasuredMetrics]
) -> Timings:
    """Scale evaluations so that the simulated ones take as long as the recorded ones."""
    simulated_s: list[float] = []
    recorded_s: list[float] = []
    for run_settings, metrics in zip(settings, measured, strict=True):
        if metrics.evaluations_s:
            spans = simulate(run_settings, timings).evaluations
            # A run that is still live has fewer evaluations than its simulation.
            for (start, end), seconds in zip(spans, metrics.evaluations_s, strict=False):
                simulated_s.append(end - start)
                recorded_s.append(seconds)
    if not simulated_s:
        return timings
    ratio = sum(recorded_s) / sum(simulated_s)
    return timings.model_copy(update={"evaluation_factor": timings.evaluation_factor * ratio})


def _scale_engine(timings: Timings, log_factor: float, log_slowdown_factor: float = 0.0) -> Timings:
    """Make engines slower by one factor, and by another one while the trainer computes."""
    engine = timings.engine
    changed = {key: getattr(engine, key) * math.exp(log_factor) for key in ("step_s", "request_s", "prefill_s")}
    slowdown = max(1.0, timings.engine_beside * math.exp(log_slowdown_factor))
    return timings.model_copy(update={"engine": engine.model_copy(update=changed), "engine_beside": slowdown})


def _distance(simulated: SimulatedMetrics, measured: MeasuredMetrics) -> float:
    """Sum of the squared errors of the idle fractions and of the logarithm of the speed."""
    squares = (simulated.trainer_idle - measured.trainer_idle) ** 2
    if measured.rollout_idle is not None:
        squares += (simulated.rollout_idle - measured.rollout_idle) ** 2
    return squares + math.log(simulated.tokens_per_s / measured.tokens_per_s) ** 2


# Lengths


def _recorded_lengths(runs: Sequence[RecordedRun]) -> list[list[int]]:
    """Lengths of the run that recorded the most groups."""
    lengths = max((run.lengths for run in runs), key=len)
    if not lengths:
        raise DataError(
            f"{runs[0].path} has no completion lengths: its timeline is from an older release, and it wrote no "
            "samples. Run it again, or set the lengths in a file for --timings"
        )
    return lengths


def _mean_prompt_tokens(runs: Sequence[RecordedRun]) -> float:
    """Mean prompt length: tokens read minus completions, whose last token is not read."""
    read_tokens = 0.0
    samples = 0.0
    completion_tokens = 0.0
    for run in runs:
        group_means = [sum(lengths) / len(lengths) for lengths in run.lengths]
        for row in _trained_steps(run.steps):
            count = (number(row, "groups") or 0) * run.config.group_size
            mean = number(row, "completion_tokens_mean")
            if not mean:
                mean = statistics.fmean(group_means) if group_means else 0.0
            read_tokens += number(row, "read_tokens") or 0
            samples += count
            completion_tokens += count * mean
    if not samples:
        return 1.0
    return max(1.0, (read_tokens - completion_tokens) / samples + 1)


def _trained_steps(steps: Iterable[Row]) -> list[Row]:
    """Steps that trained, except the first of each process, which includes its start-up."""
    return [row for row in steps if number(row, "read_tokens") and number(row, "step_s") and not number(row, "start_s")]


# The trainer


class _TrainerFit(NamedTuple):
    timings: TrainerTimings
    slowdown: float
    """Factor by which the trainer is slower while an engine works."""
    error: float


class _ComputedStep(NamedTuple):
    read_tokens: float
    seconds: float
    """Seconds without waiting, publishing and checkpoints."""
    overlap: float
    """Fraction of these in which an engine worked."""


def _fit_trainer(runs: Sequence[RecordedRun], notes: list[str]) -> _TrainerFit:
    """Fit seconds = (base_s + token_s * tokens) * (1 + (slowdown - 1) * overlap)."""
    steps = _computed_steps(runs)
    tokens, seconds, overlaps = (np.array(column) for column in zip(*steps, strict=True))

    overlap_spread = float(overlaps.max() - overlaps.min()) if len(runs) > 1 else 0.0
    fits_slowdown = overlap_spread > MIN_OVERLAP_SPREAD
    if not fits_slowdown:
        notes.append("how much engines slow the trainer: a single run leaves that open; its own overlap is assumed")

    # For a given slowdown the line is a linear problem, so search over slowdowns.
    lines: list[tuple[float, float]] = []
    errors: list[float] = []
    slowdowns = _SLOWDOWNS if fits_slowdown else np.ones(1)
    for slowdown in slowdowns:
        base_s, token_s = _fit_line(tokens, seconds / (1 + (slowdown - 1) * overlaps))
        predicted = (base_s + token_s * tokens) * (1 + (slowdown - 1) * overlaps)
        lines.append((base_s, token_s))
        errors.append(float(np.abs(predicted - seconds).mean()))
    best = int(np.argmin(errors))
    base_s, token_s = lines[best]
    slowdown = float(slowdowns[best])

    predicted = (base_s + token_s * tokens) * (1 + (slowdown - 1) * overlaps)
    checkpoints_s = [
        checkpoint_s for run in runs for checkpoint_s in numbers(run.steps, "checkpoint_s") if checkpoint_s > 0.001
    ]
    timings = TrainerTimings(
        base_s=base_s,
        token_s=token_s,
        variation=float(np.std(seconds / predicted)) if len(seconds) > 4 else 0.0,
        checkpoint_s=statistics.fmean(checkpoints_s) if checkpoints_s else 0.0,
        take_s=_median(_take_durations(runs), default=0.002),
    )
    return _TrainerFit(timings, slowdown, errors[best] / float(seconds.mean()))


def _computed_steps(runs: Sequence[RecordedRun]) -> list[_ComputedStep]:
    steps: list[_ComputedStep] = []
    for run in runs:
        generating = merged((group.started_s, group.ended_s) for group in run.groups)
        for row in _trained_steps(run.steps):
            end_s = number(row, "time_s") or 0.0
            step_s = number(row, "step_s") or 0.0
            idle_s = sum(number(row, key) or 0.0 for key in ("wait_s", "publish_s", "checkpoint_s"))
            seconds = step_s - idle_s
            overlap_fraction = covered_fraction((end_s - seconds, end_s), generating)
            steps.append(_ComputedStep(number(row, "read_tokens") or 0.0, seconds, overlap_fraction))
    if not steps:
        raise DataError(f"{runs[0].path} has no step after the first, so the trainer's speed cannot be fitted")
    return steps


def _fit_line(tokens: Floats, seconds: Floats) -> tuple[float, float]:
    """Intercept and slope by least squares, neither negative."""
    from scipy.optimize import nnls

    solution, _ = nnls(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
    return float(solution[0]), float(solution[1])


def _take_durations(runs: Sequence[RecordedRun]) -> list[float]:
    """Seconds from the last group that a batch needed to the end of the trainer's wait."""
    durations: list[float] = []
    for run in runs:
        group_ends = np.array(sorted(group.ended_s for group in run.groups))
        for start, end in run.waits:
            last = int(np.searchsorted(group_ends, end, side="right")) - 1
            if last >= 0 and end - start > 0.01 and group_ends[last] > start:
                durations.append(float(end - group_ends[last]))
    return durations


# Weights


def _fit_sync(runs: Sequence[RecordedRun]) -> SyncTimings:
    stalls_s = [end - start for run in runs for start, end in run.published.values()]
    transfers_s: list[float] = []
    loads_s: list[float] = []
    for run in runs:
        for server in run.servers:
            # The first load is that of the start-up.
            for start, end, version in server.loads[1:]:
                loads_s.append(end - start)
                if version in run.published:
                    transfers_s.append(max(0.0, start - run.published[version][1]))
    return SyncTimings(
        stall_s=_median(stalls_s, default=0.0),
        transfer_s=_median(transfers_s, default=0.0),
        load_s=_median(loads_s, default=0.0),
    )


def _median(values: Sequence[float], *, default: float) -> float:
    return statistics.median(values) if values else default


# The engine


class _EngineFit(NamedTuple):
    timings: EngineTimings
    latency_s: float
    """Seconds from a group's last token to its end."""
    slowdown: float
    """Factor by which the engine is slower while the trainer computes."""
    error: float


def _fit_engine(runs: Sequence[RecordedRun], prompt_tokens: float, notes: list[str]) -> _EngineFit:
    overlaps = [
        covered_fraction((group.started_s, group.ended_s), run.computing) for run in runs for group in run.groups
    ]
    fits_slowdown = len(runs) > 1 and max(overlaps) - min(overlaps) > MIN_OVERLAP_SPREAD
    if not fits_slowdown:
        notes.append("how much the trainer slows engines: a single run leaves that open; its own overlap is assumed")

    fit = fit_engine(runs, fits_slowdown=fits_slowdown)
    if fit is None:
        raise DataError(
            f"{runs[0].path}: too few groups have recorded lengths to fit the engine's speed. Its timeline is from an "
            "older release; run it again"
        )
    timings = EngineTimings(
        step_s=fit.step_s,
        request_s=fit.request_s,
        prefill_s=fit.prompt_s / prompt_tokens,
        call_s=_median(_call_durations(runs), default=0.001),
    )
    return _EngineFit(timings, fit.latency_s, fit.slowdown, fit.error)


def _call_durations(runs: Sequence[RecordedRun]) -> list[float]:
    """Seconds from the end of a publication to the ticket that waited for it."""
    durations: list[float] = []
    for run in runs:
        publication_ends = np.array(sorted(end for _, end in run.published.values()))
        for server in run.servers:
            for start, end in server.ticket_waits:
                last = int(np.searchsorted(publication_ends, end, side="right")) - 1
                if last >= 0 and start < publication_ends[last] and end - publication_ends[last] < MAX_CALL_S:
                    durations.append(float(end - publication_ends[last]))
    return durations


def _without_slow_servers(run: RecordedRun) -> RecordedRun:
    """Copy of the run without its slow servers, which would distort the fit of the others."""
    slowdowns = server_slowdowns(run.servers)
    servers = [server for server, slowdown in zip(run.servers, slowdowns, strict=True) if slowdown == 1]
    return replace(run, servers=servers)


def _without_slow_judging(run: RecordedRun) -> RecordedRun:
    """Copy of the run whose groups end with their last token, if its verifiers are slow."""
    if not _judges_slowly(run):
        return run
    servers = [
        replace(
            server,
            groups=[replace(group, ended_s=group.generated_at_s, judged_s=0.0) for group in server.groups],
        )
        for server in run.servers
    ]
    return replace(run, servers=servers)


# Verifiers, task source, processors


def _judges_slowly(run: RecordedRun) -> bool:
    group_s = statistics.median([group.ended_s - group.started_s for group in run.groups])
    return statistics.median(group.judged_s for group in run.groups) >= SLOW_JUDGING * group_s


def fit_verifier(runs: Sequence[RecordedRun], latency_s: float) -> VerifierTimings:
    """Fit the seconds per sample of slow verifiers: their busy time, divided by the samples judged in it."""
    slow_runs = [run for run in runs if _judges_slowly(run)]
    if not slow_runs:
        return VerifierTimings(latency_s=latency_s)

    workers = slow_runs[0].config.rewards.workers
    samples_s: list[float] = []
    for run in slow_runs:
        size = run.config.group_size
        for server in run.servers:
            busy_s = length(merged((group.generated_at_s, group.ended_s) for group in server.groups))
            waiting_samples = sum(group.judged_s for group in server.groups) * size / busy_s
            samples_s.append(busy_s * min(workers, waiting_samples) / (len(server.groups) * size))
    return VerifierTimings(latency_s=latency_s, sample_s=statistics.fmean(samples_s), workers=workers)


def fit_task_source(runs: Sequence[RecordedRun]) -> float:
    """Fit the seconds per task of a slow source: the time without tasks, per group that started in it or right after.

    0 if tasks were available most of the time.
    """
    tasks_s: list[float] = []
    for run in runs:
        # The group of a task starts a moment after the wait for it has ended.
        extended = merged((start, end + MAX_CALL_S) for server in run.servers for start, end in server.starved)
        starved = overlap([run.window], extended)
        started_groups = sum(any(start <= group.started_s < end for start, end in starved) for group in run.groups)
        if started_groups and length(starved) >= STARVED * (run.window[1] - run.window[0]):
            tasks_s.append(length(starved) / started_groups)
    return _median(tasks_s, default=0.0)


def _contended_engine_fraction(run: RecordedRun) -> float:
    """Fraction of the generating time for which engines waited for a processor."""
    waited_s = sum(server.contended_s(run.window) for server in run.servers)
    generation = [merged((group.started_s, group.ended_s) for group in server.groups) for server in run.servers]
    generating_s = sum(length(overlap([run.window], spans)) for spans in generation)
    return min(MAX_CONTENDED, waited_s / max(1e-9, generating_s))


def _contended_trainer_fraction(run: RecordedRun) -> float:
    """Fraction of the computing time for which the trainer waited for a processor."""
    computing_s = sum(sum(numbers(run.steps[1:], f"{phase}_s")) for phase in COMPUTE)
    waited_s = sum(numbers(run.steps[1:], "cpu_wait_s"))
    return min(MAX_CONTENDED, waited_s / max(1e-9, computing_s))

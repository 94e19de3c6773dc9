"""The bench of the whole loop: the same work, synchronous and asynchronous, on the same cores.

    one core       rollout server: vLLM engine, receiver, verifiers      --groups--> buffer (Valkey)
    another one    trainer: Megatron rank, publisher        <--batches, weights-->
    any            supervisor, Valkey

    calibration (S = 0, prompts of two lengths) --> length of the prompts at which T_gen = T_train
    repetitions x S: `async-grpo run`, in turns --> metrics per S, overlap bound from the runs with S = 0

Every run is real (supervisor, embedded Valkey, engine, trainer), on work that is prescribed to the token (`workload`)
and checked afterwards (`observe.check_work`). Only the timed part of a run counts (`workload.StepPlan`). `results`
defines the comparisons.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import Progress

from async_grpo.app.launch.role_process import available_cores
from async_grpo.errors import ConfigError
from async_grpo.lab.bench.measure import Measurement, Picture, measure_load_average
from async_grpo.lab.bench.pipeline.observe import (
    RunMetrics,
    RunRecord,
    check_work,
    measure_run,
    read_record,
    step_times,
    timed_rows,
)
from async_grpo.lab.bench.pipeline.results import (
    PipelineResults,
    PromptProbe,
    Sides,
    balance_prompt,
    make_measurements,
    rotate_order,
    write_plot,
)
from async_grpo.lab.bench.pipeline.results import view as view  # replaces the usual table
from async_grpo.lab.bench.pipeline.setup import (
    POLICY,
    TINY,
    PipelineSetup,
    measure_core_interference,
    run_all,
    split_cores,
)
from async_grpo.lab.bench.pipeline.workload import VOCABULARY, FixedWork, Kind, StepPlan, describe_lengths, draw_lengths
from async_grpo.lab.bench.rollout.workload import number_model
from async_grpo.telemetry.logging import configure_logging

STALENESS = "0,1,2,4,8"
REPETITIONS = 3
STEPS = 12
QUICK_STALENESS = "0,2"
QUICK_REPETITIONS = 1
QUICK_STEPS = 2
GROUPS_PER_STEP = 4
GROUP_SIZE = 8
PROBED_PROMPTS = (16, 128)
"""Lengths of the calibration's prompts in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Checked options of the bench."""

    staleness: tuple[int, ...]
    repetitions: int
    steps: int
    """M: timed steps per run."""
    lengths: Kind = "lognormal"
    lengths_from: Path | None = None
    prompt_tokens: int | None = None
    """Length of the prompts; None for the length at which both sides take equally long."""
    cores: int = 1
    """Cores per side."""
    quick: bool = False


def check_options(
    *, quick: bool, staleness: str = "", repetitions: int | None = None, steps: int | None = None, **others: Any
) -> PipelineOptions:
    """Return the options with their defaults. Raises ConfigError for a list of S without the baseline.

    >>> check_options(quick=False, staleness="0,2").staleness
    (0, 2)
    """
    text = staleness or (QUICK_STALENESS if quick else STALENESS)
    values = [part.strip() for part in text.split(",")]
    numbers = tuple(int(value) for value in values if value.isdecimal())
    if len(numbers) < len(values) or 0 not in numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"--staleness is {text!r}, but must be distinct whole numbers including 0, the synchronous loop with which "
            "the others are compared. Give for example --staleness 0,2"
        )
    return PipelineOptions(
        staleness=numbers,
        repetitions=repetitions or (QUICK_REPETITIONS if quick else REPETITIONS),
        steps=steps or (QUICK_STEPS if quick else STEPS),
        quick=quick,
        **others,
    )


async def measure(
    progress: Progress,
    *,
    quick: bool,
    out: Path | None = None,
    picture: Callable[[Picture], None] = lambda _: None,
    **options: Any,
) -> list[Measurement]:
    """Run the bench with the options of `check_options`.

    The runs are kept in `out` if it is given, otherwise only if one of them fails. `picture` is called with a function
    that draws the plot into a file.

    Raises ConfigError, DataError, RoleFailed if a run fails, EngineError if a run did other work.
    """
    configure_logging("bench")
    chosen = check_options(quick=quick, **options)
    split = split_cores(available_cores(), chosen.cores)
    interference = measure_core_interference(split)
    with _open_folder(out, lambda line: progress.console.print(line, markup=False, soft_wrap=True)) as folder:
        shape = TINY if chosen.quick else POLICY
        number_model(folder / "model", shape, VOCABULARY)
        setup = PipelineSetup(folder, folder / "model", shape, split)
        work = _draw_work(chosen)
        if chosen.prompt_tokens is None:
            work = await _balance_prompts(setup, work, progress)
        results = await _compare(setup, work, chosen, progress)
    subtitle = f"{describe_lengths(chosen.lengths)}; {chosen.cores} core(s) per side; {chosen.repetitions} repetitions"
    picture(lambda path: write_plot(path, results, subtitle))

    measurements = make_measurements(results)
    if interference is not None:
        measurements.append(Measurement("speed of a core while the other side computes", interference, "x"))
    return [
        *measurements,
        Measurement("prompts", work.prompt_tokens[0], "tokens"),
        Measurement("completion tokens of a timed part", work.tokens, "tokens"),
        measure_load_average(),
    ]


def _draw_work(chosen: PipelineOptions) -> FixedWork:
    groups, size = (2, 4) if chosen.quick else (GROUPS_PER_STEP, GROUP_SIZE)
    lengths = draw_lengths(chosen.lengths, chosen.steps * groups * size, seed=1, recorded=chosen.lengths_from)
    return FixedWork(groups, size, lengths, (chosen.prompt_tokens or PROBED_PROMPTS[0],) * chosen.steps)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the bench."""

    name: str
    work: FixedWork
    plan: StepPlan


async def _balance_prompts(setup: PipelineSetup, work: FixedWork, progress: Progress) -> FixedWork:
    """Return the work with prompts for which both sides take equally long, measured by a run with two lengths."""
    probing = make_probing_work(work)
    run = PlannedRun("calibration", probing, StepPlan(0, probing.steps))
    (record,) = await _run_and_check(setup, [run], progress)
    short, long = read_probes(record, probing, run.plan)
    return replace(work, prompt_tokens=(balance_prompt(short, long),) * work.steps)


def make_probing_work(work: FixedWork) -> FixedWork:
    """Return every step of the period twice, once with short and once with long prompts, alternating."""
    short, long = PROBED_PROMPTS
    first_pass = [long if step % 2 else short for step in range(work.steps)]
    second_pass = [short if step % 2 else long for step in range(work.steps)]
    return replace(work, lengths=work.lengths * 2, prompt_tokens=(*first_pass, *second_pass))


def read_probes(record: RunRecord, probing: FixedWork, plan: StepPlan) -> list[PromptProbe]:
    """Return the times of both sides for each of the two prompt lengths, the shorter one first."""
    rows = timed_rows(record, plan)
    times = step_times(record, plan)
    prompts = [probing.prompt_tokens[int(row["version"]) % probing.steps] for row in rows]
    probes = []
    for tokens in PROBED_PROMPTS:
        own_times = [time for prompt, time in zip(prompts, times, strict=True) if prompt == tokens]
        waits, rests = zip(*own_times, strict=True)
        probes.append(PromptProbe(tokens, Sides(fmean(waits), fmean(rests))))
    return probes


async def _compare(
    setup: PipelineSetup, work: FixedWork, chosen: PipelineOptions, progress: Progress
) -> PipelineResults:
    order = rotate_order(chosen.staleness, chosen.repetitions)
    runs = [PlannedRun(f"s{s}-r{repetition + 1}", work, StepPlan(s, work.steps)) for repetition, s in order]
    records = await _run_and_check(setup, runs, progress)
    metrics: dict[int, list[RunMetrics]] = {staleness: [] for staleness in chosen.staleness}
    for run, record in zip(runs, records, strict=True):
        metrics[run.plan.max_staleness].append(measure_run(record, work, run.plan))
    return PipelineResults(metrics)


async def _run_and_check(setup: PipelineSetup, runs: Sequence[PlannedRun], progress: Progress) -> list[RunRecord]:
    """Run one after another, check the work of each and return their records."""
    configs = [setup.build_config(run.name, run.work, run.plan) for run in runs]
    task = progress.add_task(runs[0].name, total=len(configs))

    def show(current: str, finished: int) -> None:
        progress.update(task, description=current, completed=finished)

    await run_all(setup.folder, configs, show)
    show(runs[0].name if len(runs) == 1 else "runs", len(configs))
    records = [read_record(config.run_dir) for config in configs]
    for record, run in zip(records, runs, strict=True):
        check_work(record, run.work, run.plan, run.name)
    return records


@contextmanager
def _open_folder(out: Path | None, report_progress: Callable[[str], None]) -> Iterator[Path]:
    """Yield the folder of the runs: `out`, which must be empty and is kept, or a temporary one.

    The temporary folder is kept only after a failure, because the error names logs in it.
    """
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"--out: {out} is not empty, and the runs in it would be resumed. Use a new folder")
        out.mkdir(parents=True, exist_ok=True)
        yield out.absolute()
        return

    folder = Path(tempfile.mkdtemp(prefix="async-grpo-bench-"))
    is_needed = False
    try:
        yield folder
    except Exception:  # the logs of any failure are needed; Ctrl-C is no failure
        is_needed = True
        report_progress(f"The runs and their logs are kept in {folder}. Delete it when you have read them")
        raise
    finally:
        if not is_needed:
            shutil.rmtree(folder, ignore_errors=True)

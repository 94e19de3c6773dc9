"""The bench of the whole loop: the same work, synchronous and asynchronous, on the same cores.

    one core       rollout server: vLLM engine, receiver, verifiers      --groups--> buffer (Valkey)
    another one    trainer: Megatron rank, publisher        <--batches, weights-->
    any            supervisor, Valkey

    calibration (S = 0, prompts of two lengths) --> length of the prompts at which T_gen = T_train
    repetitions x S: `async-grpo run`, in turns --> figures per S, overlap bound from the runs with S = 0

Every run is a real one (supervisor, embedded Valkey, real engine, real trainer), on work that is prescribed to the
token (`workload`) and checked afterwards (`observe.check`). Only the timed part of a run counts (`workload.StepPlan`).
`results` says what is compared with what.
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
    Observed,
    RunRecord,
    check,
    observe,
    read_record,
    step_times,
    timed_rows,
)
from async_grpo.lab.bench.pipeline.results import (
    PromptProbe,
    Results,
    Sides,
    balanced_prompt,
    figures_of,
    rotated_turns,
    write_plot,
)
from async_grpo.lab.bench.pipeline.results import view as view  # shown in place of the usual table
from async_grpo.lab.bench.pipeline.setup import POLICY, TINY, PipelineSetup, run_all, speed_beside, split_cores
from async_grpo.lab.bench.pipeline.workload import VOCABULARY, FixedWork, Kind, StepPlan, describe, draw
from async_grpo.lab.bench.rollout.workload import number_model
from async_grpo.telemetry.logging import configure_logging

STALENESS, REPETITIONS, STEPS = "0,1,2,4,8", 3, 12
QUICK_STALENESS, QUICK_REPETITIONS, QUICK_STEPS = "0,2", 1, 2
GROUPS_PER_STEP, GROUP_SIZE = 4, 8
PROBED = (16, 128)
"""Tokens of the prompts of the calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of the bench, checked."""

    staleness: tuple[int, ...]
    repetitions: int
    steps: int
    """M: timed steps of a run."""
    lengths: Kind = "lognormal"
    lengths_from: Path | None = None
    prompt_tokens: int | None = None
    """Length of the prompts; None: the one at which both sides take as long."""
    cores: int = 1
    """Cores of each side."""
    quick: bool = False


def checked_options(
    *, quick: bool, staleness: str = "", repetitions: int | None = None, steps: int | None = None, **others: Any
) -> PipelineOptions:
    """Options with their defaults. Raises ConfigError for a list of S without the baseline.

    >>> checked_options(quick=False, staleness="0,2").staleness
    (0, 2)
    """
    text = staleness or (QUICK_STALENESS if quick else STALENESS)
    values = [part.strip() for part in text.split(",")]
    numbers = tuple(int(value) for value in values if value.isdecimal())
    if len(numbers) < len(values) or 0 not in numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"--staleness is {text!r}, and must be whole numbers, each once, with 0 among them: that is the "
            "synchronous loop, with which the others are compared. Give for example --staleness 0,2"
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
    """All figures. The options are those of `checked_options`.

    The runs stay in `out` if it is given, and also if one of them failed. `picture` is called with a function that
    draws the plot into a file.

    Raises ConfigError, DataError, RoleFailed (a run failed), EngineError (a run did other work).
    """
    configure_logging("bench")
    chosen = checked_options(quick=quick, **options)
    split = split_cores(available_cores(), chosen.cores)
    beside = speed_beside(split)
    with _folder(out, lambda line: progress.console.print(line, markup=False, soft_wrap=True)) as folder:
        shape = TINY if chosen.quick else POLICY
        number_model(folder / "model", shape, VOCABULARY)
        setup = PipelineSetup(folder, folder / "model", shape, split)
        work = _work(chosen)
        if chosen.prompt_tokens is None:
            work = await _calibrated(setup, work, progress)
        results = await _compare(setup, work, chosen, progress)
    subtitle = f"{describe(chosen.lengths)}; {chosen.cores} core(s) a side; {chosen.repetitions} repetitions"
    picture(lambda path: write_plot(path, results, subtitle))
    return [
        *figures_of(results),
        *([] if beside is None else [Measurement("speed of a core beside the other side's", beside, "x")]),
        Measurement("prompts", work.prompt_tokens[0], "tokens"),
        Measurement("completion tokens of a timed part", work.tokens, "tokens"),
        measure_load_average(),
    ]


def _work(chosen: PipelineOptions) -> FixedWork:
    groups, size = (2, 4) if chosen.quick else (GROUPS_PER_STEP, GROUP_SIZE)
    lengths = draw(chosen.lengths, chosen.steps * groups * size, seed=1, recorded=chosen.lengths_from)
    return FixedWork(groups, size, lengths, (chosen.prompt_tokens or PROBED[0],) * chosen.steps)


async def _calibrated(setup: PipelineSetup, work: FixedWork, progress: Progress) -> FixedWork:
    """The work with prompts of the length at which both sides take as long, by one run that tries two."""
    probing = probing_work(work)
    plan = StepPlan(0, probing.steps)
    (record,) = await _run(setup, [("calibration", probing, plan)], progress)
    return replace(work, prompt_tokens=(balanced_prompt(*probes_of(record, probing, plan)),) * work.steps)


def probing_work(work: FixedWork) -> FixedWork:
    """Every step of the period twice, once with short prompts and once with long ones, in turns."""
    short, long = PROBED
    turns = [(short, long)[step % 2] for step in range(work.steps)]
    swapped = [short + long - tokens for tokens in turns]
    return replace(work, lengths=work.lengths * 2, prompt_tokens=(*turns, *swapped))


def probes_of(record: RunRecord, probing: FixedWork, plan: StepPlan) -> list[PromptProbe]:
    """The times of both sides with each of the two prompt lengths, the shorter first."""
    rows, times = timed_rows(record, plan), step_times(record, plan)
    prompts = [probing.prompt_tokens[int(row["version"]) % probing.steps] for row in rows]
    probes = []
    for tokens in PROBED:
        waits, rests = zip(*(one for prompt, one in zip(prompts, times, strict=True) if prompt == tokens), strict=True)
        probes.append(PromptProbe(tokens, Sides(fmean(waits), fmean(rests))))
    return probes


async def _compare(setup: PipelineSetup, work: FixedWork, chosen: PipelineOptions, progress: Progress) -> Results:
    turns = rotated_turns(chosen.staleness, chosen.repetitions)
    planned = [(f"s{one}-r{repetition + 1}", work, StepPlan(one, work.steps)) for repetition, one in turns]
    records = await _run(setup, planned, progress)
    found: dict[int, list[Observed]] = {one: [] for one in chosen.staleness}
    for (_, one), record, (_, _, plan) in zip(turns, records, planned, strict=True):
        found[one].append(observe(record, work, plan))
    return Results(found)


async def _run(
    setup: PipelineSetup, planned: Sequence[tuple[str, FixedWork, StepPlan]], progress: Progress
) -> list[RunRecord]:
    """Do one run after another, and check the work of each."""
    configs = [setup.config(*one) for one in planned]
    task = progress.add_task(planned[0][0], total=len(configs))
    await run_all(
        setup.folder, configs, lambda what, finished: progress.update(task, description=what, completed=finished)
    )
    progress.update(task, description=planned[0][0] if len(planned) == 1 else "runs", completed=len(configs))
    records = [read_record(config.run_dir) for config in configs]
    for record, (name, work, plan) in zip(records, planned, strict=True):
        check(record, work, plan, name)
    return records


@contextmanager
def _folder(out: Path | None, say: Callable[[str], None]) -> Iterator[Path]:
    """The folder of the runs: `out`, which must be empty and stays, or a temporary one, which stays only if something
    fails, because the error names logs in it."""
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"--out: {out} is not empty, and the runs in it would be resumed. Name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        yield out.absolute()
        return
    own, failed = Path(tempfile.mkdtemp(prefix="async-grpo-bench-")), False
    try:
        yield own
    except Exception:  # the logs of any failure are needed; Ctrl-C is no failure
        failed = True
        say(f"The runs, with their logs, stay in {own}. Delete it when you have seen them")
        raise
    finally:
        if not failed:
            shutil.rmtree(own, ignore_errors=True)

"""`async-grpo sweep`: from the options to a report.

    SweepOptions --make_plan--> SweepPlan --run_sweep--> SweepRunner (the points that are not finished) --> report

`make_plan` refuses a sweep with a point that is not allowed, before anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_grpo.app.launch.inputs import hub_inputs
from async_grpo.app.launch.plan import plan_run
from async_grpo.app.launch.run_folder import run_name
from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.folder import SweepFolder, SweepRecord
from async_grpo.lab.sweep.plan import (
    Point,
    SweepPlan,
    SweepRequest,
    assignments,
    combinations,
    lay_out,
    parse_axes,
    parse_seeds,
)
from async_grpo.lab.sweep.progress import SweepView
from async_grpo.lab.sweep.report import SweepComparison, caveats_of, write_report
from async_grpo.lab.sweep.runner import AttemptOutcome, AttemptResult, SweepRunner, pool_for
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import latest_rows, rows_of_kind

FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """The options of the command, as typed; DIR is None for the default folder."""

    config: Path
    grid: Sequence[str]
    seeds: str | None
    overrides: Sequence[str]
    out: Path | None
    at_once: int = 1
    tolerance: float | None = None
    command: str = ""


def make_plan(options: SweepOptions) -> tuple[SweepFolder, SweepPlan]:
    """The folder of a sweep and its points. Starts and writes nothing. Must not be called in a running event loop.

    Raises ConfigError for options that are wrong and for a point that is not allowed.
    """
    axes = parse_axes(options.grid, options.overrides)
    first = assignments(combinations(axes)[0])
    try:
        base = load(options.config, [*options.overrides, *first])
    except ConfigError as error:
        raise ConfigError(f"nothing is started, because {', '.join(first)} is refused: {error}") from None
    name = run_name(base.name, options.overrides)
    folder = SweepFolder(options.out or base.runs_dir / f"{name}-sweep")
    seeds = parse_seeds(options.seeds) if options.seeds is not None else (base.seed,)
    request = SweepRequest(name, options.overrides, axes, seeds, folder.runs_dir)
    known = folder.points(folder.read())
    held = [repo for point in known for repo in hub_inputs(point.config).values()]

    def resolve(overrides: Sequence[str]) -> RunConfig:
        return plan_run(options.config, overrides, download=True, pinned=held).config

    return folder, lay_out(request, known, resolve)


def print_result(folder: SweepFolder, comparison: SweepComparison) -> None:
    """Print the recommendation, its caveats and the path of the report."""
    choice = comparison.choice
    lines = [f"recommended: {choice.label}" if choice.label else "no recommendation", choice.reason]
    lines += [f"caveat: {caveat}" for caveat in caveats_of(comparison)]
    lines.append(f"report: {folder.path / 'report.md'}")
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


async def run_sweep(
    folder: SweepFolder,
    plan: SweepPlan,
    options: SweepOptions,
    show: Callable[[SweepFolder, SweepComparison], None] = print_result,
) -> int:
    """Run the points that are not finished, write the report and `show` it; returns the exit code.

    Raises ConfigError before anything is started if another sweep works in the folder or devices are missing.
    """
    with folder.locked(), SweepView(Console()) as view:
        todo = [point for point in plan.points if point.name in plan.asked and not point.is_finished]
        pool = pool_for([point.config for point in todo], options.at_once, os.environ)
        folder.write_configs(plan.points)
        records = folder.records(plan.points)

        def write() -> None:
            folder.write(SweepRecord(command=options.command, points=list(records.values())))

        def ended(result: AttemptResult) -> None:
            known = records[result.point.name]
            at_once = max(known.at_once, options.at_once)
            records[known.name] = msgspec.structs.replace(known, error=result.error, at_once=at_once)
            write()
            view.say(f"{result.point}: {result.error or result.outcome.value}")

        write()
        view.say(f"{len(plan.points)} points in {folder.path}, {len(todo)} to run")
        runner = SweepRunner(
            todo, folder, total=len(plan.asked), at_once=options.at_once, pool=pool, show=view.update, ended=ended
        )
        results = await runner.work()
        comparison = write_report(folder, options.tolerance)
    show(folder, comparison)
    failed = [result.point.name for result in results if result.outcome is AttemptOutcome.FAILED]
    if failed:
        Console(stderr=True).print(f"failed: {', '.join(failed)}; the same command tries again", soft_wrap=True)
    if runner.stopping:
        Console().print("stopped; the same command goes on")
    return INTERRUPTED if runner.stopping else FAILED if failed else 0


def describe_plan(folder: SweepFolder, plan: SweepPlan) -> Table:
    """A table of every point and what would happen to it."""
    table = Table(title=f"sweep {folder.path} (dry run: nothing is started)")
    for column in ("run", "point", "steps", "what happens"):
        table.add_column(column, overflow="fold")
    for point in plan.points:
        table.add_row(point.name, escape(str(point)), str(point.config.steps), _future(point, point.name in plan.asked))
    return table


def _future(point: Point, asked: bool) -> str:
    if point.is_finished:
        return "finished, is kept"
    if not asked:
        return "not in this grid, stays as it is"
    rows = latest_rows(rows_of_kind(read_rows(point.config.run_dir / "metrics.jsonl"), "step"), "step")
    return f"is resumed after step {rows[-1]['step']}" if rows else "is run"

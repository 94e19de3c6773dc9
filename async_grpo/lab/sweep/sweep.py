"""`async-grpo sweep`: from the options to a report.

    SweepOptions --make_plan--> SweepPlan --run_sweep--> SweepRunner (the unfinished points) --> report

`make_plan` rejects a sweep with a point that is not allowed before anything is started.
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
    parse_axes,
    parse_seeds,
    plan_points,
)
from async_grpo.lab.sweep.progress import SweepView
from async_grpo.lab.sweep.report import SweepComparison, find_caveats, write_report
from async_grpo.lab.sweep.runner import AttemptOutcome, AttemptResult, SweepRunner, make_device_pool
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import latest_rows, rows_of_kind

FAILED = 1
INTERRUPTED = 130
"""Exit codes."""


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of the command, as typed."""

    config: Path
    grid: Sequence[str]
    seeds: str | None
    overrides: Sequence[str]
    out: Path | None
    """Folder of the sweep; None for the default."""
    at_once: int = 1
    tolerance: float | None = None
    command: str = ""


def make_plan(options: SweepOptions) -> tuple[SweepFolder, SweepPlan]:
    """Return the folder of a sweep and its points. Starts and writes nothing.

    Must not be called in a running event loop. Raises ConfigError for wrong options and for a point that is not
    allowed.
    """
    axes = parse_axes(options.grid, options.overrides)

    # The configuration may only be complete with a value of the grid, so load it with the first combination.
    first_values = assignments(combinations(axes)[0])
    try:
        base = load(options.config, [*options.overrides, *first_values])
    except ConfigError as error:
        raise ConfigError(f"nothing is started, because {', '.join(first_values)} is rejected: {error}") from None

    name = run_name(base.name, options.overrides)
    folder = SweepFolder(options.out or base.runs_dir / f"{name}-sweep")
    seeds = (base.seed,) if options.seeds is None else parse_seeds(options.seeds)
    request = SweepRequest(base.name, options.overrides, axes, seeds, folder.runs_dir)
    existing = folder.load_points(folder.read_record())

    # New points get the Hub revisions of the existing ones. Otherwise a sweep extended later would compare runs of
    # two versions of a model or data set.
    pinned = [repo for point in existing for repo in hub_inputs(point.config).values()]

    def resolve(overrides: Sequence[str]) -> RunConfig:
        return plan_run(options.config, overrides, download=True, pinned=pinned).config

    return folder, plan_points(request, existing, resolve)


def print_result(folder: SweepFolder, comparison: SweepComparison) -> None:
    """Print the recommendation, its caveats and the path of the report."""
    choice = comparison.choice
    lines = [f"recommended: {choice.label}" if choice.label else "no recommendation", choice.reason]
    lines += [f"caveat: {caveat}" for caveat in find_caveats(comparison)]
    lines.append(f"report: {folder.path / 'report.md'}")
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


async def run_sweep(
    folder: SweepFolder,
    plan: SweepPlan,
    options: SweepOptions,
    show: Callable[[SweepFolder, SweepComparison], None] = print_result,
) -> int:
    """Run the unfinished points, write the report and `show` it. Returns the exit code.

    Raises ConfigError before anything is started if another sweep is running in the folder or devices are missing.
    """
    with folder.lock(), SweepView(Console()) as view:
        to_run = [point for point in plan.points if point.name in plan.requested and not point.is_finished]
        pool = make_device_pool([point.config for point in to_run], options.at_once, os.environ)
        folder.write_configs(plan.points)
        records = folder.point_records(plan.points)

        def write_records() -> None:
            folder.write_record(SweepRecord(command=options.command, points=list(records.values())))

        def record_result(result: AttemptResult) -> None:
            record = records[result.point.name]
            at_once = max(record.at_once, options.at_once)
            records[record.name] = msgspec.structs.replace(record, error=result.error, at_once=at_once)
            write_records()
            view.print_message(f"{result.point}: {result.error or result.outcome.value}")

        # Write the points before the first run starts: if this process is killed, the same command finds them.
        write_records()
        view.print_message(f"{len(plan.points)} points in {folder.path}, {len(to_run)} to run")
        runner = SweepRunner(
            to_run,
            folder,
            total=len(plan.requested),
            at_once=options.at_once,
            pool=pool,
            show=view.update,
            on_end=record_result,
        )
        results = await runner.run_points()
        comparison = write_report(folder, options.tolerance)

    show(folder, comparison)
    failed = [result.point.name for result in results if result.outcome is AttemptOutcome.FAILED]
    if failed:
        Console(stderr=True).print(f"failed: {', '.join(failed)}; the same command tries again", soft_wrap=True)
    if runner.stopping:
        Console().print("stopped; the same command continues")
        return INTERRUPTED
    return FAILED if failed else 0


def describe_plan(folder: SweepFolder, plan: SweepPlan) -> Table:
    """Return a table of every point and what would happen to it."""
    table = Table(title=f"sweep {folder.path} (dry run: nothing is started)")
    for column in ("run", "point", "steps", "what happens"):
        table.add_column(column, overflow="fold")
    for point in plan.points:
        action = _describe_action(point, point.name in plan.requested)
        table.add_row(point.name, escape(str(point)), str(point.config.steps), action)
    return table


def _describe_action(point: Point, is_requested: bool) -> str:
    if point.is_finished:
        return "finished, is kept"
    if not is_requested:
        return "not in this grid, stays as it is"
    rows = latest_rows(rows_of_kind(read_rows(point.config.run_dir / "metrics.jsonl"), "step"), "step")
    return f"is resumed after step {rows[-1]['step']}" if rows else "is run"

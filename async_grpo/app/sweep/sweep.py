"""`async-grpo sweep`: from what was typed to a report.

plan (refuses, or knows every point) -> what is not finished yet -> crew -> report
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from async_grpo.app.launch.preflight import resolve
from async_grpo.app.launch.run_folder import run_name
from async_grpo.app.sweep.folder import PointRecord, SweepFolder, SweepRecord
from async_grpo.app.sweep.plan import (
    Point,
    SweepPlan,
    SweepRequest,
    assignments,
    combinations,
    lay_out,
    parse_axes,
    parse_seeds,
)
from async_grpo.app.sweep.progress import SweepView
from async_grpo.app.sweep.report import SweepComparison, write_report
from async_grpo.app.sweep.runner import AttemptOutcome, AttemptResult, SweepRunner, is_finished, pool_for
from async_grpo.config import load
from async_grpo.errors import ConfigError
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import last_of_each, of_kind

FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What was typed."""

    config: Path
    grid: Sequence[str]
    seeds: str | None
    overrides: Sequence[str]
    out: Path | None
    at_once: int = 1
    tolerance: float | None = None
    command: str = ""


def plan(request: SweepOptions) -> tuple[SweepFolder, SweepPlan]:
    """Which runs there are, and where. Starts and writes nothing; not for a running event loop. Raises ConfigError."""
    axes = parse_axes(request.grid, request.overrides)
    first = assignments(combinations(axes)[0])
    try:
        base = load(request.config, [*request.overrides, *first])
    except ConfigError as error:
        raise ConfigError(f"nothing is started, because {', '.join(first)} is refused: {error}") from None
    name = run_name(base.name, request.overrides)
    folder = SweepFolder(request.out or base.runs_dir / f"{name}-sweep")
    seeds = parse_seeds(request.seeds) if request.seeds is not None else (base.seed,)
    ask = SweepRequest(name, request.overrides, axes, seeds, folder.runs_dir)
    return folder, lay_out(ask, folder.points(folder.read()), partial(resolve, request.config))


async def sweep(folder: SweepFolder, laid_out: SweepPlan, request: SweepOptions) -> int:
    """Run what is not finished; returns the exit code. Raises ConfigError before anything is started."""
    with folder.claimed(), SweepView(Console()) as view:
        todo = [point for point in laid_out.points if point.name in laid_out.asked and not is_finished(point)]
        pool = pool_for([point.config for point in todo], request.at_once, os.environ)
        folder.write_configs(laid_out.points)
        ledger = PointsFile(folder, view, laid_out, request)
        view.say(f"{len(laid_out.points)} points in {folder.path}, {len(todo)} to run")
        crew = SweepRunner(
            todo,
            folder,
            argv=lambda point: run_argv(folder.config_file(point.name)),
            total=len(laid_out.asked),
            at_once=request.at_once,
            pool=pool,
            show=view.update,
            ended=ledger.note,
        )
        endings = await crew.work()
        comparison = write_report(folder, request.tolerance)
    print_result(folder, comparison)
    failed = [ending.point.name for ending in endings if ending.fate is AttemptOutcome.FAILED]
    if failed:
        Console(stderr=True).print(f"failed: {', '.join(failed)}; the same command tries again", soft_wrap=True)
    if crew.stopping:
        Console().print("stopped; the same command goes on")
    return INTERRUPTED if crew.stopping else FAILED if failed else 0


def run_argv(config: Path) -> list[str]:
    """What a user would type for one of its runs."""
    return [sys.executable, "-m", "async_grpo.app.cli.main", "run", str(config)]


def print_result(folder: SweepFolder, comparison: SweepComparison) -> None:
    """The recommendation and where the report is."""
    chosen = f"recommended: {comparison.choice.label}\n" if comparison.choice.label else ""
    text = f"{chosen}{comparison.choice.reason}\nreport: {folder.path / 'report.md'}"
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def describe_plan(folder: SweepFolder, laid_out: SweepPlan) -> Table:
    """Every point with what would happen to it."""
    table = Table(title=f"sweep {folder.path} (dry run: nothing is started)")
    for column in ("run", "point", "steps", "what happens"):
        table.add_column(column, overflow="fold")
    for point in laid_out.points:
        table.add_row(point.name, str(point), str(point.config.steps), _future(point, point.name in laid_out.asked))
    return table


def _future(point: Point, asked: bool) -> str:
    if is_finished(point):
        return "finished, is kept"
    if not asked:
        return "not in this grid, stays as it is"
    rows = last_of_each(of_kind(read_rows(point.config.run_dir / "metrics.jsonl"), "step"), "step")
    return f"is resumed after step {rows[-1]['step']}" if rows else "is run"


class PointsFile:
    """Keeps points.json up to date while runs end."""

    def __init__(self, folder: SweepFolder, view: SweepView, laid_out: SweepPlan, request: SweepOptions) -> None:
        """Writes it for the first time, with every point that there is."""
        before = {known.name: known for known in folder.read().points}
        self._folder, self._view, self._request = folder, view, request
        self._points = {
            point.name: before.get(point.name) or PointRecord(name=point.name, values=dict(point.values))
            for point in laid_out.points
        }
        self._write()

    def note(self, ending: AttemptResult) -> None:
        """A run has ended: say so, and remember its error."""
        name = ending.point.name
        self._points[name] = PointRecord(
            name=name,
            values=dict(ending.point.values),
            error=ending.error,
            at_once=max(self._points[name].at_once, self._request.at_once),
        )
        self._write()
        self._view.say(f"{ending.point}: {ending.error or ending.fate.value}")

    def _write(self) -> None:
        self._folder.write(SweepRecord(command=self._request.command, points=list(self._points.values())))

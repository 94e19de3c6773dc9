"""`async-grpo sweep`: run a grid of settings and write a report that compares them."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from async_grpo.app.cli.common import exit_with
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.app.sweep.sweep import SweepOptions

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file, such as configs/quickstart.yaml")
]
Grid = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="KEY=A,B,C", help="Values to try, such as max_staleness=0,2,4; may be repeated."),
]
Seeds = Annotated[
    str | None, typer.Option(metavar="1,2,3", help="Every combination with each of them; else the CONFIG's own.")
]
Override = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="For every point; may be repeated."),
]
AtOnce = Annotated[int, typer.Option(min=1, help="How many runs share this machine.")]
OutFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="Else runs/NAME-sweep.")]
Tolerance = Annotated[
    float | None,
    typer.Option(min=0.0, help="Learning that may be given up for speed; else one standard error of the best."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check every point, list them, start nothing.")]
ReportOnly = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Only write the report of this sweep anew.")
]


def sweep(
    config: ConfigFile = None,
    grid: Grid = None,
    seeds: Seeds = None,
    override: Override = None,
    at_once: AtOnce = 1,
    out: OutFolder = None,
    tolerance: Tolerance = None,
    dry_run: DryRun = False,
    report: ReportOnly = None,
) -> None:
    """Run a grid of settings, a run each, and compare them: learning, throughput, ages, and which one to use.

    Ctrl-C stops cleanly; the same command again resumes, keeps what is finished and tries again what failed. More
    values or seeds are added to the sweep that is there.
    """
    from async_grpo.app.sweep.sweep import SweepOptions

    def work() -> int:
        if report is not None:
            if config is not None or grid or override or seeds:
                raise ConfigError("--report DIR runs nothing: leave out CONFIG, --grid, --seeds and -o")
            return _report(report, tolerance)
        if config is None:
            raise ConfigError("which runs? Give CONFIG and --grid, or --report DIR for the report of a sweep")
        command = shlex.join(["async-grpo", *sys.argv[1:]])
        options = SweepOptions(config, grid or [], seeds, override or [], out, at_once, tolerance, command)
        return _sweep(options, dry_run=dry_run)

    exit_with(work)


def _report(path: Path, tolerance: float | None) -> int:
    from async_grpo.app.sweep.folder import SweepFolder
    from async_grpo.app.sweep.report import write_report
    from async_grpo.app.sweep.sweep import print_result

    folder = SweepFolder(path)
    print_result(folder, write_report(folder, tolerance))
    return 0


def _sweep(options: SweepOptions, *, dry_run: bool) -> int:
    from async_grpo.app.sweep.sweep import describe_plan, make_plan, run_sweep

    folder, plan = make_plan(options)
    if dry_run:
        Console().print(describe_plan(folder, plan))
        return 0
    return asyncio.run(run_sweep(folder, plan, options))

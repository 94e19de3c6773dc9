"""`async-grpo sweep`: run a grid of settings and compare the runs in a report."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_grpo.app.cli.common import OptionalConfigFile, Override, exit_with_code
from async_grpo.errors import ConfigError

Grid = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="KEY=A,B,C", help="Values to try, such as max_staleness=0,2,4; may be repeated."),
]
Seeds = Annotated[
    str | None, typer.Option(metavar="1,2,3", help="Seeds for every combination (default: the seed of CONFIG).")
]
AtOnce = Annotated[int, typer.Option(min=1, help="Number of parallel runs on this machine.")]
OutFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the sweep (default: runs/NAME-sweep).")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Accuracy to trade for speed in the recommendation (default: one standard error of the best setting).",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and list all points without starting them.")]
ReportOnly = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Only rewrite the report of this sweep.")
]


@exit_with_code()
def sweep(
    config: OptionalConfigFile = None,
    grid: Grid = None,
    seeds: Seeds = None,
    override: Override = None,
    at_once: AtOnce = 1,
    out: OutFolder = None,
    tolerance: Tolerance = None,
    dry_run: DryRun = False,
    report: ReportOnly = None,
) -> int:
    """Train with several values of a setting, compare the runs, and recommend a value.

    Ctrl-C stops cleanly. The same command resumes: it keeps finished runs and retries failed ones. More values or seeds
    extend the sweep.
    """
    from async_grpo.lab.sweep.folder import SweepFolder
    from async_grpo.lab.sweep.report import write_report
    from async_grpo.lab.sweep.sweep import SweepOptions, describe_plan, make_plan, print_result, run_sweep

    if report is not None:
        if config is not None or grid or override or seeds:
            raise ConfigError("--report DIR starts no runs. Leave out CONFIG, --grid, --seeds and -o")
        print_result(SweepFolder(report), write_report(SweepFolder(report), tolerance))
        return 0

    if config is None:
        raise ConfigError(
            "no runs are selected. Give CONFIG and --grid, or --report DIR to rewrite the report of a sweep"
        )
    command = shlex.join(["async-grpo", *sys.argv[1:]])
    options = SweepOptions(config, grid or [], seeds, override or [], out, at_once, tolerance, command)
    folder, plan = make_plan(options)
    if dry_run:
        Console().print(describe_plan(folder, plan))
        return 0
    return asyncio.run(run_sweep(folder, plan, options))

"""`async-grpo sweep`: a grid of runs, and a report that compares them."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_grpo.app.cli.common import exit_with
from async_grpo.errors import ConfigError


def sweep(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file, such as configs/quickstart.yaml")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="KEY=A,B,C", help="Values to try, such as max_staleness=0,2,4; may be repeated."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Every combination with each of them; else the CONFIG's own.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="For every point; may be repeated."),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="How many runs share this machine.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Else runs/NAME-sweep.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Learning that may be given up for speed; else one standard error of the best."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every point, list them, start nothing.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Only write the report of this sweep anew.")
    ] = None,
) -> None:
    """Run a grid of settings, a run each, and compare them: learning, throughput, ages, and which one to use.

    Ctrl-C stops cleanly; the same command again resumes, keeps what is finished and tries again what failed. More
    values or seeds are added to the sweep that is there.
    """
    from async_grpo.app.sweep.folder import SweepFolder
    from async_grpo.app.sweep.report import write_report
    from async_grpo.app.sweep.sweep import SweepOptions, describe_plan, plan, print_result
    from async_grpo.app.sweep.sweep import sweep as run_sweep

    def work() -> int:
        if report is not None:
            if config is not None or grid or override or seeds:
                raise ConfigError("--report DIR runs nothing: leave out CONFIG, --grid, --seeds and -o")
            written = SweepFolder(report)
            print_result(written, write_report(written, tolerance))
            return 0
        if config is None:
            raise ConfigError("which runs? Give CONFIG and --grid, or --report DIR for the report of a sweep")
        command = shlex.join(["async-grpo", *sys.argv[1:]])
        request = SweepOptions(config, grid or [], seeds, override or [], out, at_once, tolerance, command)
        folder, laid_out = plan(request)
        if dry_run:
            Console().print(describe_plan(folder, laid_out))
            return 0
        return asyncio.run(run_sweep(folder, laid_out, request))

    exit_with(work)

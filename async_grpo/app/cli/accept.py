"""`async-grpo accept`: acceptance tests of a machine before its first run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_grpo.app.cli.common import exit_with_code, print_message
from async_grpo.config.trainer import PlatformName
from async_grpo.errors import EXIT_CONFIG
from async_grpo.utils.aio import Overtaken, race, stop_signals

INTERRUPTED = 130


@exit_with_code(config_code=EXIT_CONFIG)
def accept(
    platform: Annotated[PlatformName, typer.Option(help="Platform of the trainer and the engine.")] = "cpu",
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run only this stage: doctor, collectives, numbers, graphs, behaviour, weights, publish, resume or "
            "run; may be repeated.",
        ),
    ] = None,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="Run benchmarks instead of the usual stages: asynchrony (4B, S = 2 against S = 0, weight updates) and "
            "throughput (8B), compared with published results.",
        ),
    ] = False,
    devices: Annotated[
        str | None, typer.Option(metavar="0,1", help="Devices to use (default: all visible ones).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the report and its logs (default: runs/accept-PLATFORM)."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report to this file, as JSON.")
    ] = None,
) -> int:
    """Test all parts of the system on this machine's devices, before the first run.

    The stages: `doctor`; `collectives` over all devices; `numbers` (attention, log-probabilities and gradients compared
    with the CPU in float64); `graphs` (captured graphs use updated weights, or the engine runs without graphs);
    `behaviour` (the engine's log-probabilities at temperature 0.8 compared with the trainer's); `weights` (arrive in
    the engine bit for bit, including a tied output layer); `publish` (one update, timed); `resume` (save, SIGKILL,
    load); `run` (ten steps, with the staleness bound). Every stage has a time limit. After a failure, the stages that
    do not depend on it still run.

    --scale uses models of 4B (four devices) and 8B (eight devices) with random weights and takes about half an hour. On
    a CPU it uses a tiny model and only prints the results.

    Takes about 15 minutes on a device. Nothing is downloaded. Attach report.txt and report.json to a question: they
    contain versions, devices and results, but no secrets. The exit code is 1 if a stage failed, and 78 if there is no
    such device.
    """
    folder = out or Path("runs") / f"accept-{platform}{'-scale' if scale else ''}"
    return asyncio.run(_run(platform, folder, stage or (), devices, json_file, scale=scale))


async def _run(
    platform: str, folder: Path, stages: Sequence[str], devices: str | None, json_file: Path | None, *, scale: bool
) -> int:
    """Run the stages until they are done or Ctrl-C. Returns the exit code."""
    from async_grpo.lab.accept.accept import accept as run_stages

    interrupted = asyncio.Event()
    with stop_signals(interrupted.set), Console(stderr=True).status("starting") as status:

        def show(line: str, done: bool) -> None:
            print_message(line)
            status.update("" if done else line)

        try:
            stage_runs = run_stages(platform, folder, stages=stages, scale=scale, devices=devices, show=show)
            report = await race(stage_runs, interrupted.wait())
        except Overtaken:
            print_message(f"stopped; the results so far are in {folder}")
            return INTERRUPTED
    Console().print(report.table())
    print_message(f"report: {folder / 'report.txt'} and {folder / 'report.json'}")
    if json_file is not None:
        shutil.copyfile(folder / "report.json", json_file)
    return 0 if report.ok else 1

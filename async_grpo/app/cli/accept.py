"""`async-grpo accept`: the first hour on a device."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_grpo.app.cli.common import exit_with_code, say
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
            help="Only this stage: doctor, collectives, numbers, behaviour, weights, publish, resume or run; may be "
            "repeated.",
        ),
    ] = None,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="Instead of the usual stages: asynchrony (4B, S = 2 against S = 0, weight updates) and throughput "
            "(8B), next to published figures.",
        ),
    ] = False,
    devices: Annotated[
        str | None, typer.Option(metavar="0,1", help="Devices to use (default: all that are visible).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the report and its logs (default: runs/accept-PLATFORM)."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report here.")
    ] = None,
) -> int:
    """Check a machine before its first run: every part on its devices, with a small random model.

    The stages: `doctor`; `collectives` over all devices; `numbers` (attention, log-probabilities and gradients against
    the CPU in float64); `graphs` (captured graphs follow weight updates, and an engine whose do not runs without);
    `behaviour` (the engine's log-probabilities at temperature 0.8 against the trainer's); `weights` (bit for bit into
    the engine, its tied output layer included); `publish` (one, timed); `resume` (save, SIGKILL, load); `run` (ten
    steps, with the staleness bound). Each has a limit, and a failed one does not stop those that do not need it.

    With --scale: models of 4B (four devices) and 8B (eight), with random weights, for about half an hour; on a CPU a
    tiny one, whose figures are printed but not judged.

    Takes about a quarter of an hour on a device. Nothing is downloaded. Send report.txt and report.json back with a
    question: they hold versions, devices and figures, no secrets. Exits with 1 if a stage failed, with 78 if there is
    no such device.
    """
    folder = out or Path("runs") / f"accept-{platform}{'-scale' if scale else ''}"
    return asyncio.run(_run(platform, folder, stage or (), devices, json_file, scale=scale))


async def _run(
    platform: str, folder: Path, stages: Sequence[str], devices: str | None, json_file: Path | None, *, scale: bool
) -> int:
    """Run the stages until they are done or Ctrl-C; returns the exit code."""
    from async_grpo.lab.accept.accept import accept as run_stages

    interrupted = asyncio.Event()
    with stop_signals(interrupted.set), Console(stderr=True).status("starting") as status:

        def show(line: str, done: bool) -> None:
            say(line)
            status.update("" if done else line)

        try:
            running = run_stages(platform, folder, stages=stages, scale=scale, devices=devices, show=show)
            report = await race(running, interrupted.wait())
        except Overtaken:
            say(f"stopped; what was found so far is in {folder}")
            return INTERRUPTED
    Console().print(report.table())
    say(f"report: {folder / 'report.txt'} and {folder / 'report.json'}")
    if json_file is not None:
        shutil.copyfile(folder / "report.json", json_file)
    return 0 if report.ok else 1

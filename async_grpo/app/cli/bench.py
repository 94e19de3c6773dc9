"""`async-grpo bench`: measure this installation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from async_grpo.app.cli.common import exit_with_code, progress_bar

MODULES = {
    "pipeline": "async_grpo.lab.bench.pipeline.bench",
    "rollout": "async_grpo.lab.bench.rollout.bench",
    "trainer": "async_grpo.lab.bench.trainer.bench",
}
"""Bench -> the module whose `measure` makes its figures. It is imported when the command runs."""

app = typer.Typer(
    help="Measure this installation. Every figure comes with a baseline from the same run.", no_args_is_help=True
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")]
Lengths = Literal["constant", "lognormal", "recorded"]
Quick = Annotated[bool, typer.Option("--quick", help="Only check that the bench works; the figures mean little.")]


@app.command()
@exit_with_code()
def rollout(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Measure a rollout server: tokens per second beside bare vLLM on the same engine and beside dispatch in waves.

    Uses random models of 56 and of 0.4 million parameters. Takes about seven minutes.
    """
    _measure("rollout", json_file, quick=quick)


@app.command()
@exit_with_code()
def trainer(
    json_file: JsonFile = None,
    quick: Quick = False,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with the fields of GSM8K (default: random prompts)."),
    ] = None,
) -> None:
    """Measure a training step: tokens per second beside padded batches in plain PyTorch, its ceilings, and streaming
    beside waiting.

    Uses a random model of 8 million parameters and the lengths of GSM8K. Takes about ten minutes.
    """
    _measure("trainer", json_file, quick=quick, data=data)


@app.command()
@exit_with_code()
def pipeline(
    json_file: JsonFile = None,
    quick: Quick = False,
    staleness: Annotated[
        str, typer.Option(metavar="0,1,2", help="Values of max_staleness to run; 0 must be among them.")
    ] = "",
    lengths: Annotated[Lengths, typer.Option(help="Distribution of the completion lengths.")] = "lognormal",
    lengths_from: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help='With --lengths recorded: JSON lines {"length": 24}, or the samples folder of a run.'
        ),
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Runs of every max_staleness, taken in turns (default: 3).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Timed steps of a run (default: 12).")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the prompts (default: the one that balances both sides).")
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="Cores of the trainer, and as many of the rollout server.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the runs here (default: delete them, unless one fails).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw speed and idleness against max_staleness (PNG).")
    ] = None,
) -> None:
    """Measure the whole loop: the same work at every max_staleness, beside the synchronous loop.

    Does real runs of a random model of 3 million parameters, one core a side. Reports tokens per second, idle shares,
    ages, and the share of the overlap bound that is reached. Takes about twenty-five minutes for five values of
    max_staleness and three repetitions.
    """
    wanted = {"staleness": staleness, "lengths": lengths, "lengths_from": lengths_from, "repetitions": repetitions}
    sizes = {"steps": steps, "prompt_tokens": prompt_tokens, "cores": cores}
    _measure("pipeline", json_file, plot, quick=quick, **wanted, **sizes, out=out)


def _measure(name: str, json_file: Path | None, plot: Path | None = None, **options: Any) -> None:
    """Run `measure` of the bench's module, print the figures, and write JSON and picture if they are asked for.

    The module is imported only now. Its `view`, if it has one, replaces the usual table. The folders of the files are
    made before anything is measured.
    """
    import uvloop

    from async_grpo.lab.bench.measure import Machine, Picture, make_room, table, write

    for file in (json_file, plot):
        if file is not None:
            make_room(file)
    machine, bench = Machine.here(), import_module(MODULES[name])
    pictures: list[Picture] = []
    wanted = options if plot is None else {**options, "picture": pictures.append}
    with progress_bar() as progress:
        figures = uvloop.run(bench.measure(progress, **wanted))
    view = getattr(bench, "view", table)
    Console().print(view(f"async-grpo bench {name}", figures, machine))
    if json_file is not None:
        write(json_file, figures, machine)
    if plot is not None:
        for picture in pictures:
            picture(plot)

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
"""Bench -> module whose `measure` returns its results. It is imported when the command runs."""

app = typer.Typer(
    help="Measure the speed of this machine. Every result comes with a baseline from the same run.",
    no_args_is_help=True,
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the results to this file.")]
Lengths = Literal["constant", "lognormal", "recorded"]
Quick = Annotated[
    bool, typer.Option("--quick", help="Only check that the bench works; the results are not meaningful.")
]

Truncated = Annotated[
    bool, typer.Option("--truncated", help="Also compare truncated sampling with the whole distribution.")
]


@app.command()
@exit_with_code()
def rollout(json_file: JsonFile = None, quick: Quick = False, truncated: Truncated = False) -> None:
    """Measure how many tokens per second a rollout server generates.

    The baselines are bare vLLM on the same engine, and dispatch in waves.
    Uses random models of 56 and of 0.4 million parameters. Takes about seven minutes.
    """
    _measure("rollout", json_file, quick=quick, truncated=truncated)


@app.command()
@exit_with_code()
def trainer(
    json_file: JsonFile = None,
    quick: Quick = False,
    truncated: Truncated = False,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with the fields of GSM8K (default: random prompts)."),
    ] = None,
) -> None:
    """Measure how many tokens per second a training step processes.

    The baselines are padded batches in plain PyTorch and upper bounds. Streaming is compared with waiting for the whole
    batch.
    Uses a random model of 8 million parameters and the lengths of GSM8K. Takes about ten minutes.
    """
    _measure("trainer", json_file, quick=quick, data=data, truncated=truncated)


@app.command()
@exit_with_code()
def pipeline(
    json_file: JsonFile = None,
    quick: Quick = False,
    staleness: Annotated[
        str, typer.Option(metavar="0,1,2", help="Values of max_staleness to run; must include 0.")
    ] = "",
    lengths: Annotated[Lengths, typer.Option(help="Distribution of the completion lengths.")] = "lognormal",
    lengths_from: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help='--lengths recorded: JSON lines {"length": 24}, or the samples folder of a run.'
        ),
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Runs per value of max_staleness, interleaved (default: 3).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Timed steps per run (default: 12).")] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Length of the prompts (default: chosen so that training and generation take equally long)."
        ),
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="Cores of the trainer, and of the rollout server.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to keep the runs in (default: delete them unless one fails)."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot speed and idle shares over max_staleness (PNG).")
    ] = None,
) -> None:
    """Measure the whole loop at several values of max_staleness, compared with the synchronous loop.

    Runs a random model of 3 million parameters, with one core per side. Reports tokens per second, idle shares, ages,
    and the reached fraction of the maximum speedup by overlap. Takes about 25 minutes for five values of max_staleness
    and three repetitions.
    """
    _measure(
        "pipeline",
        json_file,
        plot,
        quick=quick,
        staleness=staleness,
        lengths=lengths,
        lengths_from=lengths_from,
        repetitions=repetitions,
        steps=steps,
        prompt_tokens=prompt_tokens,
        cores=cores,
        out=out,
    )


def _measure(name: str, json_file: Path | None, plot: Path | None = None, **options: Any) -> None:
    """Run `measure` of the bench's module, print the results, and write JSON and plot if requested.

    The module's `view`, if it has one, replaces the usual table.
    """
    import uvloop

    from async_grpo.lab.bench.measure import Machine, Picture, ensure_writable, measurement_table, write_measurements

    # Create the folders first: a path that cannot be written must fail before half an hour of measuring.
    for file in (json_file, plot):
        if file is not None:
            ensure_writable(file)
    machine = Machine.detect()
    bench = import_module(MODULES[name])
    pictures: list[Picture] = []
    if plot is not None:
        options["picture"] = pictures.append
    with progress_bar() as progress:
        figures = uvloop.run(bench.measure(progress, **options))
    view = getattr(bench, "view", measurement_table)
    Console().print(view(f"async-grpo bench {name}", figures, machine))
    if json_file is not None:
        write_measurements(json_file, figures, machine)
    if plot is not None:
        for picture in pictures:
            picture(plot)

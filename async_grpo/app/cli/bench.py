"""`async-grpo bench`: measured figures, each with its baseline from the same run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from async_grpo.app.bench.measure import Fsync
from async_grpo.app.cli.common import exit_with

MODULES = {
    "buffer": "async_grpo.app.bench.buffer.bench",
    "data": "async_grpo.app.bench.data",
    "pipeline": "async_grpo.app.bench.pipeline.bench",
    "rollout": "async_grpo.app.bench.rollout.bench",
    "trainer": "async_grpo.app.bench.trainer.bench",
    "weights": "async_grpo.app.bench.weights.bench",
}
"""Bench -> the module whose `measure` makes its figures. It is imported when the command runs."""

app = typer.Typer(
    help="Measure this installation: each figure comes with its baseline from the same run.", no_args_is_help=True
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here, too.")]
Lengths = Literal["constant", "lognormal", "recorded"]
Quick = Annotated[bool, typer.Option("--quick", help="Only show that the bench works; the figures mean little.")]


@app.command()
def buffer(
    json_file: JsonFile = None,
    quick: Quick = False,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Of a server; else one of its own is started.")] = None,
    fsync: Annotated[Fsync, typer.Option(help="Of the server that is started; a run's is always.")] = "everysec",
) -> None:
    """The replay buffer: throughput and latency against a plain list, cost of a transition when it is full.

    Groups of 8 samples, 276 KB, go from producer processes to a consumer process. Takes about three minutes.
    """
    _measure("buffer", json_file, quick=quick, url=url, fsync=fsync)


@app.command()
def rollout(json_file: JsonFile = None, quick: Quick = False) -> None:
    """A rollout server: tokens a second beside bare vLLM on the same engine, and beside dispatch in waves.

    On random models of 56 and of 0.4 million parameters. Takes about seven minutes.
    """
    _measure("rollout", json_file, quick=quick)


@app.command()
def trainer(
    json_file: JsonFile = None,
    quick: Quick = False,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with GSM8K's fields; else prompts are random.")
    ] = None,
) -> None:
    """A training step: tokens a second beside padded batches in plain PyTorch, ceilings, streaming beside waiting.

    A random model of 8 million parameters, lengths as GSM8K has them. Takes about ten minutes.
    """
    _measure("trainer", json_file, quick=quick, data=data)


@app.command()
def weights(json_file: JsonFile = None, quick: Quick = False) -> None:
    """The weight plane: a whole model beside a TCP loop, gloo and a file; patches; relays; the trainer's stall.

    1.08 GB in the shapes of Qwen2.5-0.5B. Needs 8 GB of free memory, and takes about five minutes.
    """
    _measure("weights", json_file, quick=quick)


@app.command()
def data(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Preparing data: rows a second beside a plain loop over the tokenizer, and how fast a run has its data.

    20,000 made-up word problems, a tokenizer of 4,096 tokens. Takes about a minute.
    """
    _measure("data", json_file, quick=quick)


@app.command()
def pipeline(
    json_file: JsonFile = None,
    quick: Quick = False,
    staleness: Annotated[str, typer.Option(metavar="0,1,2", help="Every max_staleness to run; 0 among them.")] = "",
    lengths: Annotated[Lengths, typer.Option(help="Of the completions.")] = "lognormal",
    lengths_from: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help='For recorded: JSON lines {"length": 24}, or the samples folder of a run.'),
    ] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Of every S, in turns (3).")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Timed steps of a run (12).")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the prompts; else the one that balances both sides.")
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="Of each side.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the runs here; else they are deleted, unless one fails.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw speed and idleness against S (PNG).")] = None,
) -> None:
    """The whole loop: the same work at every max_staleness, one core a side, beside the synchronous loop.

    Real runs of a random model of 3 million parameters; tokens a second, idle shares, ages, and how much of the
    overlap bound is reached. Takes about twenty-five minutes for five values of S in three repetitions.
    """
    wanted = {"staleness": staleness, "lengths": lengths, "lengths_from": lengths_from, "repetitions": repetitions}
    sizes = {"steps": steps, "prompt_tokens": prompt_tokens, "cores": cores}
    _measure("pipeline", json_file, plot, quick=quick, **wanted, **sizes, out=out)


def _measure(name: str, json_file: Path | None, plot: Path | None = None, **options: Any) -> None:
    """Run `measure` of async_grpo.app.bench.NAME, which is only imported now; print its figures, write them, and draw
    its picture. That files can be written is seen to before anything is measured.

    A bench with a `view` of its own is shown in that in place of the usual table.
    """
    import uvloop

    from async_grpo.app.bench.measure import Machine, Picture, make_room, table, write

    def work() -> int:
        for file in (json_file, plot):
            if file is not None:
                make_room(file)
        machine, bench = Machine.here(), import_module(MODULES[name])
        pictures: list[Picture] = []
        wanted = options if plot is None else {**options, "picture": pictures.append}
        with _progress() as progress:
            figures = uvloop.run(bench.measure(progress, **wanted))
        view = getattr(bench, "view", table)
        Console().print(view(f"async-grpo bench {name}", figures, machine))
        if json_file is not None:
            write(json_file, figures, machine)
        if plot is not None:
            for picture in pictures:
                picture(plot)
        return 0

    exit_with(work)


def _progress() -> Progress:
    """On standard error, so that the table can be piped."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))

"""`async-grpo bench`: measure this installation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from async_grpo.app.cli.common import exit_with, progress_bar
from async_grpo.lab.bench.rig import Fsync

MODULES = {
    "buffer": "async_grpo.lab.bench.buffer.bench",
    "control-plane": "async_grpo.lab.bench.control_plane.bench",
    "data": "async_grpo.lab.bench.data",
    "pipeline": "async_grpo.lab.bench.pipeline.bench",
    "rollout": "async_grpo.lab.bench.rollout.bench",
    "trainer": "async_grpo.lab.bench.trainer.bench",
    "weights": "async_grpo.lab.bench.weights.bench",
}
"""Bench -> the module whose `measure` makes its figures. It is imported when the command runs."""

app = typer.Typer(
    help="Measure this installation. Every figure comes with a baseline from the same run.", no_args_is_help=True
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")]
Lengths = Literal["constant", "lognormal", "recorded"]
Quick = Annotated[bool, typer.Option("--quick", help="Only check that the bench works; the figures mean little.")]


@app.command()
def buffer(
    json_file: JsonFile = None,
    quick: Quick = False,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Server to measure (default: start one for the bench).")
    ] = None,
    fsync: Annotated[
        Fsync, typer.Option(help="appendfsync of the server that the bench starts; a real run uses always.")
    ] = "everysec",
) -> None:
    """Measure the replay buffer: throughput and latency beside a plain list, and transitions of a full buffer.

    Producer processes send groups of 8 samples (276 KB) to a consumer process. Takes about three minutes.
    """
    _measure("buffer", json_file, quick=quick, url=url, fsync=fsync)


@app.command()
def rollout(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Measure a rollout server: tokens per second beside bare vLLM on the same engine and beside dispatch in waves.

    Uses random models of 56 and of 0.4 million parameters. Takes about seven minutes.
    """
    _measure("rollout", json_file, quick=quick)


@app.command()
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
def weights(
    json_file: JsonFile = None,
    quick: Quick = False,
    bucket: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also send versions through this bucket: s3://BUCKET/PREFIX, gs://, az://."),
    ] = None,
    engine: Annotated[
        Literal["cpu", "cuda", "ascend", "none"],
        typer.Option(help="Platform of the engine that is updated; none: leave it out, as without vLLM."),
    ] = "cpu",
) -> None:
    """Measure the weight plane: transfer, pause and load of an engine that generates; a whole model beside a TCP loop,
    gloo and a file; patches; a folder, a bucket; relays; the trainer's stall with two ranks and four.

    Updates a vLLM with 56 million random parameters, sends 1.08 GB in the shapes of Qwen2.5-0.5B, and 3.09 GB from
    several ranks to two engines. Needs 21 GB of free memory and takes about ten minutes.
    """
    _measure("weights", json_file, quick=quick, bucket=bucket, engine=engine)


@app.command()
def data(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Measure data preparation: rows per second beside a plain tokenizer loop, and how fast a run opens its data.

    Uses 20,000 made-up word problems and a tokenizer of 4,096 tokens. Takes about a minute.
    """
    _measure("data", json_file, quick=quick)


@app.command("control-plane")
def control_plane(
    json_file: JsonFile = None,
    quick: Quick = False,
    servers: Annotated[str, typer.Option(metavar="64,256,1000", help="Numbers of servers.")] = "64,256,1000",
    faster: Annotated[
        str, typer.Option(metavar="4,16,64", help="With the fewest servers: tokens so many times as fast.")
    ] = "4,16,64",
    seconds: Annotated[float, typer.Option(min=1, help="How long each round is observed.")] = 30.0,
    token_ms: Annotated[
        float, typer.Option(min=1, help="Milliseconds of a token with all slots busy, unless a run is replayed.")
    ] = 40.0,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Replay lengths and token times of this run.")
    ] = None,
    write_timings: Annotated[
        Path | None, typer.Option("--write-timings", metavar="FILE", help="Write the costs for async-grpo simulate.")
    ] = None,
) -> None:
    """Measure the control plane: many rollout servers whose engines replay timings, over a real Valkey.

    Groups per second beside the same engines alone, latencies of admission and announcements, and what a group costs
    Valkey. Takes about twelve minutes.
    """
    sizes, factors = _numbers("servers", servers), _numbers("faster", faster)
    options = {"seconds": seconds, "token_ms": token_ms, "source": source, "write_timings": write_timings}
    _measure("control-plane", json_file, None, quick=quick, servers=sizes, faster=factors, **options)


def _numbers(option: str, text: str) -> list[int]:
    """The whole numbers of a list with commas. Raises BadParameter."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(f"--{option} is {text!r}, and must be whole numbers above 0 with commas between")
    return [int(word) for word in words]


@app.command()
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

    def work() -> int:
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
        return 0

    exit_with(work)

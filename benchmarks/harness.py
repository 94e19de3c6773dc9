"""Command line of a benchmark: prints measurements with their baselines as a table, and as JSON with `--json FILE`.

    if __name__ == "__main__":
        main("python -m benchmarks.NAME", make_parser(__doc__), measure)

`measure(progress, quick=..., **options)` gets the parser's other options by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from async_grpo.errors import AsyncGrpoError
from async_grpo.lab.bench.measure import Machine, Measurement, ensure_writable, measurement_table, write_measurements

Measure = Callable[..., Coroutine[Any, Any, Sequence[Measurement]]]
Render = Callable[[str, Sequence[Measurement], Machine], RenderableType]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the measurements to FILE")
    parser.add_argument("--quick", action="store_true", help="only check that it works; the results mean little")
    return parser


def main(title: str, parser: argparse.ArgumentParser, measure: Measure, render: Render = measurement_table) -> None:
    """Measure, print and write the results. Prints an AsyncGrpoError without a traceback and exits with 1."""
    options: dict[str, Any] = vars(parser.parse_args())
    json_file: Path | None = options.pop("json")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        if json_file is not None:
            ensure_writable(json_file)  # before measuring: a path that cannot be written fails now, not after minutes
        machine = Machine.detect()
        with Progress(*columns, console=Console(stderr=True)) as progress:
            measurements = uvloop.run(measure(progress, **options))
        Console().print(render(title, measurements, machine))
        if json_file is not None:
            write_measurements(json_file, measurements, machine)
    except AsyncGrpoError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", highlight=False, markup=False)
        sys.exit(1)

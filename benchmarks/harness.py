"""The command line of a benchmark: figures with their baselines as a table, and as JSON with `--json FILE`.

    if __name__ == "__main__":
        main("python -m benchmarks.NAME", parser(__doc__), measure)

`measure(progress, quick=..., **options)` gets the other options of the parser by name.
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
from async_grpo.lab.bench.measure import Machine, Measurement, make_room, table, write

Measure = Callable[..., Coroutine[Any, Any, Sequence[Measurement]]]
View = Callable[[str, Sequence[Measurement], Machine], RenderableType]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")
    made.add_argument("--quick", action="store_true", help="only check that it works; the figures mean little")
    return made


def main(title: str, arguments: argparse.ArgumentParser, measure: Measure, view: View = table) -> None:
    """Measure, print and write. Exits with 1 for an error raised on purpose, which is printed without a traceback."""
    options: dict[str, Any] = vars(arguments.parse_args())
    json_file: Path | None = options.pop("json")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        if json_file is not None:
            make_room(json_file)
        machine = Machine.here()
        with Progress(*columns, console=Console(stderr=True)) as progress:
            figures = uvloop.run(measure(progress, **options))
        Console().print(view(title, figures, machine))
        if json_file is not None:
            write(json_file, figures, machine)
    except AsyncGrpoError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", highlight=False, markup=False)
        sys.exit(1)

"""`python -m benchmarks.published [NAME ...]`: predict published measurements, and print every cell, hit or missed."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from benchmarks.published.published import Cell, Study
from benchmarks.published.studies import STUDIES


def table_of(study: Study) -> Table:
    """The cells of a study with their errors, and the baseline's."""
    table = Table(title=study.title, title_justify="left", caption_justify="left")
    for column in ("where", "quantity", "measured", "predicted", "error", "baseline", "limit", ""):
        table.add_column(column, justify="left" if column in ("where", "quantity", "") else "right")
    for cell in study.cells:
        limit = f"{cell.tolerance:g}" if cell.absolute else f"{cell.tolerance:.0%}"
        numbers = (f"{cell.measured:.4g}", f"{cell.predicted:.4g}", _text(cell, cell.error))
        said = "calibrates" if cell.calibrates else "" if cell.hits else "missed"
        table.add_row(cell.where, cell.quantity, *numbers, _text(cell, cell.baseline_error), limit, said)
    return table


def _text(cell: Cell, error: float | None) -> str:
    return "" if error is None else f"{error:+.2f}" if cell.absolute else f"{error:+.1%}"


def main(names: list[str]) -> None:
    """Print the studies with these names, or all."""
    console = Console(width=120)
    for make in STUDIES:
        if names and make.__name__ not in names:
            continue
        started_s = time.perf_counter()
        study = make()
        console.print(table_of(study))
        console.print(f"source: {study.source}", *study.assumptions, sep="\n- ", highlight=False)
        new = [cell for cell in study.cells if not cell.calibrates]
        both = [cell for cell in new if cell.baseline_error is not None]
        ours, theirs = (sum(map(abs, errors)) / len(both) for errors in _errors(both))
        console.print(
            f"{sum(cell.hits for cell in new)} of {len(new)} within their limits; mean error {ours:.3f}, of the "
            f"baseline {theirs:.3f} ({time.perf_counter() - started_s:.0f} s)\n",
            highlight=False,
        )


def _errors(cells: list[Cell]) -> tuple[list[float], list[float]]:
    return [cell.error for cell in cells], [cell.baseline_error or 0.0 for cell in cells]


if __name__ == "__main__":
    main(sys.argv[1:])

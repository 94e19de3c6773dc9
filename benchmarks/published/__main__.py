"""`python -m benchmarks.published [NAME ...]`: predict published measurements and print every cell, hits and misses."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from benchmarks.published.published import Cell, Study
from benchmarks.published.studies import STUDIES


def make_table(study: Study) -> Table:
    """Make a table of the study's cells with their errors and the baseline's errors."""
    table = Table(title=study.title, title_justify="left", caption_justify="left")
    for column in ("where", "quantity", "measured", "predicted", "error", "baseline", "limit", ""):
        table.add_column(column, justify="left" if column in ("where", "quantity", "") else "right")
    for cell in study.cells:
        if cell.calibrates:
            remark = "calibrates"
        elif cell.is_hit:
            remark = ""
        else:
            remark = "missed"
        table.add_row(
            cell.where,
            cell.quantity,
            f"{cell.measured:.4g}",
            f"{cell.predicted:.4g}",
            _format_error(cell, cell.error),
            _format_error(cell, cell.baseline_error),
            f"{cell.tolerance:g}" if cell.absolute else f"{cell.tolerance:.0%}",
            remark,
        )
    return table


def _format_error(cell: Cell, error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:+.2f}" if cell.absolute else f"{error:+.1%}"


def main(names: list[str]) -> None:
    """Print the studies with these names, or all studies."""
    console = Console(width=120)
    for predict_study in STUDIES:
        if names and predict_study.__name__ not in names:
            continue
        started_s = time.perf_counter()
        study = predict_study()
        console.print(make_table(study))
        console.print(f"source: {study.source}", *study.assumptions, sep="\n- ", highlight=False)

        # Calibrating cells are hit by construction, so only the others count.
        predicted = [cell for cell in study.cells if not cell.calibrates]
        compared = [cell for cell in predicted if cell.baseline_error is not None]
        own_error = sum(abs(cell.error) for cell in compared) / len(compared)
        baseline_error = sum(abs(cell.baseline_error or 0.0) for cell in compared) / len(compared)
        console.print(
            f"{sum(cell.is_hit for cell in predicted)} of {len(predicted)} within their limits; mean error "
            f"{own_error:.3f}, of the baseline {baseline_error:.3f} ({time.perf_counter() - started_s:.0f} s)\n",
            highlight=False,
        )


if __name__ == "__main__":
    main(sys.argv[1:])

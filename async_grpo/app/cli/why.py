"""`async-grpo why`: where the time of a run went, and what would make it faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from async_grpo.app.cli.common import RunFolderArgument, exit_with, say
from async_grpo.errors import AsyncGrpoError

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to a file.")]
Changes = Annotated[bool, typer.Option(help="Simulate what changes would give.")]


def why(run: RunFolderArgument, json_file: JsonFile = None, changes: Changes = True) -> None:
    """Say where the time of a run went, what its trainer waited for, and what would make it faster.

    It reads the run's files, also while the run is live. What a change would give comes from a simulation with timings
    that are fitted to the same files.
    """
    from async_grpo.app.simulate.prediction import calibrated, table_of_changes
    from async_grpo.app.simulate.recorded import read_recorded
    from async_grpo.app.simulate.settings import SimulatedSettings
    from async_grpo.app.simulate.whatif import changes as simulated_changes
    from async_grpo.app.simulate.why import ADVICE, explain

    def work() -> int:
        recorded = read_recorded(run)
        found = explain(recorded)
        console = Console()
        console.print(
            f"{found.steps} steps took {found.seconds:.0f} s; the trainer waited for {found.wait_share:.0%} of them.",
            highlight=False,
        )
        table = Table("the trainer's time", "seconds", "share")
        for name, seconds, share in found.shares():
            table.add_row(name, f"{seconds:.1f}", f"{share:.1%}")
        console.print(table)
        console.print(f"Bottleneck: {found.cause.value}. {ADVICE[found.cause].capitalize()}.", highlight=False)
        if json_file is not None:
            shares = {name: share for name, _, share in found.shares()}
            json_file.write_text(json.dumps({"cause": found.cause.value, "shares": shares}, indent=2))
        if changes:
            try:
                timings, notes = calibrated([recorded])
            except AsyncGrpoError as error:
                say(f"what changes would give cannot be simulated: {error}")
                return 0
            for line in notes:
                say(line)
            console.print(table_of_changes(simulated_changes(SimulatedSettings.of(recorded.config), timings)))
        return 0

    exit_with(work)

"""`async-grpo why`: where the time of a run went, and what would make it faster."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from async_grpo.app.cli.common import RunFolderArgument, exit_with_code, say
from async_grpo.errors import AsyncGrpoError, DataError
from async_grpo.telemetry.bottleneck import ADVICE, MEANINGS
from async_grpo.telemetry.weight_updates import UPDATE_PARTS
from async_grpo.utils.text import figure

if TYPE_CHECKING:
    from async_grpo.lab.simulate.recorded import RecordedRun
    from async_grpo.lab.simulate.whatif import Change
    from async_grpo.lab.simulate.why import Explanation

FOLLOWED_STEPS, LOOK_EVERY_S = 20, 2.0
LEAST_SHARE = 0.02
"""Share of the time below which a part of the waits is not explained."""
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to a file.")]
Changes = Annotated[bool, typer.Option(help="Simulate what changes would give.")]
Last = Annotated[int | None, typer.Option("--last", min=1, metavar="N", help="Count only the last N steps.")]
Follow = Annotated[
    bool,
    typer.Option("--follow", help=f"Say it again after every step, until the run ends; of the last {FOLLOWED_STEPS}."),
]


@exit_with_code()
def why(
    run: RunFolderArgument,
    json_file: JsonFile = None,
    changes: Changes = True,
    last: Last = None,
    follow: Follow = False,
) -> None:
    """Say where the time of a run went, what its trainer waited for, and what would make it faster.

    It reads the run's files, also while the run is live. What a change would give comes from a simulation with timings
    that are fitted to the same files.
    """
    from async_grpo.lab.simulate.recorded import read_recorded
    from async_grpo.lab.simulate.why import explain

    console = Console()
    if follow:
        _follow(run, last or FOLLOWED_STEPS, console)
    recorded = read_recorded(run)
    found = explain(recorded, last=last)
    _show(found, console)
    simulated = _simulate(recorded, console) if changes else []
    if json_file is not None:
        json_file.write_text(json.dumps(_as_plain(found, simulated), indent=2))


def _show(found: Explanation, console: Console) -> None:
    console.print(
        f"{found.steps} steps took {found.seconds:.0f} s; the trainer waited for {found.wait_share:.0%} of them.",
        highlight=False,
    )
    for name, seconds in found.outages.items():
        console.print(f"For {seconds:.0f} s {name} was away and was being started again.", highlight=False)
    table = Table("the trainer's time", "seconds", "share", "faster without, at most", box=SIMPLE)
    for name, seconds, share in found.shares():
        table.add_row(name, f"{seconds:.1f}", f"{share:.1%}", f"{share / (1 - share):+.0%}" if share < 1 else "")
    console.print(table)
    for cause, seconds in sorted(found.waits.items(), key=lambda part: -part[1]):
        if seconds >= LEAST_SHARE * found.seconds:
            console.print(f"  waiting: {cause.value} = {MEANINGS[cause]}", highlight=False)
    table = Table("server", "generating", "evaluating", "loading weights", "idle", "waiting for processors", box=SIMPLE)
    for server in found.servers:
        shares = server.generating, server.evaluating, server.loading, server.idle, server.contended
        table.add_row(server.name, *(f"{share:.0%}" for share in shares))
    console.print(table)
    _show_updates(found, console)
    links = " > ".join(f"{name} {seconds:.3g} s" for name, seconds in found.path())
    console.print(f"Critical path of a step, in the mean: {links}.", highlight=False)
    advice = ADVICE[found.cause].capitalize()
    console.print(f"Bottleneck: {found.cause.value}, {found.share:.0%} of the time. {advice}.", highlight=False)


def _show_updates(found: Explanation, console: Console) -> None:
    """Print what weight updates took, for servers whose timelines state it."""
    table = Table("server", "weight updates", "transfer s", "pause s", "of it load s", box=SIMPLE)
    for server in found.servers:
        parts = [figure(server.updates[part], ".3f") for part in UPDATE_PARTS]
        table.add_row(server.name, str(server.updates["updates"]), *parts)
    if any(server.updates["pause_s"] is not None for server in found.servers):
        console.print(table)


def _simulate(recorded: RecordedRun, console: Console) -> list[Change]:
    """Print and return the simulated effect of changes."""
    from async_grpo.lab.simulate.prediction import calibrated, table_of_changes
    from async_grpo.lab.simulate.settings import SimulatedSettings
    from async_grpo.lab.simulate.whatif import changes

    try:
        timings, notes = calibrated([recorded])
    except AsyncGrpoError as error:
        say(f"what changes would give cannot be simulated: {error}")
        return []
    for line in notes:
        say(line)
    found = changes(SimulatedSettings.of(recorded.config), timings)
    console.print(table_of_changes(found))
    return found


def _follow(run: Path, last: int, console: Console) -> None:
    """Explain the last steps after every step, until the run is over."""
    from async_grpo.app.runs.run import Run, RunStatus
    from async_grpo.lab.simulate.recorded import read_recorded
    from async_grpo.lab.simulate.why import explain

    folder, seen = Run.open(run), 0
    while folder.status() is RunStatus.LIVE:
        try:
            recorded = read_recorded(run)
        except DataError:
            recorded = None  # it has only begun
        if recorded is not None and len(recorded.steps) != seen:
            seen = len(recorded.steps)
            console.rule(f"after step {seen} of {recorded.config.steps}")
            _show(explain(recorded, last=last), console)
        time.sleep(LOOK_EVERY_S)
    console.rule("the run is over")


def _as_plain(found: Explanation, simulated: list[Change]) -> dict[str, object]:
    """All figures, as JSON takes them. Shares are those of the steps' time, seconds those of a mean step."""
    return {
        "cause": found.cause.value,
        "share": found.share,
        "advice": ADVICE[found.cause],
        "steps": found.steps,
        "seconds": found.seconds,
        "shares": {name: share for name, _, share in found.shares()},
        "critical_path": [{"link": name, "seconds": seconds} for name, seconds in found.path()],
        "servers": [asdict(server) for server in found.servers],
        "outages": found.outages,
        "changes": [{"label": one.label, "key": one.key, "speedup": one.speedup} for one in simulated],
    }

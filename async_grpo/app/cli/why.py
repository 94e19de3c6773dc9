"""`async-grpo why`: show where the time of a run went, and what would make it faster."""

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

from async_grpo.app.cli.common import RunFolderArgument, exit_with_code, print_message
from async_grpo.errors import AsyncGrpoError, DataError
from async_grpo.telemetry.bottleneck import ADVICE, MEANINGS
from async_grpo.telemetry.weight_updates import UPDATE_PARTS
from async_grpo.utils.text import figure

if TYPE_CHECKING:
    from async_grpo.lab.simulate.recorded import RecordedRun
    from async_grpo.lab.simulate.whatif import Change
    from async_grpo.lab.simulate.why import Explanation

FOLLOWED_STEPS = 20
POLL_INTERVAL_S = 2.0
MIN_SHARE = 0.02
"""Minimum fraction of the time for which a cause of waiting is explained."""
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results to this file.")]
Changes = Annotated[bool, typer.Option(help="Simulate the effect of changes.")]
Last = Annotated[int | None, typer.Option("--last", min=1, metavar="N", help="Count only the last N steps.")]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow", help=f"Repeat the analysis of the last {FOLLOWED_STEPS} steps after every step until the run ends."
    ),
]


@exit_with_code()
def why(
    run: RunFolderArgument,
    json_file: JsonFile = None,
    changes: Changes = True,
    last: Last = None,
    follow: Follow = False,
) -> None:
    """Show where the time of a run went, and what would make it faster.

    Reads the run's files; the run may be live. The effect of changes is simulated with timings fitted to these files.
    """
    from async_grpo.lab.simulate.recorded import read_recorded
    from async_grpo.lab.simulate.why import explain_run

    console = Console()
    if follow:
        _follow(run, last or FOLLOWED_STEPS, console)
    recorded = read_recorded(run)
    explanation = explain_run(recorded, last=last)
    _show(explanation, console)
    simulated = _simulate_changes(recorded, console) if changes else []
    if json_file is not None:
        json_file.write_text(json.dumps(_as_plain(explanation, simulated), indent=2))


def _show(explanation: Explanation, console: Console) -> None:
    console.print(
        f"{explanation.steps} steps took {explanation.seconds:.0f} s; the trainer waited for "
        f"{explanation.wait_share:.0%} of them.",
        highlight=False,
    )
    for name, seconds in explanation.outages.items():
        console.print(f"{name} was down and restarting for {seconds:.0f} s.", highlight=False)
    table = Table("the trainer's time", "seconds", "share", "gain without it, at most", box=SIMPLE)
    for name, seconds, share in explanation.list_shares():
        table.add_row(name, f"{seconds:.1f}", f"{share:.1%}", f"{share / (1 - share):+.0%}" if share < 1 else "")
    console.print(table)
    for cause, seconds in sorted(explanation.waits.items(), key=lambda part: -part[1]):
        if seconds >= MIN_SHARE * explanation.seconds:
            console.print(f"  waiting: {cause.value} = {MEANINGS[cause]}", highlight=False)
    table = Table("server", "generating", "evaluating", "loading weights", "idle", "waiting for processors", box=SIMPLE)
    for server in explanation.servers:
        shares = server.generating, server.evaluating, server.loading, server.idle, server.contended
        table.add_row(server.name, *(f"{share:.0%}" for share in shares))
    console.print(table)
    _show_updates(explanation, console)
    links = " > ".join(f"{name} {seconds:.3g} s" for name, seconds in explanation.critical_path())
    console.print(f"Critical path of a step, in the mean: {links}.", highlight=False)
    advice = ADVICE[explanation.cause].capitalize()
    console.print(
        f"Bottleneck: {explanation.cause.value}, {explanation.share:.0%} of the time. {advice}.", highlight=False
    )


def _show_updates(explanation: Explanation, console: Console) -> None:
    """Print the duration of weight updates, for servers whose timelines contain it."""
    table = Table("server", "weight updates", "transfer s", "pause s", "of it load s", box=SIMPLE)
    for server in explanation.servers:
        parts = [figure(server.updates[part], ".3f") for part in UPDATE_PARTS]
        table.add_row(server.name, str(server.updates["updates"]), *parts)
    if any(server.updates["pause_s"] is not None for server in explanation.servers):
        console.print(table)


def _simulate_changes(recorded: RecordedRun, console: Console) -> list[Change]:
    """Print and return the simulated effect of changes."""
    from async_grpo.lab.simulate.prediction import calibrate_and_check, make_change_table
    from async_grpo.lab.simulate.settings import SimulatedSettings
    from async_grpo.lab.simulate.whatif import simulate_changes

    try:
        timings, notes = calibrate_and_check([recorded])
    except AsyncGrpoError as error:
        print_message(f"the effect of changes cannot be simulated: {error}")
        return []
    for line in notes:
        print_message(line)
    simulated = simulate_changes(SimulatedSettings.from_config(recorded.config), timings)
    console.print(make_change_table(simulated))
    return simulated


def _follow(run: Path, last: int, console: Console) -> None:
    """Explain the last steps after every step, until the run is over."""
    from async_grpo.app.runs.run import Run, RunStatus
    from async_grpo.lab.simulate.recorded import read_recorded
    from async_grpo.lab.simulate.why import explain_run

    folder = Run.open(run)
    seen_steps = 0
    while folder.status() is RunStatus.LIVE:
        try:
            recorded = read_recorded(run)
        except DataError:
            recorded = None  # it has no steps yet
        if recorded is not None and len(recorded.steps) != seen_steps:
            seen_steps = len(recorded.steps)
            console.rule(f"after step {seen_steps} of {recorded.config.steps}")
            _show(explain_run(recorded, last=last), console)
        time.sleep(POLL_INTERVAL_S)
    console.rule("the run is over")


def _as_plain(explanation: Explanation, simulated: list[Change]) -> dict[str, object]:
    """Return all results as plain data. Shares are fractions of the steps' time; seconds are per mean step."""
    return {
        "cause": explanation.cause.value,
        "share": explanation.share,
        "advice": ADVICE[explanation.cause],
        "steps": explanation.steps,
        "seconds": explanation.seconds,
        "shares": {name: share for name, _, share in explanation.list_shares()},
        "critical_path": [{"link": name, "seconds": seconds} for name, seconds in explanation.critical_path()],
        "servers": [asdict(server) for server in explanation.servers],
        "outages": explanation.outages,
        "changes": [{"label": change.label, "key": change.key, "speedup": change.speedup} for change in simulated],
    }

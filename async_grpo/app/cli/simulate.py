"""`async-grpo simulate`: predict a run before it is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from async_grpo.app.cli.common import ConfigFile, Override, exit_with_code, print_message

From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Fit the timings to this run; may be repeated. Two runs with different S fit better.",
    ),
]
Check = Annotated[
    list[Path] | None,
    typer.Option(metavar="RUN", help="Compare the simulation with this run, without fitting to it; may be repeated."),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Estimate the timings for a100, a800, h100, h800, h200, h20, 910b or 910c."),
]
TimingsFile = Annotated[
    Path | None,
    typer.Option("--timings", metavar="FILE", help="Read timings from this file. It may contain only some of them."),
]
Grid = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="KEY=A,B,C", help="Values to try, such as max_staleness=0,2,4; may be repeated."),
]
Steps = Annotated[
    int | None, typer.Option(min=4, metavar="N", help="Steps to simulate (default: as many as stable results need).")
]
Seed = Annotated[int, typer.Option(help="Seed of all random draws.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results to this file.")]
Plots = Annotated[Path | None, typer.Option(metavar="DIR", help="Write simulation.png to this folder.")]
WriteTimings = Annotated[
    Path | None,
    typer.Option("--write-timings", metavar="FILE", help="Write the timings used to this file, for editing."),
]


@exit_with_code()
def simulate(
    config: ConfigFile,
    override: Override = None,
    runs: From = None,
    device: Device = None,
    timings: TimingsFile = None,
    check: Check = None,
    grid: Grid = None,
    steps: Steps = None,
    seed: Seed = 1,
    json_file: JsonFile = None,
    plots: Plots = None,
    write_timings: WriteTimings = None,
) -> None:
    """Predict the speed of a run and the age of its trained tokens, without starting it.

    A discrete-event simulation with this project's own admission, selection and staleness code. Timings come from a
    run (--from), from rooflines of a device (--device), or from a file (--timings).

    Without --grid, also reports the effect of single changes: one more server, a larger S, faster weight updates. With
    --check, reports the prediction error on runs that were not used for fitting.
    """
    from async_grpo.app.launch.plan import plan_run
    from async_grpo.lab.simulate import prediction
    from async_grpo.lab.simulate.recorded import read_recorded
    from async_grpo.lab.simulate.uncertainty import describe_uncertainty
    from async_grpo.lab.simulate.whatif import simulate_changes

    base = plan_run(config, override or [], download=False).config
    seen = [read_recorded(path) for path in check or []]
    options = prediction.TimingsOptions(runs or [], device, timings)
    used, notes, uncertainty = options.read_timings(base)
    for line in notes:
        print_message(line)
    if write_timings is not None:
        used.write(write_timings)

    predictions = prediction.predict(
        config, override or [], grid or [], used, steps=steps, seed=seed, uncertainty=uncertainty
    )
    fitted_to = [read_recorded(path) for path in runs or []]
    compared = prediction.compare_with_runs(seen, used, seed=seed, fitted_to=fitted_to)
    if json_file is not None:
        json_file.write_text(json.dumps(prediction.as_plain(predictions, used, compared), indent=2))

    simulated_changes = [] if grid else simulate_changes(predictions[0].settings, used, steps=steps, seed=seed)
    prediction.print_tables(predictions, compared, simulated_changes)
    if uncertainty is not None:
        print_message(describe_uncertainty([one.range for one in predictions if one.range is not None], uncertainty))
    for path in prediction.save_plot(predictions, plots) if plots is not None else []:
        print_message(f"wrote {path}")

"""`async-grpo tune`: search settings for a goal by simulation, and verify them by short real runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from async_grpo.app.cli.common import ConfigFile, Override, complete_key, exit_with_code, print_line, print_message
from async_grpo.app.cli.simulate import Device, From, JsonFile, Seed, TimingsFile

Vary = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=A,B,C",
        help="Values to choose from, such as groups_per_step=8,16 or buffer.selector=fifo,windowed_fifo:8; may be "
        "repeated.",
        autocompletion=complete_key,
    ),
]
Fix = Annotated[list[str] | None, typer.Option(metavar="KEY", help="Do not vary this key; may be repeated.")]
GoalOption = Annotated[
    Literal["throughput", "cost", "reward"],
    typer.Option(
        help="Maximise tokens/s (throughput) or tokens per device-second (cost), or minimise the time to a reward, for "
        "which old tokens count less (reward)."
    ),
]
MaxAge = Annotated[float | None, typer.Option(min=0, metavar="STEPS", help="Maximum mean age of trained tokens.")]
MinEss = Annotated[
    float | None,
    typer.Option(min=0, max=1, metavar="SHARE", help="Minimum effective sample size of the importance weights."),
]
AgeCost = Annotated[
    float | None,
    typer.Option(min=0, metavar="C", help="--goal reward: a token of age a is worth 1 / (1 + C a) (default: 0.02)."),
]
Learning = Annotated[
    Path | None, typer.Option(metavar="SWEEP", help="--goal reward: measure C in this sweep over max_staleness.")
]
EssDecay = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="D",
        help="--min-ess: effective sample size is exp(-D a) at age a (default: D measured in --from).",
    ),
]
Trials = Annotated[
    int, typer.Option(min=2, help="Maximum number of points to simulate, in addition to the neighbours of the best.")
]
Real = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", help="Also run the N best settings and the current configuration for --real-steps steps."
    ),
]
RealSteps = Annotated[int, typer.Option(min=4, metavar="M", help="Measured steps per real run.")]
OutFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write (default: runs/NAME-tune).")]


@exit_with_code()
def tune(
    config: ConfigFile,
    override: Override = None,
    runs: From = None,
    device: Device = None,
    timings: TimingsFile = None,
    vary: Vary = None,
    fix: Fix = None,
    goal: GoalOption = "throughput",
    max_age: MaxAge = None,
    min_ess: MinEss = None,
    age_cost: AgeCost = None,
    learning: Learning = None,
    ess_decay: EssDecay = None,
    trials: Trials = 200,
    real: Real = 0,
    real_steps: RealSteps = 16,
    seed: Seed = 1,
    out: OutFolder = None,
    json_file: JsonFile = None,
) -> None:
    """Find faster settings for a run, by simulation and, with --real, by short real runs.

    Varies max_staleness, concurrency, the selector and, on accelerators, the split of the devices. Settings that change
    the batch or prefer short completions are varied only with --vary. Timings come from a run (--from), from rooflines
    of a device (--device), or from a file (--timings).

    Writes a configuration with a reason for every changed line, all results, and a plot of speed over age.
    """
    from async_grpo.lab.simulate.prediction import TimingsOptions
    from async_grpo.lab.tune.advice import as_json
    from async_grpo.lab.tune.tune import TuneOptions
    from async_grpo.lab.tune.tune import tune as find

    options = TuneOptions(
        config=config,
        timings=TimingsOptions(runs or [], device, timings),
        overrides=override or [],
        vary=vary or [],
        fix=fix or [],
        goal=goal,
        max_age=max_age,
        min_ess=min_ess,
        age_cost=age_cost,
        ess_decay=ess_decay,
        learning=learning,
        trials=trials,
        seed=seed,
        real=real,
        real_steps=real_steps,
        out=out,
        command=shlex.join(["async-grpo", *sys.argv[1:]]),
    )
    folder, advice = find(options, print_message)
    if json_file is not None:
        json_file.write_text(as_json(advice))

    Console().print(advice.table())
    for key, why in advice.reasons.items():
        print_line(f"{key}: {why}")
    print_line(advice.verdict)
    print_message(f"wrote {folder}: recommended.yaml, tune.json, plots/pareto.png")

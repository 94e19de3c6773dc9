"""`async-grpo runs`: list, inspect, compare, stop and delete runs."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_grpo.app.cli.checkpoints import pull
from async_grpo.app.cli.common import RunFolderArgument, complete_run, exit_with_code, print_line
from async_grpo.errors import AsyncGrpoError, ConfigError

if TYPE_CHECKING:
    from async_grpo.app.runs.upkeep import Removal, Wanted

app = typer.Typer(help="List, inspect, compare, stop and delete runs.", no_args_is_help=True)
app.command()(pull)

Root = Annotated[Path, typer.Argument(metavar="[RUNS]", help="Folder of runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
@exit_with_code()
def list_(root: Root = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs in a folder, including those of sweeps, with state and results, the latest first."""
    from async_grpo.app.runs.format import list_facts, print_list
    from async_grpo.app.runs.run import list_runs

    rows = [list_facts(run) for run in list_runs(root)]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print_list(rows)
    else:
        print_line(f"no run in {root}. `async-grpo run quickstart` creates one")


@app.command()
@exit_with_code()
def show(run: RunFolderArgument, as_json: AsJson = False) -> None:
    """Show one run: its state with the reason, its metrics, its files and the next command."""
    from async_grpo.app.runs.format import print_run, run_facts
    from async_grpo.app.runs.run import Run

    facts = run_facts(Run.open(run))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_run(facts)


@app.command()
@exit_with_code()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN ...", help="Folders of two runs or more.", autocompletion=complete_run),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also plot rewards and throughput over the steps.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the settings and metrics of runs.

    The ratio is the last run's metric divided by the first run's.
    """
    from async_grpo.app.runs.compare import compare_runs, plot_rewards
    from async_grpo.app.runs.format import comparison_facts, make_comparison_table, make_table_console
    from async_grpo.app.runs.run import Run

    if plot is not None and (plot.suffix != ".png" or plot.exists()):
        raise ConfigError(
            f"--plot {plot} is not a new file with the ending .png. Name one; existing files are not overwritten"
        )
    opened = [Run.open(path) for path in runs]
    comparison = compare_runs(opened)
    if plot is not None:
        plot_rewards(opened, plot)
    if as_json:
        print(json.dumps(comparison_facts(comparison), indent=2))
    else:
        make_table_console().print(make_comparison_table(comparison))


@app.command()
@exit_with_code()
def samples(
    run: RunFolderArgument,
    best: Annotated[bool, typer.Option("--best", help="Groups with the highest mean reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Groups with the lowest mean reward first.")] = False,
    seq: Annotated[int | None, typer.Option("--seq", min=0, help="Only the group with this sequence number.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Only groups trained in this step.")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="REGEX", help="Only groups whose prompt or a completion matches.")
    ] = None,
    reward_min: Annotated[
        float | None, typer.Option("--reward-min", help="Only groups with a completion of at least this reward.")
    ] = None,
    reward_max: Annotated[
        float | None, typer.Option("--reward-max", help="Only groups with a completion of at most this reward.")
    ] = None,
    rescore: Annotated[
        str | None,
        typer.Option(
            "--rescore",
            metavar="FUNCTION",
            help="Score the selected groups again with this reward function, such as mine:score. Shows both rewards.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Maximum number of groups.")] = 3,
    characters: Annotated[
        int, typer.Option("--characters", min=1, help="Maximum number of characters to show per text.")
    ] = 600,
) -> None:
    """Print samples: a prompt, its reference answer, and every completion with its reward.

    The latest groups come first. Text is escaped, so model output cannot control the terminal.
    """
    from async_grpo.app.runs.format import format_group
    from async_grpo.app.runs.run import Run
    from async_grpo.app.runs.samples import GroupFilter, mean_reward, written_s

    if best and worst:
        raise ConfigError("--best and --worst contradict each other. Use one of them")
    opened = Run.open(run)
    wanted = GroupFilter(seq, None if grep is None else _compile_pattern(grep), reward_min, reward_max)
    groups = wanted.select(opened.samples(step))
    groups.sort(key=mean_reward if best or worst else written_s, reverse=not worst)
    if not groups:
        raise ConfigError(
            f"none of the {len(opened.samples())} groups in the samples of {run} (every telemetry.samples_every-th "
            "one) matches the conditions. Remove some of them"
        )
    summary = None
    if rescore is not None:
        from async_grpo.app.runs.rescore import rescore_groups

        summary = rescore_groups(groups, rescore)
    for group in groups[:count]:
        for line in format_group(group, characters):
            print(line)
    if summary is not None:
        print(f"{summary} ({len(groups)} groups)")


@app.command()
@exit_with_code()
def report(
    run: RunFolderArgument,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until the run ends, for roles that are started separately. RUN may then be the CONFIG.",
        ),
    ] = False,
) -> int:
    """Rewrite the report of a run, which may be live, killed, or run in containers."""
    from async_grpo.app.launch.follow import follow_run
    from async_grpo.app.runs.run import Run
    from async_grpo.app.runs.upkeep import rewrite_report
    from async_grpo.telemetry.logging import is_json, make_progress_logger

    if wait:
        return follow_run(run, make_progress_logger("report") if is_json() else print_line)
    print_line(str(asyncio.run(rewrite_report(Run.open(run)))))
    return 0


@app.command()
@exit_with_code()
def stop(
    run: RunFolderArgument,
    now: Annotated[
        bool, typer.Option("--now", help="Kill immediately; work since the last checkpoint is lost.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Maximum seconds to wait for its end.")
    ] = 300.0,
) -> None:
    """Stop a live run on this machine, like Ctrl-C in its terminal.

    It writes a checkpoint and its report and exits. `async-grpo resume` continues it.
    """
    from async_grpo.app.runs.format import NEXT_COMMANDS
    from async_grpo.app.runs.run import Run
    from async_grpo.app.runs.stop import stop_run

    opened = Run.open(run)
    state = stop_run(opened, now=now, timeout_s=timeout, report_progress=print_line)
    print_line(f"{opened.path} is {state}, at step {len(opened.steps())}. Next: {NEXT_COMMANDS[state].format(run)}")


@app.command()
@exit_with_code()
def clean(
    root: Root = Path("runs"),
    older_than_days: Annotated[
        float | None,
        typer.Option("--older-than", min=0, metavar="DAYS", help="Only runs without a change in the last DAYS days."),
    ] = None,
    keep_last: Annotated[int, typer.Option("--keep-last", min=0, metavar="N", help="Keep the latest N runs.")] = 0,
    failed: Annotated[bool, typer.Option("--failed", help="Only runs that failed or were interrupted.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Delete only resumable checkpoints of finished runs, not exports.")
    ] = False,
    redis: Annotated[
        bool, typer.Option("--redis", help="Delete only keys of finished runs on a shared server, not folders.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete instead of only listing.")] = False,
) -> int:
    """List runs that can be deleted; with --yes, delete them. Live runs are never deleted.

    Without --checkpoints or --redis, deletes whole folders and the runs' keys on a shared server. RUNS may be one run's
    folder. A run without its keys or checkpoints cannot be extended.
    """
    from async_grpo.app.runs.format import describe_removal
    from async_grpo.app.runs.run import list_runs
    from async_grpo.app.runs.upkeep import Part, Wanted, choose_removals

    if checkpoints and redis:
        raise ConfigError("use either --checkpoints or --redis, not both")
    part = Part.FOLDER
    if checkpoints:
        part = Part.CHECKPOINTS
    elif redis:
        part = Part.KEYS
    wanted = Wanted(part, older_than_days, keep_last, failed)
    _check_chosen(root, wanted)
    removals = choose_removals(list_runs(root), wanted, time.time())
    if yes and removals:
        return _delete(removals)
    for removal in removals:
        print_line(f"would delete {describe_removal(removal)}")
    print_line(f"{len(removals)} to delete. " + ("--yes deletes them" if removals else "Live runs are never deleted"))
    return 0


def _check_chosen(root: Path, wanted: Wanted) -> None:
    """Raise ConfigError if all runs of a folder would be deleted because no condition was given."""
    from async_grpo.app.runs.upkeep import Part

    chosen = wanted.failed or wanted.keep_last or wanted.older_than_days is not None
    if wanted.part is Part.FOLDER and not chosen and not (root / "config.yaml").is_file():
        raise ConfigError(
            "this would delete all runs. Add --older-than DAYS, --keep-last N or --failed, name the folder of one run, "
            "or delete only --checkpoints or --redis of all finished runs"
        )


def _delete(removals: list[Removal]) -> int:
    """Delete all removals. A failure does not stop the others. Returns the exit code."""
    from async_grpo.app.runs.format import describe_removal
    from async_grpo.app.runs.upkeep import delete_part

    failures = 0
    for removal in removals:
        try:
            keys = asyncio.run(delete_part(removal))
            print_line(f"deleted {describe_removal(removal)}" + (f": {keys} keys" if removal.redis is not None else ""))
        except AsyncGrpoError as error:
            failures += 1
            print_line(f"not deleted: {describe_removal(removal)}: {error}")
    return 1 if failures else 0


def _compile_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--grep {text!r} is not a regular expression: {error}. Escape it, or quote it") from None

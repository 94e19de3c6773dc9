"""`async-grpo runs`: list runs, look at them, compare them, stop them, and clean up."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from async_grpo.app.cli.checkpoints import pull
from async_grpo.app.cli.common import RunFolderArgument, complete_run, exit_with, print_line
from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.utils.text import escape_controls, figure

if TYPE_CHECKING:
    from async_grpo.app.runs.compare import Comparison
    from async_grpo.app.runs.run import Run
    from async_grpo.app.runs.upkeep import Removal, Wanted

app = typer.Typer(help="List runs, look at them, compare them, stop them, and clean up.", no_args_is_help=True)
app.command()(pull)

Root = Annotated[Path, typer.Argument(metavar="[RUNS]", help="Folder of runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

_STYLES = {"live": "green", "finished": "blue", "failed": "red", "interrupted": "yellow"}
_WIDTH = 160
"""Width in characters of a table that is written to a file."""
_NEXT = {
    "live": "async-grpo view {0}; async-grpo buffer stats {0}",
    "finished": "async-grpo eval {0}; async-grpo resume {0} --steps N trains it further",
    "failed": "see {0}/logs; fix the cause, then: async-grpo resume {0}",
    "interrupted": "async-grpo resume {0}",
}


@app.command("list")
def list_(root: Root = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs in a folder, those of sweeps too, with their state and results; the latest comes first."""
    from async_grpo.app.runs.run import list_runs

    def work() -> int:
        rows = [_facts(run) for run in list_runs(root)]
        if as_json:
            print(json.dumps(rows, indent=2))
            return 0
        if not rows:
            print_line(f"no run in {root}. `async-grpo run quickstart` makes one")
            return 0
        # Points of a sweep differ at the end of their names, so a long name is wrapped, not cut.
        folder = Column("run", overflow="fold")
        table = Table(folder, "state", "steps", "held-out score", "reward", "tokens/s", "wall", "last written")
        for row in rows:
            table.add_row(*_cells(row))
        console = _console()
        if not console.is_terminal:
            console.width += max(len(row["run"]) for row in rows)  # in a file, a name is on one line and can be copied
        console.print(table)
        return 0

    exit_with(work)


@app.command()
def show(run: RunFolderArgument, as_json: AsJson = False) -> None:
    """Show one run: its state and why, its figures, its files, and what to do next."""
    from async_grpo.app.runs.run import Run

    def work() -> int:
        opened = Run.open(run)
        facts = _facts(opened)
        facts |= {"figures": _figures(opened), "warnings": len(opened.warnings()), "files": _files(opened)}
        facts["next"] = _NEXT[facts["state"]].format(run)
        if as_json:
            print(json.dumps(facts, indent=2))
            return 0
        table = Table(show_header=False, title=escape_controls(opened.name))
        table.add_row("state", Text(facts["state"], _STYLES[facts["state"]]))
        if facts["reason"]:
            table.add_row("reason", Text(escape_controls(facts["reason"], 400)))
        for name, text in {**_shown_figures(opened), "warnings": str(facts["warnings"])}.items():
            table.add_row(name, text)
        for name, text in facts["files"].items():
            table.add_row(name, Text(text))
        _console().print(table)
        # Outside the table, which would fold it: it is a command to copy.
        _console().print(Text(f"next: {facts['next']}"), soft_wrap=True)
        return 0

    exit_with(work)


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN ...", help="Folders of two runs or more.", autocompletion=complete_run),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw rewards and throughput over the steps.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings that differ, and the figures. The ratio is that of the last run to the first."""
    from async_grpo.app.runs.compare import compare as put_beside
    from async_grpo.app.runs.compare import plot_rewards
    from async_grpo.app.runs.run import Run

    def work() -> int:
        if plot is not None and (plot.suffix != ".png" or plot.exists()):
            raise ConfigError(f"--plot {plot}: name a new file that ends in .png; nothing is overwritten")
        opened = [Run.open(path) for path in runs]
        found = put_beside(opened)
        if plot is not None:
            plot_rewards(opened, plot)
        if as_json:
            ratios = {key: found.ratio(key) for key in found.figures}
            document = {"runs": found.names, "settings": found.settings, "figures": found.figures, "ratios": ratios}
            print(json.dumps(document, indent=2))
        else:
            _console().print(_comparison(found))
        return 0

    exit_with(work)


@app.command()
def samples(
    run: RunFolderArgument,
    best: Annotated[bool, typer.Option("--best", help="Groups with the highest mean reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Groups with the lowest mean reward first.")] = False,
    seq: Annotated[int | None, typer.Option("--seq", min=0, help="Only the group of this sequence number.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Only groups that this step trained.")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="REGEX", help="Only groups whose prompt or a completion matches.")
    ] = None,
    reward_min: Annotated[
        float | None, typer.Option("--reward-min", help="Only groups with a completion of this reward or more.")
    ] = None,
    reward_max: Annotated[
        float | None, typer.Option("--reward-max", help="Only groups with a completion of this reward or less.")
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Number of groups.")] = 3,
    characters: Annotated[int, typer.Option("--characters", min=1, help="Characters to show of each text.")] = 600,
) -> None:
    """Print groups of samples: prompt, answer, and every completion with its reward; the latest groups first.

    Text is escaped: nothing that a model wrote can control the terminal.
    """
    from async_grpo.app.runs.run import Run

    def work() -> int:
        if best and worst:
            raise ConfigError("--best and --worst are opposites. Give one of them")
        opened = Run.open(run)
        groups = [row for row in opened.samples(step) if seq is None or row.get("seq") == seq]
        if grep is not None:
            matches = _pattern(grep)
            groups = [row for row in groups if any(map(matches, _texts(row)))]
        if reward_min is not None or reward_max is not None:
            groups = [row for row in groups if _has_reward_within(row, reward_min, reward_max)]
        groups.sort(key=_mean_reward if best or worst else _time, reverse=not worst)
        if not groups:
            raise ConfigError(
                f"no group of {run} fits among the {len(opened.samples())} that were written "
                "(every telemetry.samples_every-th one). Ask for less"
            )
        for row in groups[:count]:
            for line in _group_lines(row, characters):
                print(line)
        return 0

    exit_with(work)


@app.command()
def report(
    run: RunFolderArgument,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until the run is over: for roles that are started one by one. RUN may then be its CONFIG.",
        ),
    ] = False,
) -> None:
    """Write the report of a run again: of one that is live, was killed, or ran in containers too."""
    from async_grpo.app.runs.run import Run
    from async_grpo.app.runs.upkeep import rewrite_report

    def work() -> int:
        if wait:
            from async_grpo.app.launch.follow import follow_run
            from async_grpo.telemetry.logging import is_json, say_as

            return follow_run(run, say_as("report") if is_json() else print_line)
        print_line(str(asyncio.run(rewrite_report(Run.open(run)))))
        return 0

    exit_with(work)


@app.command()
def stop(
    run: RunFolderArgument,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for unfinished work: back to the last checkpoint.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for its end.")] = 300.0,
) -> None:
    """Stop a live run of this machine from another terminal, as Ctrl-C does in its own: it ends with a checkpoint and
    its report, and `async-grpo resume` continues it."""
    from async_grpo.app.runs.run import Run
    from async_grpo.app.runs.stop import stop_run

    def work() -> int:
        opened = Run.open(run)
        state = stop_run(opened, now=now, timeout_s=timeout, say=print_line)
        print_line(f"{opened.path} is {state}, at step {len(opened.steps())}. Next: {_NEXT[str(state)].format(run)}")
        return 0

    exit_with(work)


@app.command()
def clean(
    root: Root = Path("runs"),
    older_than_days: Annotated[
        float | None,
        typer.Option("--older-than", min=0, metavar="DAYS", help="Runs that were not written for so long."),
    ] = None,
    keep_last: Annotated[int, typer.Option("--keep-last", min=0, metavar="N", help="Leave the latest N runs.")] = 0,
    failed: Annotated[bool, typer.Option("--failed", help="Only runs that failed or were interrupted.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Only resumable checkpoints of finished runs; exports stay.")
    ] = False,
    redis: Annotated[
        bool, typer.Option("--redis", help="Only the keys of finished runs on a shared server; folders stay.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only list.")] = False,
) -> None:
    """List what can be deleted, and delete it with --yes. Live runs are left alone.

    Without --checkpoints or --redis whole folders go, with the keys that their runs have on a shared server. RUNS may
    be the folder of one run. A run without its keys or its checkpoints cannot be extended.
    """
    from async_grpo.app.runs.run import list_runs
    from async_grpo.app.runs.upkeep import Part, Wanted, choose

    def work() -> int:
        if checkpoints and redis:
            raise ConfigError("--checkpoints and --redis are two things to delete. Give one of them")
        part = Part.CHECKPOINTS if checkpoints else Part.KEYS if redis else Part.FOLDER
        _check_chosen(root, Wanted(part, older_than_days, keep_last, failed))
        removals = choose(list_runs(root), Wanted(part, older_than_days, keep_last, failed), time.time())
        if yes and removals:
            return _delete(removals)
        for removal in removals:
            print_line(f"would delete {_named(removal)}")
        print_line(f"{len(removals)} to delete. " + ("--yes deletes them" if removals else "Live runs are left alone"))
        return 0

    exit_with(work)


def _check_chosen(root: Path, wanted: Wanted) -> None:
    """Raise ConfigError if all runs of a folder would be deleted because no condition was given."""
    from async_grpo.app.runs.upkeep import Part

    chosen = wanted.failed or wanted.keep_last or wanted.older_than_days is not None
    if wanted.part is Part.FOLDER and not chosen and not (root / "config.yaml").is_file():
        raise ConfigError(
            "which runs? Give --older-than DAYS, --keep-last N or --failed, the folder of one run, or what to delete "
            "of all finished runs: --checkpoints or --redis"
        )


def _delete(removals: list[Removal]) -> int:
    """Carry out all removals. If one fails, the others are still carried out."""
    from async_grpo.app.runs.upkeep import carry_out

    failures = 0
    for removal in removals:
        try:
            keys = asyncio.run(carry_out(removal))
            print_line(f"deleted {_named(removal)}" + (f": {keys} keys" if removal.redis is not None else ""))
        except AsyncGrpoError as error:
            failures += 1
            print_line(f"not deleted: {_named(removal)}: {error}")
    return 1 if failures else 0


def _named(removal: Removal) -> str:
    size = f" ({removal.size_bytes / 1e6:,.1f} MB)" if removal.paths else ""
    server = f", keys on {removal.redis.url}" if removal.redis is not None else ""
    return f"{removal.part} of {removal.run.path}{size}{server}"


def _facts(run: Run) -> dict[str, Any]:
    """The fields of a run in the list, as in the JSON output."""
    summary, settings = run.summary(), run.settings()
    keys = ("accuracy_before", "accuracy_after", "reward_last", "tokens_per_s", "wall_s")
    return {
        "run": str(run.path),
        "name": run.name,
        "state": str(run.status()),
        "reason": run.reason,
        "steps": len(run.steps()),
        "of_steps": settings.get("steps"),
        **{key: summary.get(key) for key in keys},
        "written_s": run.written_s,
    }


def _cells(row: dict[str, Any]) -> Iterator[Text | str]:
    yield Text(escape_controls(row["run"]))
    yield Text(row["state"], _STYLES[row["state"]])
    yield f"{row['steps']}/{row['of_steps'] or '?'}"
    before, after = figure(row["accuracy_before"], ".3f"), figure(row["accuracy_after"], ".3f")
    yield before if row["accuracy_after"] is None else f"{before} → {after}"
    yield figure(row["reward_last"], ".3f")
    yield figure(row["tokens_per_s"], ",.0f")
    yield figure(row["wall_s"], ",.0f") + " s"
    yield time.strftime("%Y-%m-%d %H:%M", time.localtime(row["written_s"]))


def _figures(run: Run) -> dict[str, Any]:
    from async_grpo.app.runs.compare import FIGURES

    summary = run.summary()
    return {key: summary.get(key) for key in FIGURES}


def _shown_figures(run: Run) -> dict[str, str]:
    from async_grpo.app.runs.compare import FIGURES

    figures = _figures(run)
    return {name: figure(figures[key], form) for key, (name, form) in FIGURES.items() if figures[key] is not None}


def _files(run: Run) -> dict[str, str]:
    """The files in the folder, by purpose."""
    kinds = ("report.md", "summary.json", "timeline.json", "metrics.jsonl", "checkpoints/hf")
    found = {kind: str(run.path / kind) for kind in kinds if (run.path / kind).exists()}
    counted = {kind: len(run.files(kind)) for kind in ("samples", "plots", "logs")}
    return found | {kind: f"{run.path / kind} ({count} files)" for kind, count in counted.items() if count}


def _comparison(found: Comparison) -> Table:
    from async_grpo.app.runs.compare import FIGURES

    table = Table("", *(escape(escape_controls(name)) for name in found.names), "ratio")
    for key, values in found.settings.items():
        table.add_row(key, *(Text(escape_controls(str(value), 60)) for value in values), "")
    table.add_section()
    for key, (name, form) in FIGURES.items():
        if any(value is not None for value in found.figures[key]):
            shown = [figure(value, form) for value in found.figures[key]]
            table.add_row(name, *shown, figure(found.ratio(key), ".2f"))
    return table


def _pattern(text: str) -> Callable[[str], re.Match[str] | None]:
    try:
        return re.compile(text, re.IGNORECASE).search
    except re.error as error:
        raise ConfigError(f"--grep {text!r} is not a regular expression: {error}. Escape it, or quote it") from None


def _texts(row: dict[str, Any]) -> list[str]:
    return [str(row.get("prompt", "")), *(str(one.get("text", "")) for one in row["completions"])]


def _has_reward_within(row: dict[str, Any], low: float | None, high: float | None) -> bool:
    """True if one completion has a reward within both limits. What could not be judged has none."""
    rewards = [one["reward"] for one in row["completions"] if one.get("reward") is not None]
    return any((low is None or reward >= low) and (high is None or reward <= high) for reward in rewards)


def _time(row: dict[str, Any]) -> float:
    return float(row.get("time_s") or 0.0)


def _mean_reward(row: dict[str, Any]) -> float:
    rewards = [float(one.get("reward") or 0.0) for one in row["completions"]]
    return sum(rewards) / max(1, len(rewards))


def _group_lines(row: dict[str, Any], limit: int) -> Iterator[str]:
    """The lines of a group for the terminal: one for each text, with equal completions on the same line."""
    yield f"group {row.get('seq')}, policy version {row.get('admitted_version')}, mean reward {_mean_reward(row):.3f}"
    yield f"  prompt: {escape_controls(str(row.get('prompt', '')), limit)}"
    yield f"  answer: {escape_controls(str(row.get('answer', '')), limit)}"
    counted = Counter((one.get("reward"), str(one.get("text", ""))) for one in row["completions"])
    for (reward, text), count in sorted(counted.items(), key=lambda entry: -(entry[0][0] or 0.0)):
        yield f"  {figure(reward, '.2f'):>6}  {f'({count} times) ' if count > 1 else ''}{escape_controls(text, limit)}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH))

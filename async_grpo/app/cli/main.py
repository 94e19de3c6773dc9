"""The `async-grpo` command: run, rollout, trainer and doctor, and the commands of the other modules here."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_grpo.app.cli import bench, buffer, checkpoints
from async_grpo.app.cli.chat import chat
from async_grpo.app.cli.common import exit_with
from async_grpo.app.cli.evaluate import evaluate
from async_grpo.app.cli.prepare import prepare
from async_grpo.app.cli.sweep import sweep
from async_grpo.app.doctor import examine
from async_grpo.config.trainer import PlatformName
from async_grpo.errors import ConfigError
from async_grpo.utils.requirements import Finding

MARKS = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]optional[/]"}


def report(platform: PlatformName, *, as_json: bool) -> int:
    """Print the findings of the doctor; returns the exit code: 1 if something that is needed is missing."""
    findings = examine(platform)
    healthy = all(finding.ok is not False for finding in findings)
    if as_json:
        document = {"platform": platform, "ok": healthy, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    else:
        Console().print(_table(platform, findings))
    return 0 if healthy else 1


def _table(platform: PlatformName, findings: list[Finding]) -> Table:
    table = Table(title=f"async-grpo doctor (platform: {platform})", show_lines=False)
    for column in ("", "what", "found", "what to type"):
        table.add_column(column)
    for finding in findings:
        fix = "" if finding.ok else finding.fix
        table.add_row(MARKS[finding.ok], finding.name, escape(finding.found), escape(fix))
    return table


app = typer.Typer(
    help="Asynchronous GRPO: rollout servers generate without pause, the trainer takes what is ready.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs of a docstring flow
)


app.add_typer(bench.app, name="bench")
app.add_typer(buffer.app, name="buffer")
app.command()(prepare)
app.command()(sweep)
app.command()(checkpoints.convert)
app.command()(checkpoints.export)
app.command("eval")(evaluate)
app.command()(chat)


ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/quickstart.yaml")]


Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="For example -o max_staleness=0; may be repeated."),
]


@app.command()
def run(
    config: ConfigArgument,
    override: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, start nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name and start over.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Answer what --fresh asks, with a shared server, by yes.")] = False,
) -> None:
    """Run everything on this machine: server, trainer, rollout servers, report.

    Ctrl-C stops cleanly; the same command again resumes. Overrides become part of the run's name, so each
    experiment has a folder of its own under runs/.
    """
    from async_grpo.app.launch.base import make_launcher
    from async_grpo.app.launch.preflight import describe, resolve

    def work() -> int:
        resolved = resolve(config, override or [], planning=dry_run)
        launcher = make_launcher(_always if yes else _ask)
        if dry_run:
            console = Console()
            console.print(describe(resolved))
            for file, text in launcher.render(resolved).items():
                console.print(f"{file}:\n{text}", markup=False)
            return 0
        return asyncio.run(launcher.launch(resolved, fresh=fresh, command=_command_line()))

    exit_with(work)


@app.command()
def rollout(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file with redis.url set.")] = None,
    override: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Join a run of this machine: runs/NAME, no CONFIG.")] = None,
    name: Annotated[str, typer.Option(help="Name of this server, unique in the run.")] = "rollout-0",
) -> None:
    """Run one rollout server, for containers and clusters, or as one more of a run that is going on.

    It joins and leaves as you start and stop it: the newest weights before its first token, and Ctrl-C stores what it
    has begun and gives it back.
    """
    from async_grpo.app.launch.single_role import join_run, run_rollout

    def work() -> int:
        if run_dir is not None and config is None and not override:
            return join_run(run_dir, name)
        if config is None or run_dir is not None:
            raise ConfigError("say which run: CONFIG (and -o) of a run with redis.url, or only --run-dir runs/NAME")
        return run_rollout(config, override or [], name)

    exit_with(work)


@app.command()
def trainer(
    config: ConfigArgument,
    override: Overrides = None,
    node_rank: Annotated[
        int | None,
        typer.Option(envvar="ASYNC_GRPO_NODE_RANK", help="Which of trainer.nodes this machine is, from 0."),
    ] = None,
) -> None:
    """Run the trainer, for containers and clusters (needs redis.url).

    With trainer.nodes above 1, the same command on each of these machines; it starts when all are there.
    """
    from async_grpo.app.launch.single_role import run_trainer

    exit_with(lambda: run_trainer(config, override or [], node_rank))


@app.command()
def doctor(
    platform: Annotated[PlatformName, typer.Option(help="What trainer and engine are to compute on.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Say what is installed, what is missing and what to type. Exit code 1: something that is needed is missing."""
    raise typer.Exit(report(platform, as_json=as_json))


def _always(question: str) -> bool:
    return True


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask. Pass --yes, or leave --fresh out")
    return typer.confirm(question)


def _command_line() -> str:
    import shlex

    return shlex.join(["async-grpo", *sys.argv[1:]])


if __name__ == "__main__":
    app()

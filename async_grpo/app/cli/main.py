"""The `async-grpo` command: run, resume, rollout, trainer, install, doctor, and the commands of other modules here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_grpo.app.cli import AT_IMPORT, bench, buffer, checkpoints, launch, runs
from async_grpo.app.cli.accept import accept
from async_grpo.app.cli.chat import chat
from async_grpo.app.cli.common import ConfigFile, OptionalConfigFile, Override, RunFolderArgument, Steps, exit_with
from async_grpo.app.cli.configs import configs
from async_grpo.app.cli.evaluate import evaluate
from async_grpo.app.cli.import_config import import_config
from async_grpo.app.cli.prepare import prepare
from async_grpo.app.cli.simulate import simulate
from async_grpo.app.cli.sweep import sweep
from async_grpo.app.cli.tune import tune
from async_grpo.app.cli.view import view
from async_grpo.app.cli.why import why
from async_grpo.app.launch.plan import load_run_config, plan_run
from async_grpo.app.launch.plan_table import plan_table
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config.trainer import PlatformName
from async_grpo.errors import ConfigError
from async_grpo.lab.doctor import checks_of, checks_of_run
from async_grpo.utils.requirements import Finding

INSTALLER = Path(__file__).parents[2] / "deploy" / "install"
"""A script that needs only Python and pip. In a checkout, async_grpo/deploy is a symbolic link."""
MARKS = {True: "[green]ok[/]", False: "[red]fails[/]", None: "[yellow]note[/]"}

app = typer.Typer(
    help="Asynchronous GRPO: rollout servers generate without pause, and the trainer takes what is ready.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs of a docstring flow
)
app.add_typer(bench.app, name="bench")
app.add_typer(buffer.app, name="buffer")
app.add_typer(runs.app, name="runs")
app.add_typer(launch.app, name="launch")
app.command()(prepare)
app.command()(import_config)
app.command()(configs)
app.command()(sweep)
app.command()(simulate)
app.command()(tune)
app.command()(why)
app.command()(checkpoints.convert)
app.command()(checkpoints.export)
app.command("eval")(evaluate)
app.command()(chat)
app.command()(accept)
app.command()(view)


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda wanted: _show_version(wanted), help="Show the version."
        ),
    ] = False,
) -> None:
    """Options that precede the command."""


@app.command()
def run(
    config: ConfigFile,
    override: Override = None,
    steps: Steps = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan; start nothing.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name and start over.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before --fresh deletes a run from a shared server or bucket.")
    ] = False,
) -> None:
    """Run everything on this machine: server, trainer, rollout servers, report.

    Ctrl-C stops cleanly; the same command again resumes. Overrides become part of the run's name, so every experiment
    has its own folder under runs/. --steps does not: it trains the run of that name further.
    """
    from async_grpo.app.launch.local import run_locally

    def work() -> int:
        if dry_run:
            Console().print(plan_table(plan_run(config, override or [], download=False, steps=steps)))
            return 0
        plan = plan_run(config, override or [], download=True, steps=steps, on_this_machine=True)
        confirm = (lambda question: True) if yes else _ask
        command = command_of(config, override, steps)
        return asyncio.run(run_locally(plan, fresh=fresh, command=command, confirm=confirm))

    exit_with(work)


@app.command()
def resume(
    run: RunFolderArgument,
    steps: Steps = None,
    checkpoint: Annotated[
        str | None, typer.Option("--from", metavar="VERSION", help="Resume from this checkpoint, not from the newest.")
    ] = None,
) -> None:
    """Resume a run that was stopped, killed or failed, with the settings in its folder.

    --steps N sets the total and so extends a finished run: it goes on from its last checkpoint, and its report covers
    all steps. A linear or cosine learning rate then falls towards the new end, so that it rises when it resumes.

    --from VERSION gives up the checkpoints after VERSION. Steps whose groups the buffer still has are repeated exactly;
    others are trained again on new groups, and the log says how many.
    """
    from async_grpo.app.launch.local import run_locally
    from async_grpo.app.launch.run_folder import choose_checkpoint
    from async_grpo.app.runs.run import Run

    def work() -> int:
        trained = len(Run.open(run).steps())
        if steps is not None and steps < trained:
            raise ConfigError(
                f"--steps is {steps}, but {run} has trained {trained} steps already. N is the total: name a larger one"
            )
        plan = plan_run(run, [], download=True, steps=steps, on_this_machine=True)
        if checkpoint is not None:
            version = choose_checkpoint(run, checkpoint)
            print(f"resuming from version {version}; steps after it, of {trained} so far, are trained again")
        return asyncio.run(run_locally(plan, fresh=False, command=command_of(run, None, steps)))

    exit_with(work)


@app.command()
def fetch(config: ConfigFile, override: Override = None) -> None:
    """Check a run, and download or make its model and data ahead of it, so that its roles find them.

    Containers do this before they start a role. Repeat it after a broken connection: it goes on from there.
    """
    from async_grpo.app.launch.single_role import prepare_inputs

    exit_with(lambda: prepare_inputs(config, override or []))


@app.command()
def rollout(
    config: OptionalConfigFile = None,
    override: Override = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Join this run of this machine, such as runs/quickstart.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this server, unique in the run.")] = "rollout-0",
) -> None:
    """Run one rollout server: for containers and clusters (CONFIG with redis.url), or to join a run (--run-dir).

    Start and stop it at any time. It fetches the newest weights before its first token. Ctrl-C stores its unfinished
    groups and returns them to the buffer.
    """
    from async_grpo.app.launch.single_role import join_run, run_rollout

    def work() -> int:
        if run_dir is not None and config is None and not override:
            return join_run(run_dir, name)
        if config is None or run_dir is not None:
            raise ConfigError(
                "which run? Give the CONFIG (and -o) of a run with redis.url, or --run-dir runs/NAME alone"
            )
        return run_rollout(config, override or [], name)

    exit_with(work)


@app.command()
def trainer(
    config: ConfigFile,
    override: Override = None,
    node_rank: Annotated[
        int | None,
        typer.Option(envvar="ASYNC_GRPO_NODE_RANK", help="Rank of this machine among trainer.nodes, from 0."),
    ] = None,
) -> None:
    """Run the trainer, for containers and clusters (needs redis.url).

    With trainer.nodes above 1, run the same command on each machine; training starts once all have joined.
    """
    from async_grpo.app.launch.single_role import run_trainer

    exit_with(lambda: run_trainer(config, override or [], node_rank))


@app.command()
def install(
    platform: Annotated[Literal["cpu", "cuda", "ascend"], typer.Argument(help="What this machine computes on.")],
    only: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="This stage alone. Repeatable; --print lists them.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave installed packages as they are, and add the others.")
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Show pip's commands, and run none.")] = False,
) -> None:
    """Install vLLM, Megatron-core and torch for this machine, by pip, in versions that fit together.

    pip alone cannot: the packages of one platform state requirements that contradict each other, and PyPI has some in
    builds for CUDA only. Versions and hashes are those of a lock file that comes with this package.
    """
    words = [platform, "--installed", *(f"--only={stage}" for stage in only or ())]
    words += [option for option, wanted in (("--keep", keep), ("--print", show)) if wanted]
    os.execv(sys.executable, [sys.executable, str(INSTALLER), *words])  # pip replaces packages of this process


@app.command()
def doctor(
    config: OptionalConfigFile = None,
    override: Override = None,
    platform: Annotated[
        PlatformName | None,
        typer.Option(help="Platform of the trainer and the engine (default: that of CONFIG, else cpu)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Report what is installed, what is missing and how to install it. Exits with 1 if a requirement is missing.

    With CONFIG also whether that run can start here: model, data and its first row, reward functions, memory, disk,
    ports, devices, Redis, and keys without effect.
    """
    checked, findings = None, []
    if config is not None:
        try:
            checked = load_run_config(config, override or [])
        except ConfigError as error:
            findings.append(Finding("Configuration", False, str(error), f"correct {config}, or the overrides"))
    chosen: PlatformName = platform or (checked.trainer.platform if checked is not None else "cpu")
    with Console(stderr=True).status("looking; private names of packages take ten seconds"):
        findings += [check() for check in checks_of(chosen)]
        findings += [check() for check in checks_of_run(checked)] if checked is not None else []
    healthy = all(finding.ok is not False for finding in findings)
    if as_json:
        document = {"platform": chosen, "ok": healthy, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print_findings(findings, f"async-grpo doctor (platform: {chosen})")
    raise typer.Exit(0 if healthy else 1)


def _print_findings(findings: Sequence[Finding], title: str) -> None:
    """Print the findings as a table and below it each fix on a line of its own, unabridged."""
    table = Table("", "what", "found", title=title)
    for finding in findings:
        table.add_row(MARKS[finding.ok], finding.name, escape(finding.found))
    console = Console()
    console.print(table)
    fixes: dict[tuple[bool | None, str], list[str]] = {}
    for finding in findings:
        if not finding.ok and finding.fix:
            fixes.setdefault((finding.ok, finding.fix), []).append(finding.name)
    for (ok, fix), names in fixes.items():
        console.print(f"{MARKS[ok]} {escape(', '.join(names))}:", soft_wrap=True)
        console.print(f"  {fix}", markup=False, highlight=False, soft_wrap=True)


def command_of(config: Path, override: list[str] | None, steps: int | None) -> str:
    """The command that makes the run from scratch, for its report: the command typed, or the one that made the run
    whose folder was given."""
    first = RunFolder(config).read_state().command if config.is_dir() and not override else ""
    if not first:
        return shlex.join(["async-grpo", *sys.argv[1:]])
    return f"{first.partition(' --steps ')[0]} --steps {steps}" if steps else first


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from async_grpo import __version__

    root, found = Path(__file__).parents[3], ""
    if (root / ".git").exists():
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    typer.echo(f"async-grpo {__version__}" + (f" (commit {found} in {root})" if found else ""))
    raise typer.Exit


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask. Pass --yes, or leave --fresh out")
    return typer.confirm(question)


if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and AT_IMPORT is signal.default_int_handler:
    signal.signal(signal.SIGINT, AT_IMPORT)  # imported: from here on, Ctrl-C is an exception
if __name__ == "__main__":
    app()

"""The `async-grpo` command: run, resume, fetch, rollout, trainer, install, and the commands of other modules here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from async_grpo.app.cli import AT_IMPORT, bench, buffer, checkpoints, launch, runs
from async_grpo.app.cli.accept import accept
from async_grpo.app.cli.chat import chat
from async_grpo.app.cli.common import (
    ConfigFile,
    OptionalConfigFile,
    Override,
    RunFolderArgument,
    Steps,
    complete_key_name,
    exit_with_code,
)
from async_grpo.app.cli.configs import configs
from async_grpo.app.cli.doctor import doctor
from async_grpo.app.cli.evaluate import evaluate
from async_grpo.app.cli.import_config import import_config
from async_grpo.app.cli.prepare import prepare
from async_grpo.app.cli.simulate import simulate
from async_grpo.app.cli.sweep import sweep
from async_grpo.app.cli.tune import tune
from async_grpo.app.cli.view import view
from async_grpo.app.cli.why import why
from async_grpo.app.launch.plan import plan_run
from async_grpo.app.launch.plan_table import plan_table
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.errors import ConfigError

INSTALLER = Path(__file__).parents[2] / "deploy" / "install"
"""A script that needs only Python and pip. In a checkout, async_grpo/deploy is a symbolic link."""


class OrderedGroup(typer.core.TyperGroup):
    """Lists commands in the order of PANELS. Typer alone would list `runs` and `bench` after all plain commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, panel by panel."""
        return [name for names in PANELS.values() for name in names]


app = typer.Typer(
    cls=OrderedGroup,
    help="Train language models with asynchronous GRPO: sampling and training run at the same time.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs of a docstring flow
)


@app.callback()
def common(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda wanted: _show_version(wanted), help="Show the version."
        ),
    ] = False,
) -> None:
    """Options that precede the command. Without a command, the everyday commands are printed."""
    if ctx.invoked_subcommand is None:
        _print_everyday_commands(ctx)


FIRST_RUN = """\
  async-grpo run quickstart --dry-run     show the plan of a first run on two CPU cores; without --dry-run, train
  async-grpo view                         open the page of all runs in a browser
  async-grpo configs quickstart --to .    copy its configuration, and make it your own
"""


def _print_everyday_commands(ctx: typer.Context) -> None:
    """Print the first panel of the help and how to start. Newcomers need these nine commands; --help lists all."""
    console = Console()
    console.print("\nTrain language models with asynchronous GRPO.\n\n[bold]A first run[/]\n", highlight=False)
    console.print(FIRST_RUN, highlight=False, soft_wrap=True)

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    group = ctx.command
    assert isinstance(group, OrderedGroup)
    for name in PANELS[EVERYDAY]:
        table.add_row(f"  {name}", first_paragraph(group.commands[name].help or ""))
    console.print("[bold]Everyday commands[/]\n", highlight=False)
    console.print(table)
    console.print("\n`async-grpo COMMAND --help` explains one; `async-grpo --help` lists all.\n", highlight=False)


def first_paragraph(help_text: str) -> str:
    """Return the first paragraph of a command's help as one line."""
    return " ".join(help_text.split("\n\n")[0].split())


@exit_with_code()
def run(
    config: ConfigFile,
    override: Override = None,
    steps: Steps = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan, without starting anything.")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Show what a key does, its value in CONFIG and where it was set, without starting anything.",
            autocompletion=complete_key_name,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name and start over.")] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Do not ask for confirmation before --fresh deletes a run from a shared server or bucket."
        ),
    ] = False,
) -> int:
    """Train a policy on this machine, with a report at the end.

    Starts the buffer server, the trainer and the rollout servers.

    Ctrl-C stops cleanly, and the same command resumes. Overrides become part of the run's name, so every experiment has
    its own folder under runs/. --steps does not: it continues the run of the same name.
    """
    from async_grpo.app.launch.local import run_locally

    if explain is not None:
        from async_grpo.config.explain import explain_key

        print("\n\n".join(str(explanation) for explanation in explain_key(config, override or [], explain)))
        return 0
    if dry_run:
        Console().print(plan_table(plan_run(config, override or [], download=False, steps=steps)))
        return 0
    plan = plan_run(config, override or [], download=True, steps=steps, on_this_machine=True)
    command = reproducing_command(config, override, steps)
    confirm = _confirm_without_asking if yes else _ask
    return asyncio.run(run_locally(plan, fresh=fresh, command=command, confirm=confirm))


@exit_with_code()
def resume(
    run: RunFolderArgument,
    steps: Steps = None,
    checkpoint: Annotated[
        str | None, typer.Option("--from", metavar="VERSION", help="Resume from this checkpoint instead of the newest.")
    ] = None,
) -> int:
    """Continue a run that was stopped or killed or that failed, with the same settings.

    --steps N sets the total number of steps. It extends a finished run: training continues from the last checkpoint,
    and the report covers all steps. A linear or cosine learning rate then decays towards the new end, so it jumps up at
    the resume.

    --from VERSION discards the checkpoints after VERSION. Steps whose groups are still in the buffer are repeated
    exactly. The others are trained again on new groups, and the log contains their number.
    """
    from async_grpo.app.launch.local import run_locally
    from async_grpo.app.launch.run_folder import choose_checkpoint
    from async_grpo.app.runs.run import Run

    trained = len(Run.open(run).steps())
    if steps is not None and steps < trained:
        raise ConfigError(
            f"--steps is {steps}, but {run} has already trained {trained} steps. N is the total: choose a larger one"
        )
    plan = plan_run(run, [], download=True, steps=steps, on_this_machine=True)
    if checkpoint is not None:
        version = choose_checkpoint(run, checkpoint)
        print(f"resuming from version {version}; steps after it, of {trained} so far, are trained again")
    return asyncio.run(run_locally(plan, fresh=False, command=reproducing_command(run, None, steps)))


@exit_with_code()
def fetch(config: ConfigFile, override: Override = None) -> int:
    """Check a run, and download or make its model and data before its roles start.

    Containers do this before they start a role. After a broken connection, repeat the command: it continues the
    download.
    """
    from async_grpo.app.launch.single_role import prepare_inputs

    return prepare_inputs(config, override or [])


@exit_with_code()
def rollout(
    config: OptionalConfigFile = None,
    override: Override = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of a live run on this machine to join, such as runs/quickstart."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this server, unique in the run.")] = "rollout-0",
) -> int:
    """Start one rollout server: for a run on a cluster, or in addition to those of a live run.

    On a cluster, CONFIG needs a redis.url. To join a live run on this machine, use --run-dir.

    Servers can be started and stopped at any time. A server fetches the newest weights before its first token. Ctrl-C
    saves its unfinished groups to the buffer, where other servers continue them.
    """
    from async_grpo.app.launch.single_role import join_run, run_rollout

    if run_dir is not None and config is None and not override:
        return join_run(run_dir, name)
    if config is None or run_dir is not None:
        raise ConfigError(
            "no run is selected. Give the CONFIG (and -o) of a run with redis.url, or only --run-dir runs/NAME"
        )
    return run_rollout(config, override or [], name)


@exit_with_code()
def trainer(
    config: ConfigFile,
    override: Override = None,
    node_rank: Annotated[
        int | None,
        typer.Option(envvar="ASYNC_GRPO_NODE_RANK", help="Rank of this machine among trainer.nodes, from 0."),
    ] = None,
) -> int:
    """Start only the trainer of a run, on a cluster or in a container.

    CONFIG needs a redis.url. With trainer.nodes above 1, run the same command on each machine. Training starts when
    all have joined.
    """
    from async_grpo.app.launch.single_role import run_trainer

    return run_trainer(config, override or [], node_rank)


def install(
    platform: Annotated[Literal["cpu", "cuda", "ascend"], typer.Argument(help="Hardware of this machine.")],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Install only this stage; may be repeated. --print lists the stages."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep installed packages, and install only missing ones.")
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Print pip's commands without running them.")] = False,
) -> None:
    """Install vLLM, Megatron-core and torch for this machine with pip, in compatible versions.

    pip cannot resolve them alone: packages of one platform have contradicting requirements, and PyPI has some of them
    only in CUDA builds. Versions and hashes come from a lock file in this package.
    """
    arguments = [platform, "--installed", *(f"--only={stage}" for stage in only or ())]
    if keep:
        arguments.append("--keep")
    if show:
        arguments.append("--print")
    # Replace this process: pip replaces packages that it has loaded.
    os.execv(sys.executable, [sys.executable, str(INSTALLER), *arguments])


def reproducing_command(config: Path, override: list[str] | None, steps: int | None) -> str:
    """Return the command that reproduces the run from scratch, for its report.

    This is the given command; for the folder of a run, the command that created the run.
    """
    command = ""
    if config.is_dir() and not override:
        command = RunFolder(config).read_state().command
    if not command:
        return shlex.join(["async-grpo", *sys.argv[1:]])
    if steps:
        return f"{command.partition(' --steps ')[0]} --steps {steps}"
    return command


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from async_grpo import __version__

    root = Path(__file__).parents[3]
    commit = ""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    typer.echo(f"async-grpo {__version__}" + (f" (commit {commit} in {root})" if commit else ""))
    raise typer.Exit


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal for the answer. Pass --yes, or leave --fresh out")
    return typer.confirm(question)


def _confirm_without_asking(question: str) -> bool:
    return True


COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "resume": resume,
    "view": view,
    "sweep": sweep,
    "prepare": prepare,
    "eval": evaluate,
    "doctor": doctor,
    "configs": configs,
    "import-config": import_config,
    "convert": checkpoints.convert,
    "export": checkpoints.export,
    "why": why,
    "simulate": simulate,
    "tune": tune,
    "chat": chat,
    "install": install,
    "accept": accept,
    "fetch": fetch,
    "rollout": rollout,
    "trainer": trainer,
}
GROUPS = {"runs": runs.app, "bench": bench.app, "buffer": buffer.app, "launch": launch.app}

EVERYDAY = "Everyday"
PANELS = {
    EVERYDAY: ["run", "resume", "view", "sweep", "runs", "prepare", "eval", "bench", "doctor"],
    "Data and checkpoints": ["configs", "import-config", "convert", "export"],
    "Understand and tune": ["why", "simulate", "tune", "chat", "buffer"],
    "Clusters and containers": ["install", "accept", "launch", "fetch", "rollout", "trainer"],
}
"""Commands per panel of the help, the most used first."""
for panel, names in PANELS.items():
    for command_name in names:
        if command_name in GROUPS:
            app.add_typer(GROUPS[command_name], name=command_name, rich_help_panel=panel)
        else:
            app.command(command_name, rich_help_panel=panel)(COMMANDS[command_name])

if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and AT_IMPORT is signal.default_int_handler:
    signal.signal(signal.SIGINT, AT_IMPORT)  # the imports are done: from here on, Ctrl-C is an exception again
if __name__ == "__main__":
    app()

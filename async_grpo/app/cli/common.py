"""Shared parts of the commands: exit codes and messages, progress bars, and options that name a run or a policy."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from async_grpo.errors import CONFIG_FAULTS, AsyncGrpoError, ConfigError
from async_grpo.utils.text import clean_text

if TYPE_CHECKING:
    from async_grpo.config import RunConfig
    from async_grpo.lab.evaluate.policy_source import Checkpoint, LiveRun

CONFIG_HELP = "Configuration file, name of a shipped configuration (quickstart), or folder of a run (runs/quickstart)."


def complete_config(incomplete: str) -> list[str]:
    """Return shipped configurations, configuration files and folders of runs that start with `incomplete`."""
    from async_grpo.config.load import shipped_configs

    shipped = sorted(path.stem for path in shipped_configs().glob("*.yaml"))
    return [*(name for name in shipped if name.startswith(incomplete)), *_complete_path(incomplete, (".yaml", ".yml"))]


def complete_run(incomplete: str) -> list[str]:
    """Return folders of runs that start with `incomplete`; those in runs/ if it is empty."""
    return _complete_path(incomplete, ())


def _complete_path(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files with one of `suffixes`, the folders of runs, and then the other folders to descend into."""
    if not incomplete:
        parent = Path("runs")
    elif incomplete.endswith("/"):
        parent = Path(incomplete)
    else:
        parent = Path(incomplete).parent

    choices: list[str] = []
    folders: list[str] = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if path.name.startswith(".") or not str(path).startswith(incomplete):
            continue
        if path.suffix in suffixes or (path / "config.yaml").is_file():
            choices.append(str(path))
        elif path.is_dir():
            folders.append(f"{path}/")
    return [*choices, *folders]


def complete_key(incomplete: str) -> list[str]:
    """Return configuration keys, followed by =, that start with `incomplete`."""
    from async_grpo.config import RunConfig
    from async_grpo.config.load import dotted_keys

    return [f"{key}=" for key in dotted_keys(RunConfig) if key.startswith(incomplete)]


def complete_key_name(incomplete: str) -> list[str]:
    """Return configuration keys that start with `incomplete`."""
    return [key.removesuffix("=") for key in complete_key(incomplete)]


_KEY_VALUE = typer.Option(
    *("-o", "--override"),
    metavar="KEY=VALUE",
    help="Override a configuration key, such as max_staleness=0; may be repeated.",
    autocompletion=complete_key,
)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)]
OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)
]
Override = Annotated[list[str] | None, _KEY_VALUE]
RunFolderArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of the run, such as runs/quickstart.", autocompletion=complete_run),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, metavar="N", help="Total number of optimizer steps; extends a finished run."),
]
RunConfigFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG",
        help="Folder of the run, or the configuration file that it was started with.",
        autocompletion=complete_config,
    ),
]
RunOverride = Annotated[
    list[str] | None,
    typer.Option(
        *("-o", "--override"),
        metavar="KEY=VALUE",
        help="Override with which the run was started; may be repeated.",
        autocompletion=complete_key,
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Folder of the run, such as runs/quickstart, instead of CONFIG."),
]
CheckpointPath = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH|ID", help="Hugging Face folder or id, or checkpoint of a run (default: the run's last)."
    ),
]
Live = Annotated[
    bool, typer.Option("--live", help="Use the current policy of a live run, through its rollout servers.")
]


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar with the elapsed time. It is on standard error, so that standard output can be piped.

    `columns` are shown between bar and time (default: `done/total`).
    """
    amounts = columns or (MofNCompleteColumn(),)
    layout = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeElapsedColumn())
    return Progress(*layout, console=Console(stderr=True))


def print_line(text: str) -> None:
    """Print a line of plain text to standard output."""
    Console().print(escape(text), highlight=False)


P = ParamSpec("P")


def exit_with_code(*, config_code: int = 1) -> Callable[[Callable[P, int | None]], Callable[P, NoReturn]]:
    """Decorate a command: exit with the code that it returns (None is 0), or with that of its error.

    Expected errors, and OS errors that name a file, are printed without a traceback. The exit code is then 1, or
    `config_code` for errors of the configuration or the installation.
    """

    def decorate(command: Callable[P, int | None]) -> Callable[P, NoReturn]:
        @functools.wraps(command)  # typer reads the options from the command's signature
        def run(*args: P.args, **options: P.kwargs) -> NoReturn:
            try:
                code = command(*args, **options) or 0
            except (AsyncGrpoError, OSError) as error:
                is_defect = isinstance(error, OSError) and error.filename is None and error.errno not in _DISK_FULL
                if is_defect:
                    raise  # the user named no file that could cause it
                _report_error(error)
                code = config_code if isinstance(error, CONFIG_FAULTS) else 1
            raise typer.Exit(code)

        return run

    return decorate


def _report_error(error: AsyncGrpoError | OSError) -> None:
    """Print the error to standard error: in red, or as a line of JSON where logs are JSON."""
    if os.environ.get("ASYNC_GRPO_LOG_FORMAT") == "json":
        from async_grpo.telemetry.logging import report_fatal

        return report_fatal(error)
    message = _explain_os_error(error) if isinstance(error, OSError) else str(error)
    Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {escape(message)}", highlight=False)


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_FIXES = {
    errno.ENOENT: "Check the name",
    errno.EISDIR: "Name a file in this folder",
    errno.ENOTDIR: "A part of this path is a file. Name a folder",
    errno.EACCES: "This user lacks the permission. Choose another path, or change its permissions",
    errno.EROFS: "Choose a path on a writable file system",
    errno.ENOSPC: "Free some space, or choose another disk. The same command then continues from the complete files",
    errno.EDQUOT: "Free some space, or choose another disk. The same command then continues from the complete files",
}


def _explain_os_error(error: OSError) -> str:
    """Return file, problem and fix as one sentence."""
    subject = f"{error.filename}: " if error.filename is not None else ""
    problem = (error.strerror or str(error)).lower()
    fix = _FIXES.get(error.errno or 0, "")
    return f"{subject}{problem}. {fix}".rstrip(". ")


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The options that select a policy, as given."""

    config: Path | None
    overrides: list[str] | None
    run_dir: Path | None
    checkpoint: Path | None
    live: bool

    def resolve_policy(self) -> tuple[RunConfig, Checkpoint | LiveRun]:
        """Return the run's configuration and its policy. Prints a note if the run was started with other values.

        Raises ConfigError or DataError if the options name two policies or none is found, and BufferFault if the buffer
        of a live run cannot be reached.
        """
        from async_grpo.lab.evaluate.policy_source import (
            differences,
            find_live_run,
            find_policy_checkpoint,
            load_chosen_run,
        )
        from async_grpo.models.hub import hub_repo

        if self.live and self.checkpoint is not None:
            raise ConfigError("--live and --checkpoint select different policies. Use one of them")
        overrides = self.overrides or []
        if self.live:
            live_run = asyncio.run(find_live_run(self.config, overrides, self.run_dir))
            return live_run.config, live_run

        config, folder = load_chosen_run(self.config, overrides, self.run_dir)
        checkpoint = self.checkpoint
        if checkpoint is not None:
            repo = hub_repo(checkpoint, "model", config.model.hub, "--checkpoint")
            if repo is not None:
                checkpoint = repo.pin_revision().fetch_files(print_message)
        policy = find_policy_checkpoint(folder, checkpoint)
        if differing := differences(config, folder):
            print_message(f"note: {folder.path} was created with other values of {', '.join(differing)}")
        return config, policy


def print_message(text: str) -> None:
    """Print a line of plain text to standard error, because standard output is for results."""
    Console(stderr=True, soft_wrap=True).print(clean_text(text), markup=False, highlight=False)

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

EXAMPLE = "Configuration file, name of a shipped one (quickstart), or folder of a run (runs/quickstart)."


def complete_config(incomplete: str) -> list[str]:
    """Names of shipped configurations, configuration files, and folders of runs, that begin with what is typed."""
    from async_grpo.config.load import shipped_configs

    shipped = sorted(path.stem for path in shipped_configs().glob("*.yaml"))
    return [*(name for name in shipped if name.startswith(incomplete)), *_paths_like(incomplete, (".yaml", ".yml"))]


def complete_run(incomplete: str) -> list[str]:
    """Folders of runs that begin with what is typed; with nothing typed, those in runs/."""
    return _paths_like(incomplete, ())


def _paths_like(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") or not incomplete else typed.parent
    places = [folder] if incomplete else [Path("runs")]
    found = [path for place in places if place.is_dir() for path in sorted(place.iterdir())]
    fitting = [path for path in found if str(path).startswith(incomplete) and not path.name.startswith(".")]
    files = [str(path) for path in fitting if path.suffix in suffixes or (path / "config.yaml").is_file()]
    folders = [f"{path}/" for path in fitting if path.is_dir() and str(path) not in files]
    return [*files, *folders]


def complete_key(incomplete: str) -> list[str]:
    """Configuration keys, with =, that begin with what is typed."""
    from async_grpo.config import RunConfig
    from async_grpo.config.load import dotted_keys

    return [f"{key}=" for key in dotted_keys(RunConfig) if key.startswith(incomplete)]


_KEY_VALUE = typer.Option(
    *("-o", "--override"),
    metavar="KEY=VALUE",
    help="Override a key, such as max_staleness=0; may be repeated.",
    autocompletion=complete_key,
)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help=EXAMPLE, autocompletion=complete_config)]
OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help=EXAMPLE, autocompletion=complete_config)
]
Override = Annotated[list[str] | None, _KEY_VALUE]
RunFolderArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of the run, such as runs/quickstart.", autocompletion=complete_run),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, metavar="N", help="Train up to N optimizer steps in all; extends a finished run."),
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
        help="Override that the run was started with; may be repeated.",
        autocompletion=complete_key,
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Folder of the run, such as runs/quickstart, in place of CONFIG."),
]
CheckpointPath = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH|ID", help="Hugging Face folder or id, or checkpoint of a run (default: the run's final one)."
    ),
]
Live = Annotated[bool, typer.Option("--live", help="Ask the rollout servers of a run in progress.")]


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar with the time elapsed, on standard error, so that standard output can be piped.

    `columns` stand between bar and time; without any, it is `done/total`.
    """
    amount = columns or (MofNCompleteColumn(),)
    shown = (TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn())
    return Progress(*shown, console=Console(stderr=True))


def print_line(text: str) -> None:
    """Print a line of plain text to standard output."""
    Console().print(escape(text), highlight=False)


P = ParamSpec("P")


def exit_with_code(*, config_code: int = 1) -> Callable[[Callable[P, int | None]], Callable[P, NoReturn]]:
    """Decorate a command: exit with the code that it returns (None is 0), or with that of the error that it raises.

    Errors raised on purpose, and those about a file that the user named, are printed as a message without a traceback;
    the exit code is then 1, or `config_code` for a fault of the configuration or the installation.
    """

    def decorate(command: Callable[P, int | None]) -> Callable[P, NoReturn]:
        @functools.wraps(command)  # typer reads the options from the command's signature
        def run(*args: P.args, **options: P.kwargs) -> NoReturn:
            try:
                code = command(*args, **options) or 0
            except (AsyncGrpoError, OSError) as error:
                if isinstance(error, OSError) and error.filename is None and error.errno not in _FULL:
                    raise  # it names no file, so it is a defect of this program
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


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FIXES = {
    errno.ENOENT: "Check the name",
    errno.EISDIR: "Name a file in it",
    errno.ENOTDIR: "A part of this path is a file: name a folder",
    errno.EACCES: "This user may not do that: choose another place, or change its permissions",
    errno.EROFS: "Choose a place that can be written to",
    errno.ENOSPC: "Free some space, or choose another disk; the same command goes on from what is whole",
    errno.EDQUOT: "Free some space, or choose another disk; the same command goes on from what is whole",
}


def _explain_os_error(error: OSError) -> str:
    """The error in one sentence: the file, the problem and the fix."""
    place = f"{error.filename}: " if error.filename is not None else ""
    fix = _FIXES.get(error.errno or 0, "")
    return f"{place}{(error.strerror or str(error)).lower()}. {fix}".rstrip(". ")


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The options that name a policy, as typed."""

    config: Path | None
    overrides: list[str] | None
    run_dir: Path | None
    checkpoint: Path | None
    live: bool

    def policy(self) -> tuple[RunConfig, Checkpoint | LiveRun]:
        """The run's configuration and its policy; prints a note if the run was started with other values.

        Raises ConfigError or DataError if two policies are named or none is found, and BufferFault if the buffer of a
        live run cannot be reached.
        """
        from async_grpo.lab.evaluate.policy_source import (
            differences,
            find_live_run,
            find_policy_checkpoint,
            load_chosen_run,
        )
        from async_grpo.models.hub import hub_repo

        if self.live and self.checkpoint is not None:
            raise ConfigError("--live and --checkpoint are two policies. Give one of them")
        overrides = self.overrides or []
        if self.live:
            found = asyncio.run(find_live_run(self.config, overrides, self.run_dir))
            return found.config, found
        config, folder = load_chosen_run(self.config, overrides, self.run_dir)
        repo = None
        if self.checkpoint is not None:
            repo = hub_repo(self.checkpoint, "model", config.model.hub, "--checkpoint")
        policy = find_policy_checkpoint(folder, self.checkpoint if repo is None else repo.pinned().fetch(say))
        if differing := differences(config, folder):
            say(f"note: {folder.path} was made with other values of {', '.join(differing)}")
        return config, policy


def say(line: str) -> None:
    """Print a line of plain text to standard error, because standard output is for the answer."""
    Console(stderr=True, soft_wrap=True).print(clean_text(line), markup=False, highlight=False)

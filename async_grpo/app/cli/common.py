"""Which policy a command is about: the options that `eval` and `chat` share, and what they choose.

How a command ends: its exit code, and an error raised on purpose as its message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.utils.text import clean_text

if TYPE_CHECKING:
    from async_grpo.app.evaluate.policy_source import Checkpoint, LiveRun
    from async_grpo.config import RunConfig


def exit_with(work: Callable[[], int]) -> None:
    """Run a command; an error raised on purpose, or of a file that the user named, is shown as its message, not as a
    traceback."""
    try:
        code = work()
    except (AsyncGrpoError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise  # of no file: a fault of this program
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)
        code = 1
    raise typer.Exit(code)


ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="Of the run, such as configs/quickstart.yaml")
]


Override = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="As the run was started; may be repeated."),
]


RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="runs/NAME instead of CONFIG and -o.")]


CheckpointPath = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="A Hugging Face folder or a checkpoint of a run; else the run's final one."),
]


Live = Annotated[bool, typer.Option("--live", help="Ask the rollout servers of a run that is going on.")]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What was typed."""

    config: Path | None
    overrides: list[str] | None
    run_dir: Path | None
    checkpoint: Path | None
    live: bool

    def check(self) -> None:
        """Raises ConfigError if two policies were named."""
        if self.live and self.checkpoint is not None:
            raise ConfigError("--live and --checkpoint are two policies. Give one of them")

    def policy(self) -> tuple[RunConfig, Checkpoint | LiveRun]:
        """The run's configuration and its policy; a note where the run was made with other values than were typed.

        Raises ConfigError, DataError, and of a live run BufferFault.
        """
        from async_grpo.app.evaluate.policy_source import chosen_run, differences, find_checkpoint, find_live

        self.check()
        overrides = self.overrides or []
        if self.live:
            found = asyncio.run(find_live(self.config, overrides, self.run_dir))
            return found.config, found
        config, folder = chosen_run(self.config, overrides, self.run_dir)
        policy = find_checkpoint(folder, self.checkpoint)
        if differing := differences(config, folder):
            say(f"note: {folder.path} was made with other values of {', '.join(differing)}")
        return config, policy


def say(line: str) -> None:
    """A line to stderr, as plain text: stdout is the answer's."""
    Console(stderr=True, soft_wrap=True).print(clean_text(line), markup=False, highlight=False)

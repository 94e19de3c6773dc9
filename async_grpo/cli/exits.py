"""How a command ends: its exit code, and an error raised on purpose as its message."""

from __future__ import annotations

from collections.abc import Callable

import typer
from rich.console import Console
from rich.markup import escape

from async_grpo.errors import AsyncGrpoError


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

"""What became of roles that were started one by one: `roles/NAME.jsonl` in the run's folder.

    kind "start"   the role began; written before its program does
    kind "error"   message: the error that ended it
    kind "end"     it ended with code 0: the run is over, or it was stopped

A role that is killed writes nothing. `async-grpo run` keeps count itself and has no such files. Roles are seen from
machines that share the folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from async_grpo.telemetry.jsonl import JsonLines, read_rows

VARIABLE = "ASYNC_GRPO_ROLE_HISTORY"
"""The file of this process's role; not set where a supervisor watches over it."""


def record_start(file: Path) -> None:
    """Record a start in `file`, to which this process and those that it starts add their end."""
    os.environ[VARIABLE] = str(file)
    _record(kind="start")


def record_error(message: str) -> None:
    """Record the error that ends this process. Does nothing outside a role that was started on its own."""
    _record(kind="error", message=message)


def record_end() -> None:
    """Record that this role ends as it should; see `record_error`."""
    _record(kind="end")


def restarts(file: Path) -> int:
    """How often the role was started without having ended as it should before."""
    kinds = [row.get("kind") for row in read_rows(file) if row.get("kind") != "error"]
    return sum(pair == ("start", "start") for pair in itertools.pairwise(kinds))


def failure(file: Path) -> str:
    """Why the role, which is not at work now, has not ended as it should; "" if it has."""
    rows = read_rows(file)
    if not rows or rows[-1].get("kind") == "end":
        return ""
    if rows[-1].get("kind") == "error":
        return f"{file.stem}: {rows[-1].get('message')}"
    return (
        f"{file.stem} ended and could not record why: it was killed, its machine went down, or its log has a traceback"
    )


def _record(**row: str) -> None:
    file = os.environ.get(VARIABLE)
    if file:
        with contextlib.suppress(OSError), JsonLines(Path(file)) as lines:  # a full disk must not hide the error itself
            lines.write({**row, "time_s": time.time()})

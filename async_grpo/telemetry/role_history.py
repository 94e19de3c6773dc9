"""History of roles that were started separately: `roles/NAME.jsonl` in the run's folder.

    kind "start"   the role is starting; written before its program starts
    kind "error"   message: the error that ended it
    kind "end"     it ended with code 0: the run is over, or the role was stopped

A role that is killed writes nothing. `async-grpo run` counts restarts itself and has no such files. All machines that
share the folder see these files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from async_grpo.telemetry.jsonl import JsonLines, read_rows

VARIABLE = "ASYNC_GRPO_ROLE_HISTORY"
"""Environment variable with the history file of this process's role; not set for roles with a supervisor."""


def record_start(file: Path) -> None:
    """Record a start in `file`, and let this process and its children record their end there."""
    os.environ[VARIABLE] = str(file)
    _record(kind="start")


def record_error(message: str) -> None:
    """Record the error that ends this process. Does nothing for a role with a supervisor."""
    _record(kind="error", message=message)


def record_end() -> None:
    """Record that this role ends with code 0. Does nothing for a role with a supervisor."""
    _record(kind="end")


def count_restarts(file: Path) -> int:
    """Return the number of starts that followed a failure or a kill."""
    kinds = [row.get("kind") for row in read_rows(file) if row.get("kind") != "error"]
    return sum(pair == ("start", "start") for pair in itertools.pairwise(kinds))


def read_failure(file: Path) -> str:
    """Return why the role, which does not run now, has failed; "" if it ended with code 0."""
    rows = read_rows(file)
    if not rows or rows[-1].get("kind") == "end":
        return ""
    if rows[-1].get("kind") == "error":
        return f"{file.stem}: {rows[-1].get('message')}"
    return (
        f"{file.stem} ended without recording a reason: it was killed, its machine failed, or its log has a traceback"
    )


def _record(**row: str) -> None:
    file = os.environ.get(VARIABLE)
    if file:
        with contextlib.suppress(OSError), JsonLines(Path(file)) as lines:  # a full disk must not hide the error itself
            lines.write({**row, "time_s": time.time()})

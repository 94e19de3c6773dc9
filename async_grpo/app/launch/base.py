"""The seam of launchers: how, and where, the processes of a run are started.

    async-grpo run --dry-run --render--> files that the launcher would write
    async-grpo run           --launch--> a running job --> exit code

`local` is the only launcher of `async-grpo run`; it waits for the end. `async-grpo launch` hands a run to the
scheduler of a cluster and returns: `slurm`, `kubernetes`; on a cluster of `ray` it stays until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from async_grpo.config import RunConfig


class Launcher(Protocol):
    """Starts the processes of a run on the machines that it knows."""

    def render(self, config: RunConfig) -> Mapping[Path, str]:
        """The files with which it starts the run, such as manifests or batch scripts; {} if it needs none."""
        ...

    async def launch(self, config: RunConfig, *, fresh: bool, command: str) -> int:
        """Start or resume the run and wait for its end; returns the exit code: 0 trained, 130 interrupted.

        `fresh` deletes an earlier run of this name first; `command` is what the user typed, for the report. Raises
        ConfigError for a run that cannot be started here, before anything is written or started, and RoleFailed if a
        role fails more often than it may be restarted.
        """
        ...


def make_launcher(confirm: Callable[[str], bool] = lambda question: False) -> Launcher:
    """The launcher of this machine. `confirm` is asked before `fresh` deletes a run from a shared server, or the copy
    of another run from a bucket."""
    from async_grpo.app.launch.local import LocalLauncher

    return LocalLauncher(confirm)

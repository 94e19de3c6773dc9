"""Asynchronous GRPO: rollout servers generate without pause, a trainer takes finished groups and publishes weights.

    async_grpo.lab     tools around runs: sweep, simulate, tune, why, view, accept, bench, ...; no run imports them
       |
    async_grpo.app     commands; starts the processes of a run, keeps them running and reports on them
       |
    rollout_server     generates samples          trainer     trains on them, publishes weights
       |                                             |
    buffer             stores groups of samples between the two, in memory or in Redis
       |
    async_grpo         the library that all of them share: configuration, records, objectives, data, rewards, weights

Imports go downwards only. A rollout server waits for room in the buffer, the trainer waits for a batch, and neither
waits for the other. docs/architecture.md follows one sample and one tensor through the files.

The public names are `run` and `load_run`, `Run`, `RunConfig`, `load` and `__version__`. They are imported at first use,
because every child process imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_grpo.app.runs.run import Run
    from async_grpo.app.runs.start import load_run, run
    from async_grpo.config import RunConfig, load

    __version__: str

__all__ = ["Run", "RunConfig", "__version__", "load", "load_run", "run"]
_HOMES = {
    "Run": "app.runs.run",
    "RunConfig": "config",
    "load": "config",
    "load_run": "app.runs.start",
    "run": "app.runs.start",
}


def __getattr__(name: str) -> Any:
    """Import a public name. Raises AttributeError for any other name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("async-grpo")
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"async_grpo.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

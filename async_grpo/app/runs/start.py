"""`run` and `load_run`: start and read runs from Python, in scripts and notebooks.

    run(config) --request.json--> child process: `main`, the launcher of `async-grpo run` --lines--> progress
                <--Run----------- exit code, error.json

The run is a separate process because it needs its own event loop, signal handlers and children, and a notebook's
process already has these. The child ends with the process that started it. Ctrl-C, or the interrupt of a notebook,
shuts it down cleanly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.app.launch.local import run_locally
from async_grpo.app.launch.plan import load_run_config, plan_run
from async_grpo.app.runs.run import Run
from async_grpo.config import RunConfig, dump, validate
from async_grpo.errors import AsyncGrpoError, ConfigError, DataError, DependencyError, RoleFailed
from async_grpo.utils.child_process import child_argv
from async_grpo.utils.files import write_atomic

Overrides = Mapping[str, Any] | Sequence[str]
_KILL_AFTER_S = 60.0
"""Seconds that the child may take to shut down after an error in this process."""
_ERRORS = {error.__name__: error for error in (ConfigError, DataError, DependencyError)}
"""Errors of the child that are raised with their own type. Any other becomes a RoleFailed with its message."""


def run(
    config: str | Path | Mapping[str, Any] | RunConfig,
    *,
    overrides: Overrides = (),
    steps: int | None = None,
    fresh: bool = False,
    progress: bool | Callable[[str], object] = True,
) -> Run:
    """Run or resume like `async-grpo run`, wait for the end, and return the run.

    Args:
        config: A file, the name of a shipped configuration, the folder of a run, or the settings themselves.
        overrides: {"max_staleness": 0}, or ["max_staleness=0"]. They become part of the run's name.
        steps: Total number of optimizer steps. Extends a finished run.
        fresh: Delete an earlier run of this name first. Rejected if it has keys on a shared server, or if `runs_store`
            holds the copy of another run.
        progress: True shows the live panel in a terminal and prints lines elsewhere. A function receives each line.
            False shows nothing.

    Raises ConfigError, DataError or DependencyError for a run that cannot start, and RoleFailed for one that failed.
    Raises KeyboardInterrupt after an interrupted run was shut down cleanly; the same call then resumes it.
    """
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as name:
        exchange = Path(name)
        config_file = _find_or_write_config(config, exchange)
        assignments = _format_overrides(overrides)
        run_dir = load_run_config(config_file, assignments, steps).run_dir
        request = {"config": str(config_file), "overrides": assignments, "steps": steps, "fresh": fresh}
        (exchange / "request.json").write_text(json.dumps(request))
        code = _run_child(exchange, progress)
        if code:
            raise _read_error(exchange, code, run_dir)
    return Run.open(run_dir)


def load_run(path: str | Path) -> Run:
    """Return the run in a folder, such as runs/quickstart. Raises ConfigError if it is not the folder of a run."""
    return Run.open(Path(path))


def _find_or_write_config(config: str | Path | Mapping[str, Any] | RunConfig, exchange: Path) -> Path:
    """Return the path that was given, or the settings as a file in `exchange`."""
    if isinstance(config, str | Path):
        return Path(config)
    checked = config if isinstance(config, RunConfig) else validate(config, "the configuration")
    return write_atomic(exchange / "settings.yaml", dump(checked))


def _format_overrides(overrides: Overrides) -> list[str]:
    """Return the overrides as KEY=VALUE. Strings are kept; other values become JSON, which is valid YAML."""
    if not isinstance(overrides, Mapping):
        return [*overrides]
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]


def _run_child(exchange: Path, progress: bool | Callable[[str], object]) -> int:
    """Start the child and show its lines until it ends. Returns its exit code.

    `exchange`: folder with request.json, and error.json after a failure.
    """
    shows_panel = progress is True and sys.stdout.isatty()
    if progress is True:
        show_line: Callable[[str], object] = print
    else:
        show_line = progress or (lambda line: None)
    argv = child_argv([sys.executable, "-m", __spec__.name, str(exchange)], with_signal=signal.SIGTERM)
    streams: dict[str, Any] = {}
    if not shows_panel:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": _plain_environment()}

    # The child has its own session, so that Ctrl-C reaches only this process, which forwards it.
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams)
    interrupted = False
    with _keyboard_interrupts():
        try:
            while True:
                try:
                    for line in child.stdout or ():
                        show_line(line.rstrip("\n"))
                    code = child.wait()
                    break
                except KeyboardInterrupt:  # the child counts them: as in `async-grpo run`, the second one does not wait
                    interrupted = True
                    child.send_signal(signal.SIGINT)
        finally:
            _terminate_child(child)
    if interrupted and code:
        raise KeyboardInterrupt
    return code


@contextlib.contextmanager
def _keyboard_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C in the block. Inside `asyncio.run`, it would only cancel the current task."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _plain_environment() -> dict[str, str]:
    """Return the environment without Jupyter's variables, with which rich would draw a live panel into a pipe."""
    forced = ("FORCE_COLOR", "CLICOLOR_FORCE")
    environment = {key: value for key, value in os.environ.items() if key not in forced}
    return {**environment, "TTY_COMPATIBLE": "0"}


def _terminate_child(child: subprocess.Popen[str]) -> None:
    """Terminate the child if an error in this process left it running, and close its pipe."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _read_error(exchange: Path, code: int, run_dir: Path) -> AsyncGrpoError:
    """Return the error in error.json, or a RoleFailed if the child could not write one."""
    with contextlib.suppress(OSError, ValueError):
        error = json.loads((exchange / "error.json").read_text())
        return _ERRORS.get(error["error"], RoleFailed)(error["message"])
    return RoleFailed(
        f"the run was killed from outside (exit code {code}). The same call resumes it; see {run_dir}/logs"
    )


def main(exchange: Path) -> int:
    """Entry point of the child: run what request.json describes, and write error.json if it fails."""
    request = json.loads((exchange / "request.json").read_text())
    try:
        file, overrides, steps = Path(request["config"]), request["overrides"], request["steps"]
        plan = plan_run(file, overrides, download=True, steps=steps, on_this_machine=True)
        return asyncio.run(run_locally(plan, fresh=request["fresh"], command=""))
    except (AsyncGrpoError, OSError) as error:
        write_atomic(exchange / "error.json", json.dumps({"error": type(error).__name__, "message": str(error)}))
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""`run` and `load_run`: start runs and read them from Python, in scripts and notebooks.

    run(config) --config.yaml--> child process: `main` here, the launcher of `async-grpo run` --lines--> progress
                <--Run---------- exit code, error.json

The run is another process because it has an event loop, signal handlers and children of its own, and a notebook's
process has those already. The child ends with the process that started it; Ctrl-C, or a notebook's interrupt, stops it
in order.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Errors that are raised here with their own type; any other becomes a RoleFailed with its message."""


def run(
    config: str | Path | Mapping[str, Any] | RunConfig,
    *,
    overrides: Overrides = (),
    steps: int | None = None,
    fresh: bool = False,
    progress: bool | Callable[[str], object] = True,
) -> Run:
    """Run or resume as `async-grpo run` does, wait for the end, and return the run.

    Args:
        config: A file, the name of a shipped configuration, the folder of a run, or the settings themselves.
        overrides: {"max_staleness": 0}, or ["max_staleness=0"]; they become part of the run's name.
        steps: Optimizer steps in all; extends a finished run.
        fresh: Delete an earlier run of this name first. Refused if it has keys on a shared server, or if `runs_store`
            holds the copy of another run.
        progress: True shows the live panel in a terminal and prints lines elsewhere; a function gets each line; False
            shows nothing.

    Raises ConfigError, DataError or DependencyError for a run that cannot start, RoleFailed for one that failed, and
    KeyboardInterrupt after it was interrupted and has stopped in order; the same call then resumes it.
    """
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as folder:
        asked = Path(folder)
        file, given = _file_of(config, asked), _assignments(overrides)
        folder_of_run = load_run_config(file, given, steps).run_dir
        request = {"config": str(file), "overrides": given, "steps": steps, "fresh": fresh}
        (asked / "request.json").write_text(json.dumps(request))
        code = _follow(asked, progress)
        if code:
            raise _error(asked, code, folder_of_run)
    return Run.open(folder_of_run)


def load_run(path: str | Path) -> Run:
    """The run in a folder, such as runs/quickstart. Raises ConfigError if it is not the folder of a run."""
    return Run.open(Path(path))


def _file_of(config: str | Path | Mapping[str, Any] | RunConfig, folder: Path) -> Path:
    if isinstance(config, str | Path):
        return Path(config)
    checked = config if isinstance(config, RunConfig) else validate(config, "the configuration")
    return write_atomic(folder / "settings.yaml", dump(checked))


def _assignments(overrides: Overrides) -> list[str]:
    """The overrides as KEY=VALUE. Values are written as JSON, which is valid YAML; strings are kept as they are."""
    if not isinstance(overrides, Mapping):
        return [*overrides]
    told = {key: value if isinstance(value, str) else json.dumps(value) for key, value in overrides.items()}
    return [f"{key}={value}" for key, value in told.items()]


def _follow(asked: Path, progress: bool | Callable[[str], object]) -> int:
    """Start the child and show what it prints, until it has ended; returns its exit code."""
    in_terminal = progress is True and sys.stdout.isatty()
    show = print if progress is True else progress or (lambda line: None)
    argv = child_argv([sys.executable, "-m", __spec__.name, str(asked)], with_signal=signal.SIGTERM)
    streams: dict[str, Any] = (
        {} if in_terminal else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": _plain()}
    )
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams)
    interrupted = False
    with _interruptible():
        try:
            while True:
                try:
                    _show_all(child.stdout or (), show)
                    code = child.wait()
                    break
                except KeyboardInterrupt:  # a second one does not wait, as in `async-grpo run`
                    interrupted = True
                    child.send_signal(signal.SIGINT)
        finally:
            _end(child)
    if interrupted and code:
        raise KeyboardInterrupt
    return code


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within the block, Ctrl-C raises KeyboardInterrupt also inside `asyncio.run`, which would only cancel its task."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _plain() -> dict[str, str]:
    """The environment without the variables of Jupyter's kernel, which would make rich draw a live panel into a
    pipe."""
    forced = ("FORCE_COLOR", "CLICOLOR_FORCE")
    return {**{key: value for key, value in os.environ.items() if key not in forced}, "TTY_COMPATIBLE": "0"}


def _show_all(lines: Iterable[str], show: Callable[[str], object]) -> None:
    for line in lines:
        show(line.rstrip("\n"))


def _end(child: subprocess.Popen[str]) -> None:
    """End the child if an error in this process left it running, and close its pipe."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _error(asked: Path, code: int, folder: Path) -> AsyncGrpoError:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((asked / "error.json").read_text())
        return _ERRORS.get(found["error"], RoleFailed)(found["message"])
    return RoleFailed(f"the run was ended from outside (exit code {code}). The same call resumes it; see {folder}/logs")


def main(asked: Path) -> int:
    """Entry point of the child: perform the run that request.json describes, and write error.json if it fails."""
    request = json.loads((asked / "request.json").read_text())
    try:
        file, overrides, steps = Path(request["config"]), request["overrides"], request["steps"]
        plan = plan_run(file, overrides, download=True, steps=steps, on_this_machine=True)
        return asyncio.run(run_locally(plan, fresh=request["fresh"], command=""))
    except (AsyncGrpoError, OSError) as error:
        write_atomic(asked / "error.json", json.dumps({"error": type(error).__name__, "message": str(error)}))
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Roles as processes of this machine: start, stop, exit reason and CPU cores.

    RoleProcess     one process of a role
    ProcessRunner   the role, with a new process after each restart, for the supervisor

    trainer     launch.cores.trainer: ranks, publisher
    rollout-i   launch.cores.rollout: server, engine, receiver, verifiers; all servers of the machine share them

The supervisor, the server of the buffer and roles without a list of cores may use all cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from async_grpo import errors
from async_grpo.app.launch.supervisor import RoleEnd, RunProgress, Supervisor
from async_grpo.app.report.live_state import Warn
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.telemetry.logging import fatal_events
from async_grpo.utils import processes
from async_grpo.utils.child_process import child_argv, signal_name
from async_grpo.utils.files import read_end, write_atomic
from async_grpo.utils.text import clean_text

_LOG_TAIL_BYTES = 64 << 10
_MIN_START_S = 1.5
"""Shorter starts are not recorded, see `StartTimes.record_start`."""
_OWN_ERRORS = "|".join(name for name, value in vars(errors).items() if isinstance(value, type))
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: )?"  # torch, before every line of a traceback
    rf"((?:\w+\.)*(?:\w*(?:Error|Exception|Failed|Killed)|{_OWN_ERRORS})\b.*)",
    re.MULTILINE,
)
_CONSEQUENCE = re.compile(r"rank \d+ ended with exit code|Connection (?:closed|reset) by peer|Broken pipe")
"""Errors that other processes report after a rank has ended. They are consequences, not the cause."""
_STAGES = {
    "trainer": (
        ("importing Megatron-core", ""),
        ("building the model", r"http\W+address\W"),
        ("joining the run", "model built"),
        ("publishing the first weights", "run joined"),
    ),
    "rollout": (
        ("importing the engine", ""),
        ("loading the model", r"http\W+address\W"),
        ("checking its log-probabilities", "the engine runs"),
        ("waiting for the first weights", "log-probabilities are those"),
    ),
}
"""Kind of role -> stages of its start, each with the regular expression that marks it in the log."""


def available_cores() -> list[int]:
    """Return the cores that this process may use, ascending; [] on a system without CPU affinity."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def assign_cores(config: RunConfig, available: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cores of the trainer and those of every rollout server; () means all.

    Raises ConfigError for a core that is not in `available`.
    """
    settings = config.launch.cores
    for key, cores in (("trainer", settings.trainer), ("rollout", settings.rollout)):
        missing = sorted(set(cores) - set(available))
        if missing:
            choices = ", ".join(map(str, available)) or "none: this system pins no process to a core"
            raise ConfigError(
                f"launch.cores.{key} contains {', '.join(map(str, missing))}, but this process may use these cores: "
                f"{choices}. Choose from these, or remove launch.cores.{key}"
            )
    return tuple(settings.trainer), tuple(settings.rollout)


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Command, log and limits of a role."""

    name: str
    argv: Sequence[str]
    log: Path
    max_restarts: int
    """Maximum restarts after failures in one invocation."""
    env: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    """Cores that it may use; () means all."""


class RoleProcess:
    """A running role in its own process group. It dies with the supervisor."""

    def __init__(self, spec: RoleSpec, process: asyncio.subprocess.Process, mark: str, log_start: int) -> None:
        self.spec = spec
        self._process = process
        self._mark = mark
        self._log_start = log_start
        self._started_s = time.monotonic()

    @classmethod
    async def start(cls, spec: RoleSpec, run: str) -> RoleProcess:
        """Start the process. Its standard output and error are appended to the log."""
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        mark = processes.mark(run, spec.name)
        with spec.log.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *child_argv(spec.argv, cores=spec.cores),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.env, processes.MARK_VARIABLE: mark},
                start_new_session=True,
            )
        return cls(spec, process, mark, log_start)

    @property
    def pid(self) -> int:
        """PID of the process itself, without its children."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self._started_s

    def stage(self) -> str:
        """Return the stage of its start, according to its log."""
        log = _read_tail(self.spec.log, self._log_start)
        reached = [stage for stage, pattern in _STAGES[kind_of(self.spec.name)] if re.search(pattern, log)]
        return reached[-1]

    async def wait(self) -> int:
        """Wait until the process has ended, then end its remaining children. Returns its exit code, -N after signal
        N."""
        code = await self._process.wait()
        await asyncio.to_thread(processes.end_family, self._mark, self._process.pid)
        return code

    def terminate(self) -> None:
        """Send SIGTERM: the role saves its work and exits."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process; `wait` ends its children."""
        # Not to the whole process group: it contains the process that cleans up the shared memory of the others.
        if self._process.returncode is None:
            self._process.kill()

    def explain(self, code: int) -> str:
        """Return for example `trainer ended with exit code 1: TrainingError: ... (log: ...)`."""
        end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        reason = _FROM_OUTSIDE.get(code)
        if reason is None:
            reason = find_last_error(self.spec.log, self._log_start)
        if reason:
            end = f"{end}: {reason}"
        return f"{self.spec.name} {end} (log: {self.spec.log})"


_FROM_OUTSIDE = {
    -signal.SIGKILL: "the kernel does this when memory runs out (see `dmesg`, or memory.events of the container)",
    -signal.SIGTERM: "",
}
"""Exit code of a role that was killed from outside -> explanation, because its log has none."""


def find_last_error(log: Path, start: int = 0) -> str:
    """Return the last line from `start` that names an error, shortened; the last line if none does.

    Errors about the end of another rank count only if there are no others.
    """
    tail = _read_tail(log, start)
    errors = fatal_events(tail) or _ERROR_LINE.findall(tail)
    causes = [error for error in errors if not _CONSEQUENCE.search(error)]
    candidates = causes or errors or tail.strip().splitlines()
    return clean_text(candidates[-1])[:500] if candidates else ""


def _read_tail(log: Path, start: int) -> str:
    """Return the end of the log, at most from `start`; "" if it cannot be read."""
    try:
        return read_end(log, _LOG_TAIL_BYTES, start=start).decode("utf-8", "replace")
    except OSError:
        return ""


def kind_of(role: str) -> str:
    """Return "trainer", or "rollout" for every rollout server."""
    return "trainer" if role == "trainer" else "rollout"


class ProcessRunner:
    """The `RoleRunner` of this machine: each start of the role is a process."""

    def __init__(self, spec: RoleSpec, run: str) -> None:
        self.name = spec.name
        self.max_restarts = spec.max_restarts
        self.waits_for_room = False
        self._spec = spec
        self._run = run
        self._process: RoleProcess | None = None

    @property
    def pid(self) -> int | None:
        """PID of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process."""
        self._process = await RoleProcess.start(self._spec, self._run)

    async def wait(self) -> RoleEnd:
        """Wait until the process and its children have ended."""
        assert self._process is not None, "call start first"
        code = await self._process.wait()
        end = RoleEnd(code, self._process.explain(code))
        self._process = None
        return end

    def stop(self) -> None:
        """Send SIGTERM, if there is a process."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, if there is a process."""
        if self._process is not None:
            self._process.kill()

    def stage(self) -> str:
        """Return the stage of its start, according to its log; "" without a process."""
        return "" if self._process is None else self._process.stage()


def supervise_processes(
    run: str,
    specs: Sequence[RoleSpec],
    *,
    spares: Sequence[RoleSpec] = (),
    restarts: dict[str, int],
    warn: Warn,
    stop_timeout_s: float,
    progress: RunProgress | None = None,
) -> Supervisor:
    """Return the supervisor of a run whose roles are processes of this machine. `stop` leaves no process behind."""
    return Supervisor(
        [ProcessRunner(spec, run) for spec in specs],
        spares=[ProcessRunner(spec, run) for spec in spares],
        restarts=restarts,
        warn=warn,
        stop_timeout_s=stop_timeout_s,
        progress=progress,
        end_leftovers=partial(processes.end_family, processes.mark(run)),
    )


class StartTimes:
    """Duration of the last start of each kind of role on this machine, in a file that all runs share."""

    def __init__(self, config: RunConfig, file: Path) -> None:
        """An unreadable `file` counts as missing."""
        model = str(config.model.path or ("random" if config.model.random else "warmup"))
        self._keys = {"trainer": f"trainer {config.trainer.platform} {model}"}
        self._keys["rollout"] = f"rollout {config.rollout.limits.platform} {model}"
        self._file = file

    def usual_s(self, role: str) -> float | None:
        """Return the seconds of the last start of this kind of role; None if unknown."""
        return self._read().get(self._keys[kind_of(role)])

    def record_start(self, role: str, seconds: float) -> None:
        """Store the duration of a start."""
        # In a resumed run, the publisher of the earlier invocation may still be on the board, so that the trainer
        # looks ready immediately. Such a start is not a measurement.
        if seconds < _MIN_START_S:
            return
        with contextlib.suppress(OSError):  # the estimate is optional, so a read-only cache is not an error
            self._file.parent.mkdir(parents=True, exist_ok=True)
            times = self._read() | {self._keys[kind_of(role)]: round(seconds, 1)}
            write_atomic(self._file, json.dumps(times, indent=2))

    def _read(self) -> dict[str, float]:
        try:
            times = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return times if isinstance(times, dict) else {}

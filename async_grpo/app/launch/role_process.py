"""Roles as processes of this machine, from their start to the reason for their end, and the cores that they may use.

    RoleProcess     one start of a role
    ProcessRunner   the role itself, start after start, for the supervisor

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
_LEAST_START_S = 1.5
_OWN_ERRORS = "|".join(name for name, value in vars(errors).items() if isinstance(value, type))
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: )?"  # torch, before every line of a traceback
    rf"((?:\w+\.)*(?:\w*(?:Error|Exception|Failed|Killed)|{_OWN_ERRORS})\b.*)",
    re.MULTILINE,
)
_CONSEQUENCE = re.compile(r"rank \d+ ended with exit code|Connection (?:closed|reset) by peer|Broken pipe")
"""Errors of other processes about a rank that has ended; they do not say why it ended."""
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
"""Kind of role -> what it does while it starts, and what its log says once that has begun."""


def cores_here() -> list[int]:
    """The cores that this process may use, ascending; [] on a system that cannot tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def role_cores(config: RunConfig, here: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores of the trainer and those of every rollout server; () means all. Raises ConfigError for a core that is
    not in `here`."""
    wanted = config.launch.cores
    for key, cores in (("trainer", wanted.trainer), ("rollout", wanted.rollout)):
        if absent := sorted(set(cores) - set(here)):
            available = ", ".join(map(str, here)) or "none: this system pins no process to a core"
            raise ConfigError(
                f"launch.cores.{key} names {', '.join(map(str, absent))}, but the cores that this process may use are "
                f"{available}. Name some of these, or leave launch.cores.{key} out"
            )
    return tuple(wanted.trainer), tuple(wanted.rollout)


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What to run. `restarts` is how often it may be started again after it has died."""

    name: str
    argv: Sequence[str]
    log: Path
    restarts: int
    env: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    """The cores that it may use; () means all."""


class RoleProcess:
    """A running role, in a process group of its own, that dies with the supervisor."""

    def __init__(self, spec: RoleSpec, process: asyncio.subprocess.Process, mark: str, log_start: int) -> None:
        self.spec = spec
        self._process = process
        self._mark = mark
        self._log_start = log_start
        self._started_s = time.monotonic()

    @classmethod
    async def start(cls, spec: RoleSpec, run: str) -> RoleProcess:
        """Start it; standard output and errors are appended to its log."""
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
        """The stage of its start, according to its log."""
        stages, log = _STAGES[kind_of(self.spec.name)], _tail(self.spec.log, self._log_start)
        return [stage for stage, sign in stages if re.search(sign, log)][-1]

    async def wait(self) -> int:
        """Wait until it has ended, then end the processes that it left; returns its exit code (-N: signal N)."""
        code = await self._process.wait()
        await asyncio.to_thread(processes.end_family, self._mark, self._process.pid)
        return code

    def ask_to_stop(self) -> None:
        """Send SIGTERM: the role finishes what it must and exits."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process; `wait` ends its children. The whole group is not killed at once, because it
        contains the process that removes what the others leave in shared memory."""
        if self._process.returncode is None:
            self._process.kill()

    def explain(self, code: int) -> str:
        """`rollout-0 was killed by SIGKILL` or `trainer ended with exit code 1: TrainingError: ...`."""
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        reason = last_error(self.spec.log, self._log_start) if code not in _FROM_OUTSIDE else _FROM_OUTSIDE[code]
        return f"{self.spec.name} {how}{': ' + reason if reason else ''} (log: {self.spec.log})"


_FROM_OUTSIDE = {
    -signal.SIGKILL: "the kernel does that where memory runs out (`dmesg`, or memory.events of the container)",
    -signal.SIGTERM: "",
}
"""Exit code of a role that was ended from outside -> explanation, because its log has none."""


def last_error(log: Path, start: int = 0) -> str:
    """The last line from `start` that names an error, shortened; without one the last line. Errors about the end of
    another rank count only if there is nothing else."""
    tail = _tail(log, start)
    lines = fatal_events(tail) or _ERROR_LINE.findall(tail)
    causes = [line for line in lines if not _CONSEQUENCE.search(line)] or lines or tail.strip().splitlines()
    return clean_text(causes[-1])[:500] if causes else ""


def _tail(log: Path, start: int) -> str:
    """The end of the log from `start`; "" if it cannot be read."""
    try:
        return read_end(log, _LOG_TAIL_BYTES, start=start).decode("utf-8", "replace")
    except OSError:
        return ""


def kind_of(role: str) -> str:
    """`trainer`, or `rollout` for every rollout server."""
    return "trainer" if role == "trainer" else "rollout"


class ProcessRunner:
    """The `RoleRunner` of this machine: every start of the role is a process."""

    def __init__(self, spec: RoleSpec, run: str) -> None:
        self.name, self.restarts = spec.name, spec.restarts
        self.waits_for_room = False
        self._spec, self._run = spec, run
        self._process: RoleProcess | None = None

    @property
    def pid(self) -> int | None:
        """PID of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process."""
        self._process = await RoleProcess.start(self._spec, self._run)

    async def wait(self) -> RoleEnd:
        """Wait until the process has ended, with its children."""
        assert self._process is not None, "start comes first"
        code = await self._process.wait()
        end = RoleEnd(code, self._process.explain(code))
        self._process = None
        return end

    def stop(self) -> None:
        """Send SIGTERM, if there is a process."""
        if self._process is not None:
            self._process.ask_to_stop()

    def kill(self) -> None:
        """Send SIGKILL, if there is a process."""
        if self._process is not None:
            self._process.kill()

    def stage(self) -> str:
        """The stage of its start, according to its log."""
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
    """The supervisor of a run whose roles are processes of this machine. Nothing of them is left after `stop`."""
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
    """How long each kind of role took to start on this machine, remembered between runs."""

    def __init__(self, config: RunConfig, file: Path) -> None:
        """`file` is shared by all runs; an unreadable file counts as missing."""
        model = str(config.model.path or ("random" if config.model.random else "warmup"))
        self._keys = {"trainer": f"trainer {config.trainer.platform} {model}"}
        self._keys["rollout"] = f"rollout {config.rollout.limits.platform} {model}"
        self._file = file

    def usual_s(self, role: str) -> float | None:
        """Seconds of the last start of such a role; None if unknown."""
        return self._read().get(self._keys[kind_of(role)])

    def note(self, role: str, seconds: float) -> None:
        """Remember how long a start took; a resumed run takes the publisher of its earlier invocation for the trainer's
        at first, so less than _LEAST_START_S is none. A file that cannot be written is not worth an error."""
        if seconds < _LEAST_START_S:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            times = self._read() | {self._keys[kind_of(role)]: round(seconds, 1)}
            write_atomic(self._file, json.dumps(times, indent=2))

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

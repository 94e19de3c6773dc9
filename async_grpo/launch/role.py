"""One supervised process: how to start it, end it, and say why it ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.launch import family
from async_grpo.process import child_argv

_LOG_TAIL_BYTES = 64 << 10
_ERROR_LINE = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|Timeout|Refused|Lost|Full|Corrupt|Failed|Fenced|Killed)\b.*"
    r"|(?<=traceback : )Signal \d+ \(SIG\w+\) received by PID \d+",  # torchrun, of a rank
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What to run. `restarts` is how often it may be started again after a death."""

    name: str
    argv: Sequence[str]
    log: Path
    restarts: int
    env: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    """Those that it may use; () for all."""


class RoleProcess:
    """A running role, in a process group of its own, that dies with the supervisor."""

    def __init__(self, spec: RoleSpec, process: asyncio.subprocess.Process, mark: str) -> None:
        self.spec = spec
        self._process = process
        self._mark = mark

    @classmethod
    async def start(cls, spec: RoleSpec, run: str) -> RoleProcess:
        """Start it; standard output and errors are appended to its log."""
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        mark = family.mark(run, spec.name)
        with spec.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *child_argv(spec.argv, cores=spec.cores),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.env, family.MARK_VARIABLE: mark},
                start_new_session=True,
            )
        return cls(spec, process, mark)

    @property
    def pid(self) -> int:
        """Of the process itself; its children have others."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for its end and end what it left behind; returns its exit code (-N: signal N)."""
        code = await self._process.wait()
        await asyncio.to_thread(family.end_marked, self._mark)
        return code

    def ask_to_stop(self) -> None:
        """SIGTERM: finish what must be finished, then exit."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)


def explain_exit(spec: RoleSpec, code: int) -> str:
    """`rollout-0 was killed by SIGKILL` or `trainer ended with exit code 1: TrainingError: ...`."""
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    reason = _last_error(spec.log) if code > 0 else ""
    return f"{spec.name} {how}{': ' + reason if reason else ''} (log: {spec.log})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_error(log: Path) -> str:
    """The last line of the log that names an error, shortened."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            tail = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line for line in _ERROR_LINE.findall(tail) if "ChildFailedError" not in line]
    return lines[-1][:500] if lines else ""

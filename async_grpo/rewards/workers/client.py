"""The pool's side of the worker supervisor: start it, send it commands, learn which workers have exited.

    SupervisorClient --SpawnWorker, KillWorker--> supervisor (one process)
    SupervisorClient <-------WorkerExited-------- supervisor

A command is sent at once and never waited for. The event loop calls `_receive_exit` when a message arrives. Only
`aclose` waits: for the supervisor to exit, at most CLOSE_TIMEOUT_S; then the supervisor is killed.

`worker_environment` says which variables verifiers see: what a Python program needs, and no secret unless it is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.rewards.workers.messages import MAX_MESSAGE_BYTES, KillWorker, SpawnWorker, WorkerExited
from async_grpo.utils.child_process import MARK_VARIABLE, child_argv

PASSED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    MARK_VARIABLE,
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Set to 1 where they are not set: `rewards.workers` says how much runs at the same time."""
CLOSE_TIMEOUT_S = 10.0


def worker_environment(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """PASSED_VARIABLES, LC_*, THREAD_VARIABLES and the `named`. Raises ConfigError if a named one is not set."""
    if missing := [name for name in named if name not in environment]:
        raise ConfigError(
            f"rewards.environment names {', '.join(missing)}, which is not set here. "
            "Set it where the rollout server starts, or take it off the list"
        )
    kept = {name: value for name, value in environment.items() if name in PASSED_VARIABLES or name.startswith("LC_")}
    threads = {name: environment.get(name, "1") for name in THREAD_VARIABLES}
    return {**kept, **threads, **{name: environment[name] for name in named}}


@dataclass(frozen=True, eq=False)
class WorkerHandle:
    """A worker that was requested. `exited` is set once the worker and all that it started are gone."""

    number: int
    channel: socket.socket
    exited: asyncio.Future[WorkerExited]


class SupervisorClient:
    """Has one supervisor process at a time.

    If the supervisor dies, all its workers count as exited with the cause "lost". The next `spawn` starts a new one.
    """

    def __init__(self, names: Sequence[str], memory_bytes: int, environment: Mapping[str, str]) -> None:
        self._argv = [sys.executable, "-P", "-m", "async_grpo.rewards.workers.supervisor", str(memory_bytes), *names]
        self._environment = environment
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._handles: dict[int, WorkerHandle] = {}
        self._spawned = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor; None if none runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the supervisor if none runs. Raises AsyncGrpoError once this client is closed."""
        async with self._starting:
            if self._closed:
                raise AsyncGrpoError("the reward pool is closed: nothing can be judged any more")
            if self._socket is not None:
                return
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *child_argv(self._argv, with_signal=signal.SIGTERM),
                    stdin=theirs.fileno(),
                    stdout=DEVNULL,
                    env=self._environment,
                    start_new_session=True,
                )
            ours.setblocking(False)
            self._socket = ours
            asyncio.get_running_loop().add_reader(ours.fileno(), self._receive_exit)

    async def spawn(self) -> WorkerHandle:
        """Request a worker. Whether it starts shows on its channel: WorkerReady, or the end of the stream."""
        await self.start()
        self._spawned += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        handle = WorkerHandle(self._spawned, ours, asyncio.get_running_loop().create_future())
        self._handles[handle.number] = handle
        with theirs:
            self._send(SpawnWorker(handle.number), theirs.fileno())
        return handle

    def kill(self, handle: WorkerHandle) -> None:
        """Kill the worker and everything that it started; `handle.exited` is set when that is done."""
        if not handle.exited.done():
            self._send(KillWorker(handle.number))

    async def aclose(self) -> None:
        """End the supervisor, and with it all workers."""
        self._closed = True
        process = self._process
        self._lose_supervisor()
        if process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _send(self, command: SpawnWorker | KillWorker, *descriptors: int) -> None:
        """Send a command. Its socket holds hundreds of them, so a supervisor that cannot take one counts as lost."""
        if self._socket is None:
            return
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(command)], descriptors)
        except OSError:
            self._lose_supervisor()

    def _receive_exit(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_supervisor()
            return
        exited = msgspec.msgpack.decode(data, type=WorkerExited)
        _set_exited(self._handles.pop(exited.worker, None), exited)

    def _lose_supervisor(self) -> None:
        """Forget the supervisor. It kills its workers as it exits."""
        channel, self._socket, self._process = self._socket, None, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            _set_exited(handle, WorkerExited(handle.number, code=-1, cause="lost"))


def _set_exited(handle: WorkerHandle | None, exited: WorkerExited) -> None:
    if handle is not None and not handle.exited.done():
        handle.exited.set_result(exited)

"""The pool's client of the worker supervisor: starts it, sends commands, and records which workers have exited.

    SupervisorClient --SpawnWorker, KillWorker--> supervisor (one process)
    SupervisorClient <-------WorkerExited-------- supervisor

Commands are sent immediately, without a reply. The event loop calls `_receive_exit` when a message arrives. Only
`aclose` waits: at most CLOSE_TIMEOUT_S for the supervisor to exit; after that it kills the supervisor.

`worker_environment` selects the variables of verifiers: those that a Python program needs, and no secret unless
`rewards.environment` names it.
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
from pathlib import Path

import msgspec
import structlog

from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.rewards.workers.messages import MAX_MESSAGE_BYTES, KillWorker, SpawnWorker, WorkerExited
from async_grpo.utils.child_process import MARK_VARIABLE, child_argv
from async_grpo.utils.landlock import can_hide_folders

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
"""1 unless set: parallelism comes from `rewards.workers`, so a verifier must not start a thread per core."""
SECRETS = Path("/run/secrets")
"""Folder with the secrets of a container. Verifiers must not read it."""
CLOSE_TIMEOUT_S = 10.0

log = structlog.get_logger()


def hides_secrets() -> bool:
    """Return True if this machine has SECRETS and verifiers can be kept from reading them."""
    if not SECRETS.is_dir():
        return False
    if can_hide_folders():
        return True
    log.warning("verifiers can read the secrets of this server: the kernel has no Landlock", folder=str(SECRETS))
    return False


def worker_environment(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Return PASSED_VARIABLES, LC_*, THREAD_VARIABLES and the `named` variables.

    Raises ConfigError if a named variable is not set.
    """
    missing = [name for name in named if name not in environment]
    if missing:
        raise ConfigError(
            f"rewards.environment names {', '.join(missing)}, which is not set. "
            "Set it in the environment of the rollout server, or remove it from rewards.environment"
        )

    selected = {}
    for name, value in environment.items():
        if name in PASSED_VARIABLES or name.startswith("LC_"):
            selected[name] = value
    for name in THREAD_VARIABLES:
        selected[name] = environment.get(name, "1")
    for name in named:
        selected[name] = environment[name]
    return selected


@dataclass(frozen=True, eq=False)
class WorkerHandle:
    """A requested worker. `exited` is set when the worker and all its descendants are gone."""

    number: int
    channel: socket.socket
    exited: asyncio.Future[WorkerExited]


class SupervisorClient:
    """Client of at most one supervisor process at a time.

    If the supervisor dies, all its workers count as exited with the cause "lost". The next `spawn` starts a new
    supervisor.
    """

    def __init__(self, names: Sequence[str], memory_bytes: int, environment: Mapping[str, str]) -> None:
        options = [str(memory_bytes), str(SECRETS) if hides_secrets() else ""]
        self._argv = [sys.executable, "-P", "-m", "async_grpo.rewards.workers.supervisor", *options, *names]
        self._environment = environment
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._handles: dict[int, WorkerHandle] = {}
        self._spawned = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor; None while none is running."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the supervisor if none is running. Raises AsyncGrpoError if this client is closed."""
        # The lock keeps two slots that start workers at the same time from starting two supervisors.
        async with self._starting:
            if self._closed:
                raise AsyncGrpoError("the reward pool is closed and cannot judge any more completions")
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
        """Request a worker. Its channel then delivers WorkerReady, or ends if the worker could not start."""
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
        """Kill the worker and all its descendants. `handle.exited` is set when they are gone."""
        if not handle.exited.done():
            self._send(KillWorker(handle.number))

    async def aclose(self) -> None:
        """Stop the supervisor, which kills all workers."""
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
        """Send a command. The socket buffers hundreds of them, so a supervisor whose buffer is full counts as lost."""
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
        """Disconnect from the supervisor. It kills its workers when its socket closes, or has died."""
        channel = self._socket
        self._socket = None
        self._process = None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()

        handles = self._handles
        self._handles = {}
        for handle in handles.values():
            _set_exited(handle, WorkerExited(handle.number, code=-1, cause="lost"))


def _set_exited(handle: WorkerHandle | None, exited: WorkerExited) -> None:
    if handle is not None and not handle.exited.done():
        handle.exited.set_result(exited)

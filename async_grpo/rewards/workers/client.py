"""The pool's side of the warden: start it, tell it what to start and what to end, hear what has ended.

It waits for nothing but the warden's own end: notes go out at once, and the event loop calls when one comes in.

The environment of verifiers: what a Python program needs, and nothing that is secret unless it is named.
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
from async_grpo.rewards.workers.messages import MAX_NOTE_BYTES, KillWorker, SpawnWorker, WorkerExited
from async_grpo.utils.child_process import MARK_VARIABLE, child_argv

PASSED = (
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


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""1 unless they are set: `rewards.workers` says how much runs at the same time."""


def worker_environment(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """PASSED, LC_*, THREADS, and the `named` ones. Raises ConfigError if one of those is not set."""
    if missing := [name for name in named if name not in environment]:
        raise ConfigError(
            f"rewards.environment names {', '.join(missing)}, which is not set here. "
            "Set it where the rollout server starts, or take it off the list"
        )
    kept = {name: value for name, value in environment.items() if name in PASSED or name.startswith("LC_")}
    threads = {name: environment.get(name, "1") for name in THREADS}
    return {**kept, **threads, **{name: environment[name] for name in named}}


CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, eq=False)
class WorkerHandle:
    """A worker that was asked for. `ended` comes when nothing of it is left."""

    number: int
    channel: socket.socket
    ended: asyncio.Future[WorkerExited]


class SupervisorClient:
    """One warden at a time; one that dies (cause "lost" for all its workers) is replaced when the next is needed."""

    def __init__(self, names: Sequence[str], memory_bytes: int, environment: Mapping[str, str]) -> None:
        self._argv = [sys.executable, "-P", "-m", "async_grpo.rewards.workers.supervisor", str(memory_bytes), *names]
        self._environment = environment
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._notes: socket.socket | None = None
        self._wards: dict[int, WorkerHandle] = {}
        self._spawned = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the warden, if there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Have a warden. Raises AsyncGrpoError once this is closed."""
        async with self._starting:
            if self._closed:
                raise AsyncGrpoError("the reward pool is closed: nothing can be judged any more")
            if self._notes is not None:
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
            self._notes = ours
            asyncio.get_running_loop().add_reader(ours.fileno(), self._take_note)

    async def spawn(self) -> WorkerHandle:
        """Ask for a worker. Whether it comes up shows on its channel."""
        await self.start()
        self._spawned += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ward = WorkerHandle(self._spawned, ours, asyncio.get_running_loop().create_future())
        self._wards[ward.number] = ward
        with theirs:
            self._send(SpawnWorker(ward.number), theirs.fileno())
        return ward

    def kill(self, ward: WorkerHandle) -> None:
        """End it and everything that it started; `ward.ended` says when that is so."""
        if not ward.ended.done():
            self._send(KillWorker(ward.number))

    async def aclose(self) -> None:
        """End the warden and with it all workers."""
        self._closed = True
        process = self._process
        self._lose()
        if process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _send(self, note: SpawnWorker | KillWorker, *descriptors: int) -> None:
        """A warden that cannot take so small a note is lost: its socket holds hundreds of them."""
        if self._notes is None:
            return
        try:
            socket.send_fds(self._notes, [msgspec.msgpack.encode(note)], descriptors)
        except OSError:
            self._lose()

    def _take_note(self) -> None:
        assert self._notes is not None
        try:
            data = self._notes.recv(MAX_NOTE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        ended = msgspec.msgpack.decode(data, type=WorkerExited)
        _tell(self._wards.pop(ended.worker, None), ended)

    def _lose(self) -> None:
        """No warden any more: it kills its workers as it ends."""
        notes, self._notes, self._process = self._notes, None, None
        if notes is not None:
            asyncio.get_running_loop().remove_reader(notes.fileno())
            notes.close()
        wards, self._wards = self._wards, {}
        for ward in wards.values():
            _tell(ward, WorkerExited(ward.number, code=-1, cause="lost"))


def _tell(ward: WorkerHandle | None, ended: WorkerExited) -> None:
    if ward is not None and not ward.ended.done():
        ward.ended.set_result(ended)

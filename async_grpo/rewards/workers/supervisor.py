"""The worker supervisor: a small process between the rollout server and its verifiers.

    pool --SpawnWorker, KillWorker--> supervisor --fork--> worker 1 .. N --> what verifiers start
                                          |                   |
                                          +<----- output -----+      the last 4 KiB are kept, the rest is dropped

It waits for a command of the pool, for output of a worker, or for a child to exit. While workers run, it also checks
their memory every 50 ms. The pool starts it as `python -m async_grpo.rewards.workers.supervisor`.

Why a separate process: forking the rollout server would copy the page tables of a process that maps whole models, on
its event loop. Forking this process takes milliseconds, and the built-in verifiers are already loaded. The supervisor
adopts orphans of verifiers (it is a subreaper), so even a daemon that a verifier starts cannot outlive it. And it
checks memory on time while the server's event loop is busy.

It kills everything below it and exits when the pool closes its end of the socket or the server dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from async_grpo.errors import ConfigError
from async_grpo.rewards.registry import BUILTIN, load_verifier
from async_grpo.rewards.workers.messages import MAX_MESSAGE_BYTES, KillWorker, SpawnWorker, WorkerExited
from async_grpo.rewards.workers.worker import serve
from async_grpo.utils import process_tree
from async_grpo.utils.child_process import adopt_orphans, die_with_parent
from async_grpo.utils.landlock import hide_folder

CHECK_EVERY_S = 0.05
TREE_CHECK_EVERY_S = 0.5
"""Minimum time between two reads of the whole process table. They are slow, and limited to a fiftieth of the time."""
KEPT_OUTPUT_BYTES = 4096
_ORPHANS_TIMEOUT_S = 2.0
_READ_BYTES = 1 << 16


@dataclass(eq=False)
class SupervisedWorker:
    """A worker process. It leads its own session and process group."""

    number: int
    pid: int
    output: int
    """Descriptor of the reading end of its standard output and error."""
    descendants: list[int] = field(default_factory=list)
    """Its descendants at the last read of the process table."""
    recent_output: bytes = b""
    cause: str = ""
    """Cause of its death, as in WorkerExited; empty until it is killed."""


class WorkerSupervisor:
    """Serves one pool: forks its workers, limits their memory, and reaps them and their orphans."""

    def __init__(self, pool: socket.socket, memory_bytes: int, names: Sequence[str]) -> None:
        self._pool = pool
        self._memory_bytes = memory_bytes
        self._names = names
        self._workers: dict[int, SupervisedWorker] = {}
        self._selector = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        self._stopped = False
        self._next_check_s = 0.0
        self._next_tree_check_s = 0.0

    def run(self) -> None:
        """Serve until the pool closes its end or the server dies."""
        self._listen()
        try:
            while not self._stopped:
                for key, _ in self._selector.select(CHECK_EVERY_S if self._workers else None):
                    key.data()
                self._check()
        finally:
            for worker in self._workers.values():
                self._kill(worker, "killed")
            self._kill_orphans(keep=set())

    def _listen(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            # Python writes a signal to the wakeup socket only if it has a handler.
            signal.signal(number, lambda *_: None)
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ, self._handle_signals)
        self._selector.register(self._pool, selectors.EVENT_READ, self._handle_command)

    def _handle_signals(self) -> None:
        if signal.SIGTERM in self._signals.recv(_READ_BYTES):
            self._stopped = True
        exited = [worker for worker in self._workers.values() if _has_exited(worker)]
        for worker in exited:
            self._reap(worker)
        self._kill_orphans(keep={worker.pid for worker in self._workers.values()})

    def _handle_command(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._pool, MAX_MESSAGE_BYTES, 1)
        if not data:
            self._stopped = True
            return
        command = msgspec.msgpack.decode(data, type=SpawnWorker | KillWorker)
        if isinstance(command, SpawnWorker):
            self._spawn(command.worker, descriptors[0])
        elif worker := self._workers.get(command.worker):
            self._kill(worker, "killed")

    def _spawn(self, number: int, channel: int) -> None:
        output_reader, output_writer = os.pipe()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(supervisor, channel, output_writer, self._names)
        os.close(channel)
        os.close(output_writer)
        os.set_blocking(output_reader, False)
        worker = SupervisedWorker(number, pid, output_reader)
        self._workers[number] = worker
        self._selector.register(output_reader, selectors.EVENT_READ, lambda: self._read_output(worker))

    def _read_output(self, worker: SupervisedWorker) -> bool:
        """Read output once. Returns True if there may be more."""
        if worker.number not in self._workers:
            return False  # it was reaped after this event was selected
        try:
            data = os.read(worker.output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.output)
        worker.recent_output = (worker.recent_output + data)[-KEPT_OUTPUT_BYTES:]
        return bool(data)

    def _check(self) -> None:
        """Check the memory of all workers and their known descendants, if the check is due."""
        now_s = time.monotonic()
        if now_s < self._next_check_s or not self._workers:
            return
        self._next_check_s = now_s + CHECK_EVERY_S
        if now_s >= self._next_tree_check_s:
            self._next_tree_check_s = now_s + max(TREE_CHECK_EVERY_S, 50 * self._check_process_trees())
        for worker in self._workers.values():
            self._check_memory(worker, [worker.pid, *worker.descendants])

    def _check_process_trees(self) -> float:
        """Update the descendants of every worker and kill escaped processes. Returns the CPU seconds that it took."""
        before_s = time.process_time()
        parents = process_tree.parents()
        for worker in self._workers.values():
            worker.descendants = process_tree.descendants(worker.pid, parents)
        self._kill_orphans(keep={worker.pid for worker in self._workers.values()})
        return time.process_time() - before_s

    def _check_memory(self, worker: SupervisedWorker, pids: Sequence[int]) -> None:
        """Kill the worker if it is above the memory limit."""
        # RSS is cheap, but counts shared pages more than once. PSS is exact and slow, so it only confirms.
        if sum(map(process_tree.rss_bytes, pids)) <= self._memory_bytes:
            return
        if sum(map(process_tree.pss_bytes, pids)) > self._memory_bytes:
            self._kill(worker, "memory")

    def _kill(self, worker: SupervisedWorker, cause: str) -> None:
        """Kill the worker's process group. After its exit (SIGCHLD), `_reap` kills processes that left the group."""
        if not _has_exited(worker):
            worker.cause = worker.cause or cause
        # Signal the process as well: a child that was forked just now may not lead its group yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(worker.pid, signal.SIGKILL)

    def _reap(self, worker: SupervisedWorker) -> None:
        """Reap an exited worker, kill its descendants, and report the exit to the pool."""
        # Kill the group before waitpid: only while the worker is a zombie is the number of its group reserved. After
        # that, another process may have it.
        self._kill(worker, "")
        _, status = os.waitpid(worker.pid, 0)
        self._kill_orphans(keep={other.pid for other in self._workers.values() if other is not worker})

        # Bounded: a process that escaped may still hold the pipe and write to it.
        for _ in range(KEPT_OUTPUT_BYTES):
            if not self._read_output(worker):
                break
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.output)
        os.close(worker.output)
        del self._workers[worker.number]

        # Report last: the pool starts the next worker as soon as it has the report.
        output = worker.recent_output.decode(errors="replace")
        exited = WorkerExited(worker.number, os.waitstatus_to_exitcode(status), worker.cause, output)
        with contextlib.suppress(ConnectionError):  # `_handle_command` detects a pool that is gone
            self._pool.sendall(msgspec.msgpack.encode(exited))

    def _kill_orphans(self, keep: set[int]) -> None:
        """Kill and reap every child except `keep`. Their children become ours, so repeat until none is left."""
        until_s = time.monotonic() + _ORPHANS_TIMEOUT_S
        while orphans := set(process_tree.own_children()) - keep:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > until_s:
                return  # the kernel has not ended it yet; the next check retries
            time.sleep(0.001)


def _has_exited(worker: SupervisedWorker) -> bool:
    return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _become_worker(supervisor: int, channel: int, output: int, names: Sequence[str]) -> NoReturn:
    """Run the worker in the forked child. Never returns to the supervisor's code."""
    code = 1
    try:
        die_with_parent(supervisor)
        os.setsid()
        _reset_process_state(channel, output)
        serve(socket.socket(fileno=channel), names)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _reset_process_state(channel: int, output: int) -> None:
    """Reset signals, and close the supervisor's descriptors: verifiers must not reach the pool or other workers."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != channel:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If the machine runs out of memory, the kernel should kill a worker and not the rollout server.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _preload_builtins(names: Sequence[str]) -> None:
    """Import the built-in verifiers, so that forks do not have to. Workers report those that cannot be loaded."""
    for name in names:
        if name in BUILTIN:
            with contextlib.suppress(ConfigError):
                load_verifier(name)


def main(arguments: Sequence[str]) -> int:
    """Run the supervisor. Arguments: MEMORY_BYTES HIDDEN_FOLDER NAME ...; standard input is the socket to the pool.

    HIDDEN_FOLDER is empty if there is nothing to hide.
    """
    memory_bytes, hidden, *names = arguments
    if hidden:
        hide_folder(Path(hidden))  # first of all, because it holds only for processes that this thread starts later
    adopt_orphans()
    pool = socket.socket(fileno=os.dup(0))
    _preload_builtins(names)
    WorkerSupervisor(pool, int(memory_bytes), names).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

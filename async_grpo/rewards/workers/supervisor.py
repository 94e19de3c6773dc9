"""The warden: one small process between the rollout server and its verifiers. `python -m
async_grpo.rewards.workers.supervisor`

    pool --Spawn, Kill--> warden --fork--> worker 1 .. N --> whatever verifiers start
                             |                |
                             +<---- output ---+      the last 4 KiB are kept, the rest is thrown away

It waits for a note of the pool, for output of a worker, for the end of a child, and otherwise looks every 50 ms
at the memory of its workers.

Why a process of its own: to fork from the rollout server would copy the page tables of a process that maps whole
models, on its event loop; from here it takes milliseconds, with the built-in verifiers loaded already. The
warden adopts what verifiers leave behind (it is a subreaper), so that even a daemon of a verifier cannot outlive
it. And it sees memory in time while the server's event loop is busy.

It ends, after everything below it, when the pool's end of the notes closes or the server dies.
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
from async_grpo.rewards.workers import worker
from async_grpo.rewards.workers.messages import MAX_NOTE_BYTES, KillWorker, SpawnWorker, WorkerExited
from async_grpo.utils import process_tree
from async_grpo.utils.child_process import adopt_orphans, die_with_parent

LOOK_EVERY_S = 0.05
FAMILY_EVERY_S = 0.5
"""Between two looks at the whole process table, which is dearer; at most a fiftieth of the time is spent on it."""
KEPT_OUTPUT_BYTES = 4096
_ORPHANS_TIMEOUT_S = 2.0
_READ_BYTES = 1 << 16


@dataclass(eq=False)
class SupervisedWorker:
    """A worker: the leader of a session, and so of a process group, of its own."""

    number: int
    pid: int
    output: int
    """The reading end of its standard output and error."""
    family: list[int] = field(default_factory=list)
    """Its descendants when the process table was last looked at."""
    kept: bytes = b""
    cause: str = ""


class WorkerSupervisor:
    """Serves one pool."""

    def __init__(self, notes: socket.socket, memory_bytes: int, names: Sequence[str]) -> None:
        self._notes = notes
        self._memory_bytes = memory_bytes
        self._names = names
        self._wards: dict[int, SupervisedWorker] = {}
        self._selector = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        self._stopped = False
        self._next_look_s = self._next_family_s = 0.0

    def run(self) -> None:
        """Until the pool closes its end, or the server dies."""
        self._listen()
        try:
            while not self._stopped:
                for key, _ in self._selector.select(LOOK_EVERY_S if self._wards else None):
                    key.data()
                self._look()
        finally:
            for ward in self._wards.values():
                self._kill(ward, "killed")
            self._end_orphans(spared=set())

    def _listen(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # only so that its number is written to the wakeup socket
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
        self._selector.register(self._notes, selectors.EVENT_READ, self._take_note)

    def _take_signals(self) -> None:
        if signal.SIGTERM in self._signals.recv(_READ_BYTES):
            self._stopped = True
        for ward in [ward for ward in self._wards.values() if _has_ended(ward)]:
            self._bury(ward)
        self._end_orphans(spared={ward.pid for ward in self._wards.values()})

    def _take_note(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._notes, MAX_NOTE_BYTES, 1)
        if not data:
            self._stopped = True
            return
        note = msgspec.msgpack.decode(data, type=SpawnWorker | KillWorker)
        if isinstance(note, SpawnWorker):
            self._spawn(note.worker, descriptors[0])
        elif ward := self._wards.get(note.worker):
            self._kill(ward, "killed")

    def _spawn(self, number: int, channel: int) -> None:
        reading, writing = os.pipe()
        warden = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(warden, channel, writing, self._names)
        os.close(channel)
        os.close(writing)
        os.set_blocking(reading, False)
        ward = SupervisedWorker(number, pid, reading)
        self._wards[number] = ward
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._take_output(ward))

    def _take_output(self, ward: SupervisedWorker) -> bool:
        """Read once; whether there may be more."""
        if ward.number not in self._wards:
            return False  # buried since the selector saw it
        try:
            data = os.read(ward.output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(ward.output)
        ward.kept = (ward.kept + data)[-KEPT_OUTPUT_BYTES:]
        return bool(data)

    def _look(self) -> None:
        """At the memory of every worker and what is known to live below it."""
        now_s = time.monotonic()
        if now_s < self._next_look_s or not self._wards:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        if now_s >= self._next_family_s:
            self._next_family_s = now_s + max(FAMILY_EVERY_S, 50 * self._look_at_families())
        for ward in self._wards.values():
            self._judge_memory(ward, [ward.pid, *ward.family])

    def _look_at_families(self) -> float:
        """Who lives below whom; what has escaped is ended. Returns the CPU seconds that it took."""
        before_s = time.process_time()
        parents = process_tree.parents()
        for ward in self._wards.values():
            ward.family = process_tree.descendants(ward.pid, parents)
        self._end_orphans(spared={ward.pid for ward in self._wards.values()})
        return time.process_time() - before_s

    def _judge_memory(self, ward: SupervisedWorker, pids: Sequence[int]) -> None:
        """The cheap figure counts shared pages more than once, so it only raises suspicion."""
        if sum(map(process_tree.rss_bytes, pids)) <= self._memory_bytes:
            return
        if sum(map(process_tree.pss_bytes, pids)) > self._memory_bytes:
            self._kill(ward, "memory")

    def _kill(self, ward: SupervisedWorker, cause: str) -> None:
        """The group; its end is noticed by its signal. Whoever left the group is adopted and ended then."""
        if not _has_ended(ward):
            ward.cause = ward.cause or cause
        for kill in (os.killpg, os.kill):  # a child that was forked just now leads no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(ward.pid, signal.SIGKILL)

    def _bury(self, ward: SupervisedWorker) -> None:
        """Its group and all it left go first, so that when the pool hears of the end, nothing is left."""
        self._kill(ward, "")  # a zombie still holds the number of its group
        _, status = os.waitpid(ward.pid, 0)
        self._end_orphans(spared={other.pid for other in self._wards.values() if other is not ward})
        for _ in range(KEPT_OUTPUT_BYTES):
            if not self._take_output(ward):
                break
        with contextlib.suppress(KeyError):
            self._selector.unregister(ward.output)
        os.close(ward.output)
        del self._wards[ward.number]
        output = ward.kept.decode(errors="replace")
        ended = WorkerExited(ward.number, os.waitstatus_to_exitcode(status), ward.cause, output)
        with contextlib.suppress(ConnectionError):  # a pool that is gone shows as the end of its notes
            self._notes.sendall(msgspec.msgpack.encode(ended))

    def _end_orphans(self, spared: set[int]) -> None:
        """Kill and reap every child but `spared`; their children become ours in turn, so until there is none."""
        until_s = time.monotonic() + _ORPHANS_TIMEOUT_S
        while orphans := set(process_tree.own_children()) - spared:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > until_s:
                return  # in the kernel's hands; the next look finds it again
            time.sleep(0.001)


def _has_ended(ward: SupervisedWorker) -> bool:
    return os.waitid(os.P_PID, ward.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _become_worker(warden: int, channel: int, output: int, names: Sequence[str]) -> NoReturn:
    """In the child of the fork: leave the warden behind, serve, and never return to its code."""
    code = 1
    try:
        die_with_parent(warden)
        os.setsid()
        _leave_behind(channel, output)
        worker.serve(socket.socket(fileno=channel), names)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _leave_behind(channel: int, output: int) -> None:
    """The warden's signals and descriptors. A worker may be the kernel's first victim, and writes no core."""
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
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _load_built_ins(names: Sequence[str]) -> None:
    """So that every fork has them. One that cannot be loaded is the worker's to report."""
    for name in names:
        if name in BUILTIN:
            with contextlib.suppress(ConfigError):
                load_verifier(name)


def main(arguments: Sequence[str]) -> int:
    """MEMORY_BYTES NAME ...; the notes are standard input."""
    adopt_orphans()
    notes = socket.socket(fileno=os.dup(0))
    _load_built_ins(arguments[1:])
    WorkerSupervisor(notes, int(arguments[0]), arguments[1:]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The worker processes, forked from this one, so that a new one starts within milliseconds."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import uvloop

from async_grpo.errors import RoleFailed, WaitTimeout
from async_grpo.utils.child_process import die_with_parent
from tests.support.buffer_crashes.books import connect_reader
from tests.support.buffer_crashes.journal import Journal, is_waiting_for_reply
from tests.support.buffer_crashes.plan import PRODUCERS, TRAINERS, WATCHER, Plan, join_run
from tests.support.buffer_crashes.producer import Producer
from tests.support.buffer_crashes.trainer import Trainer
from tests.support.buffer_crashes.watcher import watch_run

FINISHED = 0
FENCED = 3
FAILED = 1
LOOK_EVERY_S = 0.002


class Crew:
    """Workers by name. Call it in the main thread, with no event loop running."""

    def __init__(self, plan: Plan, url: str) -> None:
        self._plan = plan
        self._url = url
        self._births = itertools.count()
        self._pids: dict[str, int] = {}
        self._journals: dict[str, Path] = {}
        self.finished: set[str] = set()
        """Workers that ended because the run has ended."""

    def start(self, name: str) -> None:
        """Start a new process of that name, with its own journal."""
        birth = next(self._births)
        self._journals[name] = self._plan.journals / f"{birth:05}-{name}.jsonl"
        self._journals[name].touch()
        self._pids[name] = self._fork(name, birth)

    def start_all(self) -> None:
        """Start all workers."""
        self.finished.clear()
        for name in (*PRODUCERS, *TRAINERS, WATCHER):
            self.start(name)

    def kill(self, name: str) -> None:
        """Kill with SIGKILL and wait for the end. A worker that has already ended is no error."""
        os.kill(self._pids[name], signal.SIGKILL)  # not reaped yet, so no other process can have this id
        os.waitpid(self._pids.pop(name), 0)

    def kill_all(self) -> None:
        """Kill all running workers together."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for name in list(self._pids):
            os.waitpid(self._pids.pop(name), 0)

    def wait_for_request(self, name: str, within_s: float) -> bool:
        """Wait until the worker waits for a reply, at most `within_s`. Return True if it does."""
        deadline_s = time.monotonic() + within_s
        while not is_waiting_for_reply(self._journals[name]):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def look_after(self) -> None:
        """Restart fenced workers. Raises RoleFailed if a worker has failed."""
        for name, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self._pids[name]
            code = os.waitstatus_to_exitcode(status)
            if code == FENCED:
                self.start(name)
            elif code == FINISHED:
                self.finished.add(name)
            else:
                raise RoleFailed(f"{name} ended with exit code {code}: {self._error_file(name).read_text()[-3000:]}")

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until all workers except the watcher have finished. Raises WaitTimeout, RoleFailed."""
        deadline_s = time.monotonic() + timeout_s
        while left := {*PRODUCERS, *TRAINERS} - self.finished:
            if time.monotonic() > deadline_s:
                raise WaitTimeout(f"{', '.join(sorted(left))} to reach the horizon", timeout_s)
            self.look_after()
            time.sleep(LOOK_EVERY_S)

    def _error_file(self, name: str) -> Path:
        return self._plan.folder / f"{name}.err"

    def _fork(self, name: str, birth: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = FAILED
        try:
            die_with_parent(parent)
            errors = os.open(self._error_file(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(errors, sys.stderr.fileno())
            code = uvloop.run(self._work(name, birth))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    async def _work(self, name: str, birth: int) -> int:
        buffer = await join_run(self._plan, self._url)
        journal = Journal(self._journals[name])
        rng = random.Random(f"{self._plan.seed} {name} {birth}")
        if name == WATCHER:
            await watch_run(buffer, connect_reader(self._url), journal)
        elif name in TRAINERS:
            trained = await Trainer(buffer, journal, self._plan.checkpoints, rng).run()
            return FINISHED if trained else FENCED
        else:
            await Producer(buffer, journal, name, rng).run()
        return FINISHED

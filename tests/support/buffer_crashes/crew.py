"""The worker processes: forked from this one, so that a new one is at work within milliseconds."""

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
from tests.support.buffer_crashes.books import reader
from tests.support.buffer_crashes.journal import Journal, in_a_call
from tests.support.buffer_crashes.plan import PRODUCERS, TRAINERS, WATCHER, Plan, join
from tests.support.buffer_crashes.producer import Producer
from tests.support.buffer_crashes.trainer import Trainer
from tests.support.buffer_crashes.watcher import watch

FINISHED = 0
FENCED = 3
FAILED = 1
LOOK_EVERY_S = 0.002


class Crew:
    """Who works, by name. Call it in the main thread, with no event loop running."""

    def __init__(self, plan: Plan, url: str) -> None:
        self._plan = plan
        self._url = url
        self._births = itertools.count()
        self._pids: dict[str, int] = {}
        self._journals: dict[str, Path] = {}
        self.finished: set[str] = set()
        """Those who found that the run has ended."""

    def start(self, name: str) -> None:
        """A new process of that name, with a journal of its own."""
        birth = next(self._births)
        self._journals[name] = self._plan.journals / f"{birth:05}-{name}.jsonl"
        self._journals[name].touch()
        self._pids[name] = self._fork(name, birth)

    def start_all(self) -> None:
        """Everybody."""
        self.finished.clear()
        for name in (*PRODUCERS, *TRAINERS, WATCHER):
            self.start(name)

    def kill(self, name: str) -> None:
        """SIGKILL; on return it is gone. One that has ended by itself is no error."""
        os.kill(self._pids[name], signal.SIGKILL)  # not reaped before, so the id is nobody else's
        os.waitpid(self._pids.pop(name), 0)

    def kill_all(self) -> None:
        """Everybody who is left, all at once."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for name in list(self._pids):
            os.waitpid(self._pids.pop(name), 0)

    def is_in_a_call(self, name: str, within_s: float) -> bool:
        """Whether it awaits an answer now; waits for such a moment."""
        until_s = time.monotonic() + within_s
        while not (found := in_a_call(self._journals[name])) and time.monotonic() < until_s:
            time.sleep(LOOK_EVERY_S)
        return found

    def look_after(self) -> None:
        """Start those again that were fenced. Raises RoleFailed for one that has failed."""
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
        """Until everybody but the watcher has finished. Raises WaitTimeout, RoleFailed."""
        until_s = time.monotonic() + timeout_s
        while left := {*PRODUCERS, *TRAINERS} - self.finished:
            if time.monotonic() > until_s:
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
        buffer = await join(self._plan, self._url)
        journal = Journal(self._journals[name])
        rng = random.Random(f"{self._plan.seed} {name} {birth}")
        if name == WATCHER:
            await watch(buffer, reader(self._url), journal)
        elif name in TRAINERS:
            trained = await Trainer(buffer, journal, self._plan.checkpoints, rng).run()
            return FINISHED if trained else FENCED
        else:
            await Producer(buffer, journal, name, rng).run()
        return FINISHED

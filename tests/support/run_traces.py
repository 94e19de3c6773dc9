"""What one `async-grpo run` does to its surroundings and writes into its books.

- `RunFamily`  its processes by kind, where they listen, what they map in shared memory, what is left of them
- `RunBooks`   which groups each step was trained on, and whether everything adds up in the end

This process adopts the orphans of the run, so that every process of it stays below this one, whatever dies in
between; processes of others are never looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.utils.child_process import adopt_orphans
from buffer import EmbeddedServer
from buffer.inspector import Inspector
from tests.support.whole_run import check_books

SHARED_MEMORY = Path("/dev/shm")
_ROLES = {
    "command": r"-m async_grpo\.app\.cli\.main run",
    "server": r"-m rollout_server\.main",
    "engine": r"VLLM::EngineCore",
    "receiver": r"-m async_grpo\.weights\.zmq\.receiver",
    "publisher": r"-m async_grpo\.weights\.zmq\.publisher",
    "launcher": r"-m trainer\.node_main",
    "rank": r"-m trainer\.main",
    "redis": r"(valkey|redis)-server",
    "reward": r"-m async_grpo\.rewards\.workers\.supervisor",
}
"""Pattern of the command line; the first that fits. Reward supervisors are told from their workers by who started
them: a worker's parent is one of them."""
KINDS = (*(role for role in _ROLES if role != "reward"), "reward supervisor", "reward worker")


class RunFamily:
    """Everything that this process started, and whatever those started, except the processes `not_of_the_run`."""

    def __init__(self, not_of_the_run: Iterable[int] = ()) -> None:
        adopt_orphans()
        self._not_of_the_run = set(not_of_the_run)
        self._shared_before = _shared_memory()
        self.shared: set[int] = set()
        """Inodes of the files in shared memory that a process of the run has mapped."""
        self.listened: set[tuple[str, int]] = set()
        """Addresses on which a process of the run has listened."""

    def alive(self) -> list[psutil.Process]:
        """Return the processes of the run that have not ended."""
        processes = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and process.pid not in self._not_of_the_run:
                    processes.append(process)
        return processes

    def reap(self, spare: int) -> None:
        """Reap adopted children that have ended, except `spare`, for which the caller waits."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.pid != spare and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)

    def processes_of_kind(self, kind: str) -> list[psutil.Process]:
        """Return the running processes of that kind in the order of their start."""
        return [process for process in self.alive() if role_of(process) == kind]

    def look(self) -> None:
        """Record the shared memory that the processes have mapped, and the addresses on which they listen."""
        for process in self.alive():
            with contextlib.suppress(psutil.Error, OSError):
                self.shared |= _mapped(process.pid)
                self.listened |= _listening(process.net_connections("tcp"))

    def wait_until_gone(self, spare: int, timeout_s: float) -> list[psutil.Process]:
        """Wait until all processes have ended. Returns those that still run after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < deadline_s:
            self.reap(spare)
            time.sleep(0.1)
        self.reap(spare)
        return left

    def end(self, processes: Iterable[psutil.Process]) -> None:
        """Kill the processes with SIGKILL."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def left_in_shared_memory(self, run: str) -> list[str]:
        """Return new files in shared memory that the run had mapped or that have its name."""
        left = []
        for path in _shared_memory() - self._shared_before:
            with contextlib.suppress(FileNotFoundError):  # a file of another program, removed meanwhile
                if path.stat().st_ino in self.shared or path.name.startswith(f"async-grpo-{run}-"):
                    left.append(path.name)
        return sorted(left)


class RunBooks:
    """Counters and records of the run in `run_dir`, with its embedded server or with the external `server`.

    `expect(condition, problem)` is called for every check.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        steps: int,
        expect: Callable[[bool, str], None],
        server: EmbeddedServer | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._expect = expect
        self._is_outside = server is not None
        self._server = server or EmbeddedServer(run_dir / "server", RedisConfig())
        self.most_connections = 0
        """Maximum number of clients of the server."""
        self.batches: dict[int, str] = {}
        """Version -> sequences of the groups of its step, for the observed steps."""

    def look(self) -> None:
        """Record the buffer's log: the steps that no checkpoint contains yet. Does nothing while the server is down."""
        with contextlib.suppress(redis.RedisError, OSError):
            with self._client() as client:
                steps = client.hgetall(f"agrpo:{{{self._run_dir.name}}}:log")
                self.most_connections = max(self.most_connections, client.info("clients")["connected_clients"])
            for version, entry in steps.items():
                seqs = entry.decode().rpartition("|")[2]
                first = self.batches.setdefault(int(version), seqs)
                self._expect(first == seqs, f"step {int(version) + 1} had groups {first}, and now {seqs}")

    def connections_of_others(self) -> list[str]:
        """Return address and name of every other client of the server."""
        with self._client() as client:
            own_id = client.client_id()
            return [f"{other['addr']} {other['name']}" for other in client.client_list() if int(other["id"]) != own_id]

    def _client(self) -> redis.Redis:
        """Return a client without retries: the attack must not wait for a server that it has stopped."""
        path = self._server.url.removeprefix("unix://")
        return redis.Redis(unix_socket_path=path, socket_timeout=0.3, retry=Retry(NoBackoff(), 0))

    async def check(self) -> None:
        """Check the finished run: no group trained or inserted twice, no token too old, all counters balanced."""
        seqs = [seq for batch in self.batches.values() for seq in batch.split(",") if seq]
        self._expect(len(set(seqs)) == len(seqs), f"in two steps: {sorted({s for s in seqs if seqs.count(s) > 1})}")
        self._check_rows()
        summary = json.loads((self._run_dir / "summary.json").read_text())
        try:
            check_books(summary, steps=self._steps)
        except AssertionError:
            counters = {name: summary[name] for name in ("steps", "groups", "balanced", "max_age")}
            self._expect(False, f"the summary does not add up: {counters}")
        await self._check_stored()

    def _check_rows(self) -> None:
        contents: dict[int, tuple[Any, ...]] = {}
        for row in [row for row in read_rows(self._run_dir / "metrics.jsonl") if row["kind"] == "step"]:
            content = tuple(row.get(key) for key in ("groups", "completion_tokens_mean", "reward_mean"))
            first = contents.setdefault(row["step"], content)
            self._expect(first == content, f"step {row['step']} had {first}, and when trained again {content}")
        missing = sorted(set(range(1, self._steps + 1)) - set(contents))
        self._expect(not missing, f"{len(missing)} steps have no row, the first of them {missing[:1]}")
        inserted = [row["seq"] for path in (self._run_dir / "samples").glob("*.jsonl") for row in read_rows(path)]
        self._expect(len(set(inserted)) == len(inserted), "a group was inserted twice")

    async def _check_stored(self) -> None:
        """Check the counters in the server's file."""
        self._server.start()
        try:
            inspector = await Inspector.attach(RedisConfig(url=self._server.url), self._run_dir.name)
            stats = (await inspector.overview()).stats
            await inspector.aclose()
        finally:
            if not self._is_outside:
                self._server.stop()
        self._expect(stats.balanced and stats.active == 0, f"the stored books do not balance: {stats}")


def role_of(process: psutil.Process) -> str:
    """Return the kind of a process, one of KINDS; "" for other processes and for one that has ended."""
    try:
        line = f"{process.name()} {' '.join(process.cmdline())}"
        role = next((role for role, pattern in _ROLES.items() if re.search(pattern, line)), "")
        if role != "reward":
            return role
        parent = process.parent()
        below = parent is not None and re.search(_ROLES["reward"], " ".join(parent.cmdline()))
        return "reward worker" if below else "reward supervisor"
    except psutil.Error:
        return ""


def describe(process: psutil.Process) -> str:
    """Describe a process: number, state and command."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return f"{process.pid} has gone"


def _listening(connections: Iterable[Any]) -> set[tuple[str, int]]:
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    }


def _mapped(pid: int) -> set[int]:
    """Return the inodes of the shared-memory files that a process has mapped.

    Names are no use: a semaphore is created under another name, linked to its own, and stays mapped under the first.
    """
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {int(fields[4]) for fields in lines if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/")}


def _shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.iterdir())

"""Real servers as people run them: alone on a port, as a cluster, under Sentinel.

Everything listens on the loopback interface only and dies with the test process.
"""

from __future__ import annotations

import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from async_grpo.utils.child_process import child_argv
from buffer.server import find_server
from tests.support.ports import free_port
from tests.support.waiting import wait_until

LAST_SLOT = 16383
SERVICE = "main"


class Server:
    """One server process on a port of its own, and what can happen to it."""

    password: str | None = None

    def __init__(self, dir: Path, *options: str, binary: str | None = None) -> None:
        dir.mkdir(parents=True, exist_ok=True)
        self.dir = dir
        self.port = free_port()
        self._command = [binary or find_server(), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def admin(self) -> Any:
        """A client without the help of ours."""
        return redis.Redis(port=self.port, password=self.password, socket_timeout=5.0)

    def start(self) -> Server:
        self.launch()
        wait_until(self.admin.ping, f"port {self.port} answers")
        return self

    def launch(self) -> None:
        """Start it, and do not wait."""
        with (self.dir / "server.log").open("ab") as log:
            self._process = subprocess.Popen(child_argv(self._arguments()), stdout=log, stderr=log, cwd=self.dir)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """It lives, and does nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, paused or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _arguments(self) -> list[str]:
        bind = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.dir), "--save", ""]
        replication = ["--repl-diskless-sync-delay", "0", "--repl-diskless-load", "swapdb"]
        file = ["--appendonly", "yes", "--appendfsync", "no"]
        return [*self._command, *bind, *file, "--maxmemory-policy", "noeviction", *replication]


class SentinelServer(Server):
    """A sentinel that watches one primary, and thinks it dead after a second."""

    def __init__(self, dir: Path, primary: Server, password: str | None) -> None:
        super().__init__(dir)
        self._primary = primary
        self.password = password

    def _arguments(self) -> list[str]:
        protected = f"requirepass {self.password}\nsentinel sentinel-pass {self.password}\n" if self.password else ""
        (self.dir / "sentinel.conf").write_text(
            f"{protected}port {self.port}\nbind 127.0.0.1\ndir {self.dir}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._primary.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\nsentinel failover-timeout {SERVICE} 4000\n"
        )
        return [*self._command, str(self.dir / "sentinel.conf"), "--sentinel"]


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start them, and end them whatever happens."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.kill()


def replica_of(dir: Path, primary: Server) -> Server:
    return Server(dir, "--replicaof", f"127.0.0.1 {primary.port}")


def wait_for_replicas(primary: Server, count: int) -> None:
    def online() -> bool:
        about = primary.admin.info("replication")
        return sum(about.get(f"slave{index}", {}).get("state") == "online" for index in range(count)) == count

    wait_until(online, f"{count} replicas are online")


class Sentinels:
    """A primary, a replica and three sentinels that know them all."""

    def __init__(self, dir: Path, *, password: str | None = None) -> None:
        """`password`: of the sentinels."""
        self.primary = Server(dir / "primary")
        self.replica = replica_of(dir / "replica", self.primary)
        self.sentinels = [SentinelServer(dir / f"sentinel-{index}", self.primary, password) for index in range(3)]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @contextmanager
    def running(self) -> Iterator[Sentinels]:
        with running(self.primary, self.replica):
            wait_for_replicas(self.primary, 1)
            with running(*self.sentinels):
                for sentinel in self.sentinels:
                    wait_until(lambda each=sentinel: self._knows_all(each), "the sentinels know each other")
                yield self

    @staticmethod
    def _knows_all(sentinel: Server) -> bool:
        seen = sentinel.admin.sentinel_master(SERVICE)
        return bool(seen["num-other-sentinels"] == 2 and seen["num-slaves"] == 1)


class Cluster:
    """Three primaries with a third of the slots each, and a replica of the first where it is wanted."""

    def __init__(self, dir: Path, *, replica: bool = False) -> None:
        self.primaries = [self._node(dir / f"node-{index}") for index in range(3)]
        self.replica = self._node(dir / "replica") if replica else None
        self.all = [*self.primaries, *([self.replica] if self.replica else [])]

    @staticmethod
    def _node(dir: Path) -> Server:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500", "--cluster-port", str(free_port()))
        return Server(dir, *options, "--cluster-replica-validity-factor", "0")

    def url(self, *seeds: Server) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{seed.port}" for seed in seeds or self.primaries)

    @contextmanager
    def running(self) -> Iterator[Cluster]:
        with running(*self.all):
            first = self.primaries[0].admin
            for index, node in enumerate(self.primaries):
                start, end = _share(index)
                node.admin.execute_command("CLUSTER ADDSLOTSRANGE", start, end)
            for node in self.all[1:]:
                bus = node.admin.config_get("cluster-port")["cluster-port"]
                first.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
            self._settle()
            if self.replica:
                self.replica.admin.execute_command("CLUSTER REPLICATE", self.id_of(self.primaries[0]))
                wait_for_replicas(self.primaries[0], 1)
                self._settle()
            yield self

    def id_of(self, node: Server) -> str:
        return str(node.admin.execute_command("CLUSTER MYID").decode())

    def run_on(self, index: int) -> str:
        """The name of a new run whose keys are on this primary."""
        start, end = _share(index)
        while not start <= key_slot(f"{{{(run := uuid.uuid4().hex)}}}".encode()) <= end:
            pass
        return run

    def _settle(self) -> None:
        def agrees(node: Server) -> bool:
            about = node.admin.execute_command("CLUSTER INFO")
            return about["cluster_state"] == "ok" and int(about["cluster_known_nodes"]) == len(self.all)

        for node in self.all:
            wait_until(lambda each=node: agrees(each), "the nodes know each other")


class SlotMove:
    """The slot of a run moves from one node to another, key by key."""

    def __init__(self, cluster: Cluster, run: str, source: Server, target: Server) -> None:
        self._slot = key_slot(f"{{{run}}}".encode())
        self._cluster = cluster
        self._source = source
        self._target = target

    def begin(self) -> None:
        ids = self._cluster.id_of(self._source), self._cluster.id_of(self._target)
        self._target.admin.execute_command("CLUSTER SETSLOT", self._slot, "IMPORTING", ids[0])
        self._source.admin.execute_command("CLUSTER SETSLOT", self._slot, "MIGRATING", ids[1])

    def move(self, count: int) -> int:
        """At most `count` keys; returns how many."""
        keys = self._source.admin.execute_command("CLUSTER GETKEYSINSLOT", self._slot, count)
        if keys:
            to = ("127.0.0.1", self._target.port, "", 0, 5000)
            self._source.admin.execute_command("MIGRATE", *to, "KEYS", *keys)
        return len(keys)

    def finish(self) -> None:
        while self.move(100):
            pass
        target = self._cluster.id_of(self._target)
        for node in (self._target, self._source):
            node.admin.execute_command("CLUSTER SETSLOT", self._slot, "NODE", target)


def _share(index: int) -> tuple[int, int]:
    return (LAST_SLOT + 1) * index // 3, (LAST_SLOT + 1) * (index + 1) // 3 - 1

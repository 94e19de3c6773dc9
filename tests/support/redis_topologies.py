"""Real Redis servers: a single server, a cluster, a primary with Sentinel.

All of them listen only on the loopback interface and end with the test process.
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
    """One server process on its own port, which can be paused and killed."""

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
        """A plain redis-py client."""
        return redis.Redis(port=self.port, password=self.password, socket_timeout=5.0)

    def start(self) -> Server:
        self.launch()
        wait_until(self.admin.ping, f"port {self.port} answers")
        return self

    def launch(self) -> None:
        """Start the process without waiting until it answers."""
        with (self.dir / "server.log").open("ab") as log:
            self._process = subprocess.Popen(child_argv(self._arguments()), stdout=log, stderr=log, cwd=self.dir)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """Stop the process, so that it keeps its connections but does not answer."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL, even if it is paused."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _arguments(self) -> list[str]:
        bind = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.dir), "--save", ""]
        replication = ["--repl-diskless-sync-delay", "0", "--repl-diskless-load", "swapdb"]
        file = ["--appendonly", "yes", "--appendfsync", "no"]
        return [*self._command, *bind, *file, "--maxmemory-policy", "noeviction", *replication]


class SentinelServer(Server):
    """A sentinel for one primary, which it considers dead after a second."""

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
    """Run the servers during the block."""
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
        info = primary.admin.info("replication")
        return sum(info.get(f"slave{index}", {}).get("state") == "online" for index in range(count)) == count

    wait_until(online, f"{count} replicas are online")


class Sentinels:
    """A primary, a replica and three sentinels."""

    def __init__(self, dir: Path, *, password: str | None = None) -> None:
        """`password`: password of the sentinels."""
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
                    wait_until(lambda sentinel=sentinel: self._knows_all(sentinel), "the sentinels know each other")
                yield self

    @staticmethod
    def _knows_all(sentinel: Server) -> bool:
        info = sentinel.admin.sentinel_master(SERVICE)
        return bool(info["num-other-sentinels"] == 2 and info["num-slaves"] == 1)


class Cluster:
    """Three primaries with a third of the slots each, and optionally a replica of the first."""

    def __init__(self, dir: Path, *, replica: bool = False) -> None:
        self.primaries = [self._make_node(dir / f"node-{index}") for index in range(3)]
        self.replica = self._make_node(dir / "replica") if replica else None
        self.all = [*self.primaries, *([self.replica] if self.replica else [])]

    @staticmethod
    def _make_node(dir: Path) -> Server:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500", "--cluster-port", str(free_port()))
        return Server(dir, *options, "--cluster-replica-validity-factor", "0")

    def url(self, *seeds: Server) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{seed.port}" for seed in seeds or self.primaries)

    @contextmanager
    def running(self) -> Iterator[Cluster]:
        with running(*self.all):
            first = self.primaries[0].admin
            for index, node in enumerate(self.primaries):
                start, end = _slot_range(index)
                node.admin.execute_command("CLUSTER ADDSLOTSRANGE", start, end)
            for node in self.all[1:]:
                bus = node.admin.config_get("cluster-port")["cluster-port"]
                first.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
            self._wait_for_agreement()
            if self.replica:
                self.replica.admin.execute_command("CLUSTER REPLICATE", self.id_of(self.primaries[0]))
                wait_for_replicas(self.primaries[0], 1)
                self._wait_for_agreement()
            yield self

    def id_of(self, node: Server) -> str:
        return str(node.admin.execute_command("CLUSTER MYID").decode())

    def run_on(self, index: int) -> str:
        """Return a new run name whose keys are on this primary."""
        start, end = _slot_range(index)
        while True:
            run = uuid.uuid4().hex
            if start <= key_slot(f"{{{run}}}".encode()) <= end:
                return run

    def _wait_for_agreement(self) -> None:
        def agrees(node: Server) -> bool:
            info = node.admin.execute_command("CLUSTER INFO")
            return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(self.all)

        for node in self.all:
            wait_until(lambda node=node: agrees(node), "the nodes know each other")


class SlotMove:
    """Moves the slot of a run from one node to another, key by key."""

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
        """Move at most `count` keys. Returns their number."""
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


def _slot_range(index: int) -> tuple[int, int]:
    return (LAST_SLOT + 1) * index // 3, (LAST_SLOT + 1) * (index + 1) // 3 - 1

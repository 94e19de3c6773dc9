"""A run on a real Ray cluster of several nodes on this machine: a server dies, one is added, one is drained and one is
removed, a node of the trainer is lost and comes back, and in the end every group is accounted for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from buffer.server import find_server
from tests.support.listening import ListenerWatch
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.support.whole_run import COMMAND, CONFIG, check_books

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'async-grpo[ray]')")
STEPS = 100
HERE = {"node_ip_address": "127.0.0.1"}
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


class Nodes:
    """A cluster: a head without room, two nodes for the trainer, and two for servers."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={**HERE, "num_cpus": 0, "include_dashboard": False}
        )
        self.address = self._cluster.address
        self.trainers = [self.add("trainer") for _ in range(2)]
        self.servers = [self.add("server") for _ in range(2)]

    def add(self, kind: str, count: int = 2) -> Any:
        return self._cluster.add_node(**HERE, num_cpus=2, resources={kind: count})

    def lose(self, node: Any) -> None:
        """Every process of the node is killed."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any) -> None:
        """What an autoscaler does with a node that is going to be preempted."""
        options = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        which = ["--node-id", node.node_id, "--deadline-remaining-seconds", "120"]
        command = [*COMMAND[:2], "ray.scripts.scripts", "drain-node", "--address", self.address]
        subprocess.run([*command, *which, *options], check=True, timeout=60)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # what the nodes, and their actors, inherit
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else 127.0.0.1 is replaced by another address
    cluster = Nodes()
    yield cluster
    cluster.close()


@pytest.fixture
def config(nodes: Nodes, tmp_path: Path) -> Iterator[Path]:
    port = free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--appendonly", "yes", "--dir", str(tmp_path)]
    server = subprocess.Popen([find_server(), *options], stdout=subprocess.DEVNULL)
    settings = yaml.safe_load(CONFIG.format(steps=STEPS, max_tokens=200))
    settings["redis"]["url"] = f"redis://127.0.0.1:{port}"
    settings["rollout"]["servers"] = 2
    settings["trainer"] |= {"nodes": 2, "processes": 2, "rendezvous": {"port": free_port()}}
    asked = {"trainer": {"CPU": 1, "trainer": 1}, "rollout": {"CPU": 1, "server": 1}}
    settings["launch"] = {"ray": {"address": nodes.address, "wait_s": 120, **asked}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    yield tmp_path / "small.yaml"
    server.terminate()
    server.wait(30)


def launch(config: Path, *options: str, log: str = "launch.log") -> subprocess.Popen[bytes]:
    environment = {**os.environ, "ASYNC_GRPO_CACHE": str(config.parent / "cache"), "COLUMNS": "400"}
    with (config.parent / log).open("ab") as said:
        command = [*COMMAND, "launch", "ray", str(config), *options]
        return subprocess.Popen(command, cwd=config.parent, env=environment, stdout=said, stderr=said)


def test_roles_see_the_npus_that_ray_has_reserved_for_them(nodes: Nodes) -> None:
    nodes.add("NPU", 6)
    command = [sys.executable, "-m", "tests.support.ray_npus", nodes.address]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert [len(seen[role]) for role in ("trainer", "rollout-0")] == [4, 2]
    assert sorted(seen["trainer"] + seen["rollout-0"]) == [*"012345"]


def newest(run: Path, key: str) -> int:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return max((row.get(key, 0) for row in rows if row["kind"] == "step"), default=0)


def process_of(name: str) -> psutil.Process:
    found = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == ["--name", name]]
    return next(process for process in found if "rollout_server.main" in process.cmdline())


def test_a_run_outlives_the_loss_of_servers_and_of_a_node(nodes: Nodes, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"

    def printed() -> str:
        return "\n".join(f"{file.name}: {file.read_text()[-2500:]}" for file in tmp_path.rglob("*.log"))

    def until(true: Any, what: str, within_s: float = 300.0) -> None:
        try:
            wait_until(lambda: true() or job.poll() is not None, what, within_s)
            assert true(), f"the command ended before {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{printed()}") from None

    def steps_more(count: int) -> None:
        aim = newest(run, "step") + count
        until(lambda: newest(run, "step") >= aim, f"step {aim}")

    job = launch(config)
    said = tmp_path / "launch.log"
    try:
        with ListenerWatch(job.pid) as watch:
            steps_more(2)
        assert not watch.beyond_loopback()
        first, second = sorted(file.stem for file in (run / "ray").glob("rollout-*.log"))
        more = launch(config, "--servers", "1", log="more.log")
        until(lambda: len([*(run / "ray").glob("rollout-*.log")]) == 3, "a third server")
        steps_more(5)

        process_of(first).send_signal(signal.SIGKILL)
        until(lambda: f"{first} was killed by SIGKILL" in said.read_text(), "the end of a server", 60)
        assert "restart 1 of 3" in said.read_text()
        steps_more(2)

        nodes.add("server")
        nodes.drain(nodes.servers[0])
        drained = "its node is drained; it is started elsewhere"
        until(lambda: drained in said.read_text() + (tmp_path / "more.log").read_text(), "a drained server", 120)
        steps_more(2)

        nodes.lose(nodes.trainers[1])
        nodes.add("trainer")
        until(lambda: newest(run, "epoch") == 2, "the trainer to be back")
        (third,) = {file.stem for file in (run / "ray").glob("rollout-*.log")} - {first, second}
        assert launch(config, "--remove", third).wait(120) == 0
        assert more.wait(120) == 0, "what it had started is gone"
        assert job.wait(600) == 0, printed()
    finally:
        for process in (job, *([more] if "more" in locals() else [])):
            process.kill()
            process.wait()
    check_books(json.loads((run / "summary.json").read_text()), steps=STEPS)

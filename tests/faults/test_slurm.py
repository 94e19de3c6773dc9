"""A run on a real Slurm of two nodes: servers die, join and are preempted, a node of the trainer crashes, and in the
end every group is accounted for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from async_grpo.config import load
from buffer.server import find_server
from tests.support.ports import free_port
from tests.support.slurm_cluster import SlurmCluster, missing, own_address
from tests.support.whole_run import COMMAND, CONFIG, check_books

STEPS = 400
pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed (apt-get install slurm-wlm): {missing()}"),
    pytest.mark.skipif(not own_address(), reason="this machine has no address besides the loopback"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path / "slurm", own_address())
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def config(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Path]:
    """A run whose server listens, and whose trainer has a rank on each node."""
    port = free_port()
    options = ["--bind", cluster.address, "--port", str(port), "--protected-mode", "no", "--appendonly", "yes"]
    server = subprocess.Popen([find_server(), *options, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    settings = yaml.safe_load(CONFIG.format(steps=STEPS, max_tokens=200))
    settings["redis"]["url"] = f"redis://{cluster.address}:{port}"
    settings["rollout"]["servers"] = 2
    settings["trainer"] |= {"nodes": 2, "processes": 2, "rendezvous": {"port": free_port()}}
    settings["weights"] = {"bind": f"tcp://{cluster.address}:0"}
    settings["launch"] = {"slurm": {"trainer": ["--partition=trainers"], "report": ["--partition=trainers"]}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    yield tmp_path / "small.yaml"
    cluster.cancel()
    server.terminate()
    server.wait(30)


def launch(cluster: SlurmCluster, config: Path, *options: str) -> str:
    environment = {**cluster.environment, "ASYNC_GRPO_CACHE": str(config.parent / "cache"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*COMMAND, "launch", "slurm", str(config), *options],
        cwd=config.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def newest_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return max((row["step"] for row in rows if row["kind"] == "step"), default=0)


def process_of(name: str) -> psutil.Process:
    found = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == ["--name", name]]
    return next(process for process in found if "rollout_server.main" in process.cmdline())


def test_a_run_outlives_the_loss_of_servers_and_of_a_node(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"

    def until(true: Callable[[], object], within_s: float, what: str) -> None:
        try:
            cluster.until(true, within_s, what)
        except AssertionError as error:
            pytest.fail(f"{error}\n{logs(run)}")

    def steps_more(count: int) -> None:
        aim = newest_step(run) + count
        until(lambda: newest_step(run) >= aim, 300, f"step {aim}")

    launch(cluster, config)
    steps_more(2)
    servers = f"{load(run).name_with_digest}-rollout"
    (array,) = {job.partition("_")[0] for job in cluster.jobs(servers)}
    launch(cluster, config, "--servers", "1")
    cluster.until(lambda: list(cluster.jobs(servers).values()) == ["RUNNING"] * 3, 60, "a third server")
    steps_more(10)

    urgent = ["-p", "high", "-w", "n1", "-c", "1", "-o", os.devnull, "--wrap", "sleep 5"]
    job = cluster.run("sbatch", "--parsable", *urgent).strip()
    cluster.until(lambda: job not in cluster.run("squeue", "-h", "-o", "%i").split(), 120, "the urgent job")
    preempted = [file for file in (run / "slurm").glob("rollout-*.log") if "after exit code 75 (0" in file.read_text()]
    assert len(preempted) == 1, logs(run)
    role = preempted[0].stem.replace("_", "-") + ".0.log"
    assert "stopping: storing work in flight" in (run / "slurm" / role).read_text()
    steps_more(2)

    victim = next(task for task in (0, 1) if preempted[0].name != f"rollout-{array}_{task}.log")
    process_of(f"rollout-{array}-{victim}").send_signal(signal.SIGKILL)
    log = run / "slurm" / f"rollout-{array}_{victim}.log"
    cluster.until(lambda: "requeued after exit code 137 (1 of 3 failures)" in log.read_text(), 60, "a requeued server")
    steps_more(2)

    cluster.crash("n2")
    cluster.boot("n2")
    steps_more(2)
    assert newest_epoch(run) == 2
    until(lambda: not cluster.run("squeue", "--noheader"), 600, "the end")
    check_books(json.loads((run / "summary.json").read_text()), steps=STEPS)


def newest_epoch(run: Path) -> int:
    return max(row.get("epoch", 0) for row in rows_of(run))


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def logs(run: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in (run / "slurm").glob("*.log"))

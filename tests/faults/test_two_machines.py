"""A trainer on two machines that only a cable joins, started by hand, by srun and by Ray, and with ranks that srun has
placed: it trains as one node does, and goes on by itself after a rank was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from async_grpo.app.launch.clusters.slurm import make_job_scripts
from async_grpo.config import load
from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import read_rows
from tests.support.network_namespaces import ADDRESSES, Prefix, can_be_made, two_machines
from tests.support.ports import two_free_ports
from tests.support.slurm_cluster import SlurmCluster, missing
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.supply import supply, trained, write_config
from tests.support.waiting import until

STEPS = 4
GROUPS = 2
KILL_AT = 3
PATIENCE_S = 400.0
COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main"]
TRAINER = [*COMMAND, "trainer"]
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus", "1"]

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not can_be_made(), reason="network namespaces cannot be made here (root, and iproute2)"),
]


@dataclass(frozen=True)
class Run:
    """Figures by step, once for each time that it was trained; and the weights in the end."""

    losses: dict[int, list[float]]
    gradient_norms: dict[int, list[float]]
    weights: dict[str, torch.Tensor]

    @classmethod
    def read(cls, config: Path) -> Run:
        folder = config.parent / "exported"
        export = [*COMMAND, "export", str(config.parent), str(folder)]
        subprocess.run(export, check=True, timeout=PATIENCE_S, capture_output=True)
        losses: dict[int, list[float]] = {}
        norms: dict[int, list[float]] = {}
        for row in read_rows(config.parent / "metrics.jsonl"):
            if row["kind"] == "step":
                losses.setdefault(row["step"], []).append(row["loss"])
                norms.setdefault(row["step"], []).append(row["grad_norm"])
        return cls(losses, norms, load_file(folder / "model.safetensors"))


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Prefix]]:
    with two_machines() as prefixes:
        yield prefixes


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory, redis_config: RedisConfig) -> Run:
    """What one node of two ranks trains, on this machine."""
    return train_on_one_node(write(tmp_path_factory.mktemp("one"), redis_config, "127.0.0.1"))


@pytest.fixture(scope="module")
def one_node_of_stages(tmp_path_factory: pytest.TempPathFactory, redis_config: RedisConfig) -> Run:
    """As `one_node`, where each rank has half of the layers."""
    return train_on_one_node(write(tmp_path_factory.mktemp("one"), redis_config, "127.0.0.1", pipeline_parallel=2))


def train_on_one_node(config: Path) -> Run:
    async def train() -> None:
        async with supply(load(config)) as run, run.serving(STEPS):
            await run.evaluate()
            async with started([], config, "node-0.log", *TRAINER, str(config)) as trainer:
                assert await ended(trainer) == 0, logs(config)

    asyncio.run(train())
    return Run.read(config)


def write(folder: Path, redis: RedisConfig, address: str, **trainer: Any) -> Path:
    keys = {"processes": 2, "checkpoint": {"every_steps": 2}, **trainer}
    model = {"path": str(make_model(folder, "qwen2"))}
    bind = {"bind": f"tcp://{address}:0"}
    return write_config(
        folder, "run", redis, steps=STEPS, groups=GROUPS, patience_s=90, model=model, trainer=keys, weights=bind
    )


def two_nodes(folder: Path, redis: RedisConfig, address: str | None = None, **layout: Any) -> Path:
    where = {"port": two_free_ports("127.0.0.1"), "timeout_s": 300, "address": address}
    return write(folder, redis, ADDRESSES[0], nodes=2, rendezvous=where, **layout)


@contextlib.asynccontextmanager
async def started(prefix: Prefix, config: Path, log: str, *command: str) -> AsyncIterator[Process]:
    """A command on one of the machines, which has ended after the block."""
    with (config.parent / log).open("ab") as said:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
        process = await asyncio.create_subprocess_exec(*prefix, *command, stdout=said, stderr=said, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def ended(process: Process) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await process.wait()


async def rank_is_killed(config: Path, rank: str) -> None:
    """As soon as step KILL_AT is trained, of which there is no checkpoint."""
    await until(lambda: trained(load(config)) >= KILL_AT, PATIENCE_S)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "trainer.main" in words and str(config.parent) in " ".join(words) and process.environ()["RANK"] == rank:
            process.kill()


def logs(config: Path) -> str:
    return "\n".join(f"{file}: {file.read_text()[-3000:]}" for file in config.parent.rglob("*.log"))


def check_trained_as_on(one_node: Run, config: Path) -> None:
    """Every step, also one that was trained again, and the weights."""
    found = Run.read(config)
    assert set(found.losses) == set(one_node.losses) == set(range(1, STEPS + 1))
    for ours, theirs in ((found.losses, one_node.losses), (found.gradient_norms, one_node.gradient_norms)):
        for step, values in ours.items():
            assert values == pytest.approx(theirs[step] * len(values), rel=1e-6, abs=1e-9)
    assert any(len(values) > 1 for values in found.losses.values()), "nothing was trained again"
    assert set(found.weights) == set(one_node.weights)
    for name, tensor in found.weights.items():
        torch.testing.assert_close(tensor, one_node.weights[name], rtol=1e-6, atol=1e-6)


async def test_two_nodes_that_are_started_by_hand(
    one_node: Run, machines: list[Prefix], tmp_path: Path, redis_config: RedisConfig
) -> None:
    config = two_nodes(tmp_path, redis_config, ADDRESSES[0])
    await train_by_hand(machines, config)
    check_trained_as_on(one_node, config)


async def test_two_nodes_with_half_of_the_layers_each(
    one_node_of_stages: Run, machines: list[Prefix], tmp_path: Path, redis_config: RedisConfig
) -> None:
    """Rank 1 does not see the memory of rank 0's machine, where its layers are published."""
    config = two_nodes(tmp_path, redis_config, ADDRESSES[0], pipeline_parallel=2)
    await train_by_hand(machines, config)
    check_trained_as_on(one_node_of_stages, config)


async def train_by_hand(machines: list[Prefix], config: Path) -> None:
    """Train the run, while rank 1 is killed once."""

    def node(rank: int) -> contextlib.AbstractAsyncContextManager[Process]:
        """Started again until it ends well, as `Restart=on-failure` of systemd does."""
        command = shlex.join([*TRAINER, str(config), "--node-rank", str(rank)])
        loop = f"trap 'kill $role' TERM; until {command} & role=$!; wait $role; do sleep 1; done"
        return started(machines[rank], config, f"node-{rank}.log", "bash", "-c", loop)

    async with supply(load(config)) as run:
        await run.evaluate()
        async with node(0) as first, node(1) as second:
            async with run.serving(KILL_AT):
                await rank_is_killed(config, "1")
            async with run.serving(STEPS - KILL_AT):
                assert [await ended(first), await ended(second)] == [0, 0], logs(config)
    assert "rank 1 was killed by SIGKILL" in (config.parent / "node-0.log").read_text(), "the other node names it"


@pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed (apt-get install slurm-wlm): {missing()}")
async def test_two_nodes_that_srun_starts(
    one_node: Run, machines: list[Prefix], tmp_path: Path, redis_config: RedisConfig
) -> None:
    config = two_nodes(tmp_path, redis_config)
    folder = config.parent / "slurm"
    folder.mkdir()
    (folder / "trainer.sbatch").write_text(make_job_scripts(load(config), 0)["trainer"])
    cluster = SlurmCluster(tmp_path / "cluster", *ADDRESSES, prefixes=machines)
    try:
        cluster.start()
        cluster.run("sbatch", "--partition=trainers", str(folder / "trainer.sbatch"))
        async with supply(load(config)) as run:
            await run.evaluate()
            async with run.serving(KILL_AT):
                await rank_is_killed(config, "1")
            async with run.serving(STEPS - KILL_AT):
                await until(lambda: not cluster.run("squeue", "--noheader"), PATIENCE_S)
    except TimeoutError:
        pytest.fail(logs(config))
    finally:
        cluster.cancel()
        cluster.stop()
    (log,) = folder.glob("trainer-*.log")
    assert "requeued after exit code 1 (1 of 3 failures)" in log.read_text()
    check_trained_as_on(one_node, config)


@pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed (apt-get install slurm-wlm): {missing()}")
async def test_ranks_that_srun_places(
    one_node: Run, machines: list[Prefix], tmp_path: Path, redis_config: RedisConfig
) -> None:
    rendezvous = {"port": two_free_ports("127.0.0.1"), "timeout_s": 300}
    config = write(tmp_path, redis_config, ADDRESSES[0], rendezvous=rendezvous)
    role = shlex.join([*TRAINER, str(config)])
    log = f"--open-mode=append --output={config.parent}/%x.%t.log"
    script = tmp_path / "ranks.sbatch"
    script.write_text(f"#!/bin/bash\nuntil srun --kill-on-bad-exit=1 {log} {role}; do sleep 1; done\n")
    cluster = SlurmCluster(tmp_path / "cluster", *ADDRESSES, prefixes=machines)
    try:
        cluster.start()
        submitted = ["--partition=trainers", "--nodes=2", "--ntasks-per-node=1", "--job-name=ranks"]
        cluster.run("sbatch", *submitted, f"--output={config.parent}/job.log", str(script))
        async with supply(load(config)) as run:
            await run.evaluate()
            async with run.serving(KILL_AT):
                await rank_is_killed(config, "1")
            async with run.serving(STEPS - KILL_AT):
                await until(lambda: not cluster.run("squeue", "--noheader"), PATIENCE_S)
    except TimeoutError:
        pytest.fail(logs(config))
    finally:
        cluster.cancel()
        cluster.stop()
    assert {file.name for file in (config.parent / "roles").glob("*.yaml")} == {"trainer-0.yaml", "trainer-1.yaml"}
    check_trained_as_on(one_node, config)


async def test_two_nodes_that_ray_starts(
    one_node: Run, machines: list[Prefix], tmp_path: Path, redis_config: RedisConfig
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'async-grpo[ray]')")
    config = two_nodes(tmp_path, redis_config)
    head = f"{ADDRESSES[0]}:{two_free_ports('127.0.0.1')}"
    here = [["--head", "--port", head.split(":")[1], "--include-dashboard", "false"], ["--address", head]]

    def node(index: int) -> contextlib.AbstractAsyncContextManager[Process]:
        command = [*RAY, "--node-ip-address", ADDRESSES[index], *here[index]]
        return started(machines[index], config, f"ray-{index}.log", *command)

    def said(log: str, words: str) -> bool:
        return words in (config.parent / log).read_text()

    launch = [*COMMAND, "launch", "ray", str(config), "--servers", "0", "-o", f"launch.ray.address={head}"]
    # Node 0, where the publisher of the weights is, is of Ray's choice.
    launch += ["-o", "weights.bind=tcp://0.0.0.0:0"]
    async with supply(load(config)) as run, node(0):
        await run.evaluate()
        await until(lambda: said("ray-0.log", "Ray runtime started"), PATIENCE_S)
        async with node(1), started(machines[0], config, "launch.log", *launch) as job:
            async with run.serving(KILL_AT):
                await rank_is_killed(config, "1")
            async with run.serving(STEPS - KILL_AT):
                assert await ended(job) == 0, logs(config)
    assert said("launch.log", f"trainer: started on {', '.join(ADDRESSES)}"), "one node on each machine"
    assert said("launch.log", "restart 1 of 3")
    assert (config.parent / "report.md").exists()
    check_trained_as_on(one_node, config)

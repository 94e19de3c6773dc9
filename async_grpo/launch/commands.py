"""How each role is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.devices import devices_of
from async_grpo.launch.cores import cores_here, role_cores
from async_grpo.launch.devices import KINDS, deal_devices
from async_grpo.launch.role import RoleSpec
from async_grpo.launch.run_folder import RunFolder

MALLOC_VARIABLE = "GLIBC_TUNABLES"
KEEP_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296:glibc.malloc.hugetlb=1"


def rollout_argv(config_file: Path, model: Path, name: str) -> list[str]:
    """One rollout server."""
    return [sys.executable, "-m", "rollout_server.main", *_files(config_file, model), "--name", name]


def trainer_argv(config_file: Path, model: Path, node_rank: int = 0) -> list[str]:
    """The trainer on this machine: a process that starts the ranks, once all machines have met."""
    rank = ["--node-rank", str(node_rank)]
    return [sys.executable, "-m", "trainer.nodes.main", *rank, *_files(config_file, model)]


def trainer_environment(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """What the ranks look at, beside the environment that is given."""
    memory = kept_memory(given) if config.trainer.platform == "cpu" else {}
    return {"OMP_NUM_THREADS": str(config.trainer.threads), **memory}


def kept_memory(given: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process that trains on a CPU: freed memory is kept, in large pages.

    Else every activation would be mapped anew and zeroed by the kernel: a sixth of a step's processor time, and more of
    long micro-batches. Of glibc's malloc; others ignore it.
    """
    return {MALLOC_VARIABLE: given.get(MALLOC_VARIABLE, KEEP_MEMORY)}


def role_specs(config: RunConfig, folder: RunFolder, model: Path) -> list[RoleSpec]:
    """Every role of a run on this machine, each with the devices that are its own. Raises ConfigError."""
    devices = deal_devices(config, os.environ, _devices_here(config))
    trainer_cores, rollout_cores = role_cores(config, cores_here())
    restarts = config.launch.restarts
    trainer = RoleSpec(
        "trainer",
        trainer_argv(folder.roles_file, model),
        folder.log("trainer"),
        restarts.trainer,
        env=trainer_environment(config, os.environ) | devices["trainer"],
        cores=trainer_cores,
    )
    names = [f"rollout-{index}" for index in range(config.rollout.servers)]
    servers = [
        RoleSpec(
            name,
            rollout_argv(folder.roles_file, model, name),
            folder.log(name),
            restarts.rollout,
            env=devices[name],
            cores=rollout_cores,
        )
        for name in names
    ]
    return [trainer, *servers]


def _files(config_file: Path, model: Path) -> list[str]:
    return ["--config", str(config_file), "--model", str(model)]


def _devices_here(config: RunConfig) -> int | None:
    """None where the vendor's tool is not there to ask: the roles find out."""
    kinds = {KINDS[config.trainer.platform], KINDS[config.rollout.vllm.platform]} - {"cpu"}
    return sum(len(devices_of(kind)) for kind in kinds) or None

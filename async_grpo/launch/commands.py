"""How each role is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.devices import devices_of
from async_grpo.launch.cores import cores_here, role_cores
from async_grpo.launch.devices import KINDS, deal_devices
from async_grpo.launch.role import RoleSpec
from async_grpo.launch.run_folder import RunFolder


def rollout_argv(folder: RunFolder, model: Path, name: str) -> list[str]:
    """One rollout server."""
    files = ["--config", str(folder.roles_file), "--model", str(model)]
    return [sys.executable, "-m", "rollout_server.main", *files, "--name", name]


def trainer_argv(config: RunConfig, folder: RunFolder, model: Path) -> list[str]:
    """All ranks of the trainer on this machine, under torchrun, which meets them on a free port."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.trainer.processes)]
    files = ["--config", str(folder.roles_file), "--model", str(model)]
    return [sys.executable, *torchrun, "-m", "trainer.main", *files]


def node_argv(folder: RunFolder, model: Path, node_rank: int) -> list[str]:
    """The ranks of this machine, of a trainer that has several: they start when all machines have met."""
    files = ["--config", str(folder.roles_file), "--model", str(model)]
    return [sys.executable, "-m", "trainer.nodes.main", "--node-rank", str(node_rank), *files]


def trainer_environment(config: RunConfig) -> dict[str, str]:
    """What torchrun and its ranks look at. torchrun passes SIGTERM on, and kills ranks that still write their
    checkpoint after 30 s, unless told otherwise."""
    return {
        "OMP_NUM_THREADS": str(config.trainer.threads),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(config.launch.stop_timeout_s)),
    }


def role_specs(config: RunConfig, folder: RunFolder, model: Path) -> list[RoleSpec]:
    """Every role of a run on this machine, each with the devices that are its own. Raises ConfigError."""
    devices = deal_devices(config, os.environ, _devices_here(config))
    trainer_cores, rollout_cores = role_cores(config, cores_here())
    restarts = config.launch.restarts
    trainer = RoleSpec(
        "trainer",
        trainer_argv(config, folder, model),
        folder.log("trainer"),
        restarts.trainer,
        env=trainer_environment(config) | devices["trainer"],
        cores=trainer_cores,
    )
    names = [f"rollout-{index}" for index in range(config.rollout.servers)]
    servers = [
        RoleSpec(
            name,
            rollout_argv(folder, model, name),
            folder.log(name),
            restarts.rollout,
            env=devices[name],
            cores=rollout_cores,
        )
        for name in names
    ]
    return [trainer, *servers]


def _devices_here(config: RunConfig) -> int | None:
    """None where the vendor's tool is not there to ask: the roles find out."""
    kinds = {KINDS[config.trainer.platform], KINDS[config.rollout.vllm.platform]} - {"cpu"}
    return sum(len(devices_of(kind)) for kind in kinds) or None

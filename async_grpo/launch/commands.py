"""How each role is started."""

from __future__ import annotations

import sys
from pathlib import Path

from async_grpo.config import RunConfig
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


def role_specs(config: RunConfig, folder: RunFolder, model: Path) -> list[RoleSpec]:
    """Every role of a run on this machine."""
    threads = {"OMP_NUM_THREADS": str(config.trainer.threads)}
    restarts = config.launch.restarts
    trainer = RoleSpec(
        "trainer", trainer_argv(config, folder, model), folder.log("trainer"), restarts.trainer, env=threads
    )
    names = [f"rollout-{index}" for index in range(config.rollout.servers)]
    servers = [RoleSpec(name, rollout_argv(folder, model, name), folder.log(name), restarts.rollout) for name in names]
    return [trainer, *servers]

"""RoleSpecs of a run: command, environment, cores and accelerators of each role.

    trainer     the first trainer.processes devices
    rollout-i   the next devices, as many per server as its engine spans; with launch.share_devices the servers start
                at the first device again, so that a device belongs to the trainer and to one server

The devices are those of CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES, if set; otherwise they are numbered from 0.
A role on the CPU sees no devices. A server that is restarted gets the same devices.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from async_grpo.app.launch.role_process import RoleSpec, assign_cores, available_cores
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig
from async_grpo.errors import EXIT_CONFIG, ConfigError, DependencyError
from async_grpo.utils.requirements import INSTALL
from trainer.platform import Platform, select_platform
from trainer.platform.base import visible_devices
from trainer.platform.cpu import check_torchvision

EXIT_STOPPED = 75
"""Exit code of `make_stoppable` (EX_TEMPFAIL of sysexits.h)."""

_STOPPABLE = """\
stopped=0
trap 'stopped=1; kill -TERM $role 2>/dev/null' TERM
{command} & role=$!
while true; do wait $role; code=$?; kill -0 $role 2>/dev/null || break; done
[ $stopped = 1 ] && [ $code != {fault} ] && exit {stopped}
exit $code"""

Environments = dict[str, dict[str, str]]
"""Role -> environment variable -> value."""


def assign_devices(config: RunConfig, environment: Mapping[str, str], available: int | None = None) -> Environments:
    """Return role -> environment variable that makes only its devices visible.

    `available`: number of devices of this machine; None if unknown. Raises ConfigError if there are too few, or if the
    two sides need different kinds.
    """
    devices = devices_by_role(config)
    limits = config.rollout.limits
    kinds = {platform.name: platform for platform, count in devices.values() if count}
    if len(kinds) > 1:
        raise ConfigError(
            f"trainer.platform is {config.trainer.platform} and {limits.platform_key} {limits.platform}, but a machine "
            "has accelerators of one kind. Start the roles on different machines (async-grpo trainer, rollout)"
        )
    if not kinds:
        return {role: {} for role in devices}

    (platform,) = kinds.values()
    ranks, *servers = (count for _, count in devices.values())
    first = 0 if config.launch.share_devices != "off" else ranks
    pool = _list_devices(config, platform, count_needed_devices(config), environment, available)
    starts = (0, *accumulate(servers, initial=first))  # one more than roles: the end of the last server
    environments = {}
    for (role, (_, count)), start in zip(devices.items(), starts, strict=False):
        environments[role] = {platform.visible_variable: ",".join(pool[start : start + count])}
    return environments


def check_machine(config: RunConfig) -> None:
    """Raise ConfigError unless this machine has the devices of all roles, DependencyError unless it has their packages.

    This check imports nothing heavy, so that it is fast. The roles check again in detail.
    """
    needed = {platform.name: platform for platform, count in devices_by_role(config).values() if count}
    for platform in needed.values():
        if not platform.has_devices():
            key = "trainer.platform" if platform.name == config.trainer.platform else config.rollout.limits.platform_key
            raise ConfigError(
                f"{key} is {platform.name}, but this machine has no such device: {platform.tool} lists none, and there "
                f"is no /dev/{platform.device_files[0]}. If it should have one, run async-grpo doctor --platform "
                f"{platform.name} for advice. Otherwise start the run on a machine with devices (--dry-run plans it "
                f"here), or set trainer.platform and {config.rollout.limits.platform_key} to cpu"
            )
    assign_devices(config, os.environ, count_local_devices(config))
    _check_packages(next(iter(needed), "cpu"))


def _check_packages(platform: str) -> None:
    missing = [name for name in ("torch", "megatron", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"a run needs {', '.join(missing)}, not installed for {sys.executable}. Run: {INSTALL[platform]}"
        )
    if platform == "cpu" and not (finding := check_torchvision()).ok:
        raise DependencyError(
            f"torchvision is {finding.found}, a build for CUDA, but torch is a build for CPUs, so vLLM and "
            f"transformers could not be imported. Run: {finding.fix}"
        )


def devices_by_role(config: RunConfig) -> dict[str, tuple[Platform, int]]:
    """Return role -> platform and number of devices (0 on the CPU). The trainer comes first, with all of its nodes."""
    trainer_platform = select_platform(config.trainer.platform)
    rollout_platform = select_platform(config.rollout.limits.platform)
    ranks = config.trainer.processes if trainer_platform.visible_variable else 0
    workers = config.rollout.limits.devices if rollout_platform.visible_variable else 0
    servers = {f"rollout-{index}": (rollout_platform, workers) for index in range(config.max_servers_at_once)}
    return {"trainer": (trainer_platform, ranks), **servers}


def count_needed_devices(config: RunConfig) -> int:
    """Return the number of devices of all roles. Devices that both sides share count once."""
    ranks, *servers = (count for _, count in devices_by_role(config).values())
    if config.launch.share_devices == "off":
        return ranks + sum(servers)
    return max(ranks, sum(servers))


def count_local_devices(config: RunConfig) -> int | None:
    """Return the number of devices that the vendor's tool lists; None if it lists none, so that the roles decide."""
    platforms = {platform.name: platform for platform, _ in devices_by_role(config).values()}
    return sum(len(platform.list_devices()) for platform in platforms.values()) or None


def _list_devices(
    config: RunConfig, platform: Platform, needed: int, environment: Mapping[str, str], available: int | None
) -> list[str]:
    """Return the devices that the run may use. Raises ConfigError if there are fewer than `needed`."""
    configured = visible_devices(platform, environment)
    if configured is not None:
        source = f"{platform.visible_variable} names"
        pool = configured
    else:
        source = "this machine has"
        pool = [str(index) for index in range(needed if available is None else available)]
    if len(pool) < needed:
        raise ConfigError(
            f"trainer.processes and rollout.servers * {config.rollout.limits.devices_key} make {needed} devices, but "
            f"{source} {len(pool)}. Lower them, make more devices visible, or start the roles on several machines "
            "(async-grpo trainer, rollout)"
        )
    return pool


def rollout_argv(config_file: Path, model: Path, name: str) -> list[str]:
    """Return the command of one rollout server."""
    return [sys.executable, "-m", "rollout_server.main", *_files(config_file, model), "--name", name]


def trainer_argv(config_file: Path, model: Path, node_rank: int = 0) -> list[str]:
    """Return the command of the trainer on this machine. It starts the ranks when all nodes have joined."""
    rank = ["--node-rank", str(node_rank)]
    return [sys.executable, "-m", "trainer.node_main", *rank, *_files(config_file, model)]


def rank_argv(config_file: Path, model: Path) -> list[str]:
    """Return the command of one rank of the trainer. The rank's number is in its environment."""
    return [sys.executable, "-m", "trainer.main", *_files(config_file, model)]


def trainer_environment(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the ranks. Values in `environment` take precedence over the platform's
    defaults."""
    defaults = select_platform(config.trainer.platform).rank_environment(config.trainer)
    variables = {"OMP_NUM_THREADS": str(config.trainer.threads)}
    for name, default in defaults.items():
        variables[name] = environment.get(name, default)
    return variables


def make_stoppable(command: str) -> str:
    """Return a bash script that runs a role and forwards SIGTERM to it. After SIGTERM it exits with EXIT_STOPPED,
    unless the configuration was at fault.

    Without it, a role that was preempted and has saved its work would exit with 0, and the scheduler would take it for
    finished. Slurm signals all processes of the role at the same time, so the engine may end before the role does; the
    role then fails, but its finished work is stored, and EXIT_STOPPED hides the failure.
    """
    return _STOPPABLE.format(command=command, stopped=EXIT_STOPPED, fault=EXIT_CONFIG)


@dataclass(frozen=True, slots=True)
class RoleSpecs:
    """Roles of a run on one machine."""

    trainer: RoleSpec
    servers: list[RoleSpec]
    spares: list[RoleSpec]
    """Rollout servers that the autoscaler may add."""

    def without_servers(self) -> RoleSpecs:
        """Return a copy with the trainer only."""
        return RoleSpecs(self.trainer, [], [])


def role_specs(config: RunConfig, folder: RunFolder, model: Path) -> RoleSpecs:
    """Return all roles of a run on this machine, each with its devices. Raises ConfigError."""
    devices = assign_devices(config, os.environ, count_local_devices(config))
    trainer_cores, rollout_cores = assign_cores(config, available_cores())
    restarts = config.launch.restarts
    trainer = RoleSpec(
        "trainer",
        trainer_argv(folder.roles_file, model),
        folder.log("trainer"),
        restarts.trainer,
        env=trainer_environment(config, os.environ) | devices.pop("trainer"),
        cores=trainer_cores,
    )
    servers = [
        RoleSpec(
            name,
            rollout_argv(folder.roles_file, model, name),
            folder.log(name),
            restarts.rollout,
            env=environment,
            cores=rollout_cores,
        )
        for name, environment in devices.items()
    ]
    first = config.rollout.servers
    return RoleSpecs(trainer, servers[:first], servers[first:])


def _files(config_file: Path, model: Path) -> list[str]:
    return ["--config", str(config_file), "--model", str(model)]

"""RoleSpecs of a run: the command, environment, cores and accelerators of each role.

    trainer     the first trainer.processes devices
    rollout-i   the next ones, as many as its engine shares a model over, server after server; with launch.share_devices
                they are counted from the first again, so that a device belongs to the trainer and to one server

The devices are those of CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES, if set; else they are numbered from 0. A
role that computes on the CPU sees none. A server that dies and is started again gets the same devices.
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
from trainer.platform.base import visible
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
"""Environment variables by role, and by name."""


def assign_devices(config: RunConfig, environment: Mapping[str, str], there: int | None = None) -> Environments:
    """Role -> the environment that shows it its devices and no others.

    `there` is the number of devices of this machine, None if unknown. Raises ConfigError if they are too few or the two
    sides need different kinds.
    """
    wanted, limits = devices_by_role(config), config.rollout.limits
    kinds = {platform.name: platform for platform, count in wanted.values() if count}
    if len(kinds) > 1:
        raise ConfigError(
            f"trainer.platform is {config.trainer.platform} and {limits.platform_key} {limits.platform}: "
            "one machine has accelerators of one kind. Start the roles on different ones (async-grpo trainer, rollout)"
        )
    if not kinds:
        return {role: {} for role in wanted}
    (platform,) = kinds.values()
    ranks, *servers = (count for _, count in wanted.values())
    first = 0 if config.launch.share_devices != "off" else ranks
    pool = _pool(config, platform, count_needed_devices(config), environment, there)
    starts = (0, *accumulate(servers, initial=first))
    return {
        role: {platform.visible_variable: ",".join(pool[start : start + count])}
        for (role, (_, count)), start in zip(wanted.items(), starts, strict=False)
    }


def check_machine(config: RunConfig) -> None:
    """Raise ConfigError unless this machine has the devices of all roles, and DependencyError unless it has their
    packages. Looks for both without importing anything; the roles look again, more closely."""
    needed = {platform.name: platform for platform, count in devices_by_role(config).values() if count}
    for platform in needed.values():
        if not platform.has_devices():
            key = "trainer.platform" if platform.name == config.trainer.platform else config.rollout.limits.platform_key
            raise ConfigError(
                f"{key} is {platform.name}, but this machine has no such device: {platform.tool} lists none, and there "
                f"is no /dev/{platform.device_files[0]}. If there should be one, async-grpo doctor --platform "
                f"{platform.name} says how to mend it. Else start the run where devices are (--dry-run plans it "
                f"here), or set trainer.platform and {config.rollout.limits.platform_key} to cpu"
            )
    assign_devices(config, os.environ, count_local_devices(config))
    _check_packages(next(iter(needed), "cpu"))


def _check_packages(platform: str) -> None:
    missing = [name for name in ("torch", "megatron", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"a run computes with {', '.join(missing)}, not installed for {sys.executable}. Run: {INSTALL[platform]}"
        )
    if platform == "cpu" and not (finding := check_torchvision()).ok:
        raise DependencyError(
            f"torchvision is {finding.found}, a build for CUDA, beside a build of torch for CPUs: vLLM and "
            f"transformers could not be imported. Run: {finding.fix}"
        )


def devices_by_role(config: RunConfig) -> dict[str, tuple[Platform, int]]:
    """Role -> platform and number of its devices, which is 0 on the CPU; the trainer first, its nodes together."""
    trains, generates = select_platform(config.trainer.platform), select_platform(config.rollout.limits.platform)
    ranks = config.trainer.processes if trains.visible_variable else 0
    workers = config.rollout.limits.devices if generates.visible_variable else 0
    servers = {f"rollout-{index}": (generates, workers) for index in range(config.max_servers_at_once)}
    return {"trainer": (trains, ranks), **servers}


def count_needed_devices(config: RunConfig) -> int:
    """Devices of all roles together; those that both sides share count once."""
    ranks, *servers = (count for _, count in devices_by_role(config).values())
    return ranks + sum(servers) if config.launch.share_devices == "off" else max(ranks, sum(servers))


def count_local_devices(config: RunConfig) -> int | None:
    """Number of devices that the vendor's tool lists; None if it lists none: then the roles find out."""
    wanted = {platform.name: platform for platform, _ in devices_by_role(config).values()}
    return sum(len(platform.devices()) for platform in wanted.values()) or None


def _pool(
    config: RunConfig, platform: Platform, needed: int, environment: Mapping[str, str], there: int | None
) -> list[str]:
    named = visible(platform, environment)
    pool = named if named is not None else [str(index) for index in range(needed if there is None else there)]
    if len(pool) < needed:
        source = f"{platform.visible_variable} names" if named is not None else "this machine has"
        raise ConfigError(
            f"trainer.processes and rollout.servers * {config.rollout.limits.devices_key} make {needed} devices, but "
            f"{source} {len(pool)}. Lower them, give more, or start the roles on several machines "
            "(async-grpo trainer, rollout)"
        )
    return pool


def rollout_argv(config_file: Path, model: Path, name: str) -> list[str]:
    """The command of one rollout server."""
    return [sys.executable, "-m", "rollout_server.main", *_files(config_file, model), "--name", name]


def trainer_argv(config_file: Path, model: Path, node_rank: int = 0) -> list[str]:
    """The command of the trainer on this machine; it starts the ranks once all machines have met."""
    rank = ["--node-rank", str(node_rank)]
    return [sys.executable, "-m", "trainer.node_main", *rank, *_files(config_file, model)]


def rank_argv(config_file: Path, model: Path) -> list[str]:
    """The command of one rank of the trainer, which finds its number in the environment."""
    return [sys.executable, "-m", "trainer.main", *_files(config_file, model)]


def trainer_environment(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of the ranks, beside the environment that is given, which comes first."""
    defaults = select_platform(config.trainer.platform).rank_environment(config.trainer)
    return {"OMP_NUM_THREADS": str(config.trainer.threads)} | {
        name: given.get(name, defaults[name]) for name in defaults
    }


def make_stoppable(command: str) -> str:
    """A line for bash that runs a role and passes SIGTERM on; it ends with EXIT_STOPPED after SIGTERM, unless the
    configuration was at fault.

    Without it a role that was preempted, and has saved its work, would look to a scheduler like one that is done. Slurm
    signals all processes of the role at once, its engine too, which may then end before the role has: it does not count
    as a failure, and what the engine has handed over is stored.
    """
    return _STOPPABLE.format(command=command, stopped=EXIT_STOPPED, fault=EXIT_CONFIG)


@dataclass(frozen=True, slots=True)
class RoleSpecs:
    """The roles of a run on one machine."""

    trainer: RoleSpec
    servers: list[RoleSpec]
    spares: list[RoleSpec]
    """Rollout servers that the autoscaler may add."""

    def without_servers(self) -> RoleSpecs:
        """The trainer alone."""
        return RoleSpecs(self.trainer, [], [])


def role_specs(config: RunConfig, folder: RunFolder, model: Path) -> RoleSpecs:
    """Every role of a run on this machine, each with its own devices. Raises ConfigError."""
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

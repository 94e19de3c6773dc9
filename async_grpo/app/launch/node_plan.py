"""Placement of a run: machine, cores, devices and command of each role.

    nodes 0 .. trainer.nodes - 1   the trainer's ranks, trainer.processes / trainer.nodes on the first devices of each
    free devices, then more nodes  rollout servers, one after the other; no server spans two nodes

A node has `launch.devices_per_node` devices, by default as many as the usual machine with such devices. With
launch.share_devices, the servers use the devices of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from async_grpo.app.launch.role_process import assign_cores, available_cores
from async_grpo.app.launch.role_specs import assign_devices, devices_by_role
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.addresses import is_loopback
from trainer.platform import Platform

USUAL_DEVICES = {"npu": 16, "cuda": 8}
"""Devices of the usual machine: 8 modules with two dies each (Atlas 800 A3), 8 GPUs (DGX, HGX)."""


@dataclass(slots=True)
class PlannedNode:
    """Roles and commands of one machine."""

    roles: dict[str, list[str]] = field(default_factory=dict)
    """Role -> its devices; [] on the CPU."""
    commands: list[str] = field(default_factory=list)
    kind: str | None = None
    """Platform name of its devices; None before a role has devices."""
    used: int = 0
    """Number of devices that are not available to further roles."""

    @property
    def servers(self) -> int:
        """Number of rollout servers on this machine."""
        return len(self.roles.keys() - {"trainer"})


def count_node_devices(config: RunConfig, platform: Platform) -> int:
    """Return the number of devices of one machine of the run."""
    return config.launch.devices_per_node or USUAL_DEVICES[platform.name]


def explain_excess_devices(config: RunConfig) -> str:
    """Return why a run on one machine needs more devices than it has; "" if it does not."""
    devices = devices_by_role(config)
    platform = next((platform for platform, count in devices.values() if count), None)
    if platform is None or config.trainer.nodes > 1 or config.launch.share_devices != "off":
        return ""
    total = sum(count for _, count in devices.values())
    available = count_node_devices(config, platform)
    if total <= available:
        return ""
    if config.launch.devices_per_node:
        source = "launch.devices_per_node"
    else:
        source = "the usual number; set launch.devices_per_node if yours differ"
    return (
        f"{total} devices are planned, but a node has {available} ({source}), so `async-grpo run` cannot start this on "
        f"one machine. Lower trainer.processes, rollout.servers or {config.rollout.limits.devices_key}, set "
        "launch.share_devices, or start the roles on several machines as below"
    )


def plan_nodes(config: RunConfig) -> list[PlannedNode]:
    """Return the machines of a run whose roles are started separately. Raises ConfigError for a role that needs more
    devices than a node has."""
    trainer = config.trainer
    (trainer_platform, _), *servers = devices_by_role(config).values()
    ranks = trainer.processes_per_node if trainer_platform.visible_variable else 0
    nodes = [PlannedNode() for _ in range(trainer.nodes)]
    for number, node in enumerate(nodes):
        suffix = f" --node-rank {number}" if trainer.nodes > 1 else ""
        _assign_role(node, config, trainer_platform, ranks, "trainer", f"async-grpo trainer CONFIG{suffix}")
        if config.launch.share_devices != "off":
            node.used = 0  # the servers start on the first device again

    for index, (platform, count) in enumerate(servers[: config.rollout.servers]):
        target = next((node for node in nodes if _has_room(node, config, platform, count)), None)
        if target is None:
            target = PlannedNode()
            nodes.append(target)
        name = f"rollout-{index}"
        _assign_role(target, config, platform, count, name, f"async-grpo rollout CONFIG --name {name}")
    return nodes


def placement_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Return rows with the cores and devices of each role, and for several machines the commands on each.

    Raises ConfigError for cores and devices that this machine lacks.
    """
    rows = []
    if config.trainer.nodes == 1:
        sides = zip(("trainer", "rollout servers"), assign_cores(config, available_cores()), strict=True)
        pinned = [f"{side}: {','.join(map(str, cores))}" for side, cores in sides if cores]
        if pinned:
            rows.append(("cores", "; ".join(pinned)))

    excess = explain_excess_devices(config)
    if excess:
        rows.append(("too many devices", excess))
    if excess or config.trainer.nodes > 1:
        rows += _node_rows(config)
        try:
            check_reachable(config)
        except ConfigError as error:
            rows.append(("set before", str(error)))
    else:
        devices = []
        for role, environment in assign_devices(config, {}).items():
            if any(environment.values()):
                devices.append(f"{role}: {','.join(environment.values())}")
        if devices:
            rows.append(("devices", "; ".join(devices)))
    return rows


def _node_rows(config: RunConfig) -> list[tuple[str, str]]:
    try:
        nodes = plan_nodes(config)
    except ConfigError as error:
        return [("too many devices", str(error))]
    rows = []
    for number, node in enumerate(nodes):
        assigned = [f"{role}: {','.join(devices)}" for role, devices in node.roles.items() if devices]
        if assigned:
            rows.append((f"devices, node {number}", "; ".join(assigned)))
    for number, node in enumerate(nodes):
        rows.append((f"type on node {number}", "\n".join(node.commands)))
    return rows


def check_reachable(config: RunConfig, *, one_machine: bool = False) -> None:
    """Raise ConfigError for addresses that roles on other machines cannot reach."""
    if config.redis.url is None:
        raise ConfigError(
            "redis.url is not set: the roles need a server that every node reaches and that outlives their jobs. "
            "Start one (docs/several-machines.md), and set redis.url to redis://HOST:6379"
        )
    for key, url in (("redis.url", config.redis.url), ("weights.bind", config.weights.bind)):
        if not one_machine and is_loopback(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"{key} is {url}, which other nodes cannot reach. Set it to an address of the cluster's network"
                + (", or to tcp://0.0.0.0:5600, and weights.encrypt to control" if key == "weights.bind" else "")
            )


def _has_room(node: PlannedNode, config: RunConfig, platform: Platform, count: int) -> bool:
    if not count:
        return True
    return node.kind in (None, platform.name) and node.used + count <= count_node_devices(config, platform)


def _assign_role(node: PlannedNode, config: RunConfig, platform: Platform, count: int, role: str, command: str) -> None:
    """Add a role to a node, with the next `count` devices. Raises ConfigError if a node never has that many."""
    if count and count > count_node_devices(config, platform):
        raise ConfigError(
            f"{role} needs {count} devices on one node, but a node has {count_node_devices(config, platform)} "
            "(launch.devices_per_node). Use more trainer.nodes, lower "
            f"{config.rollout.limits.devices_key}, or correct launch.devices_per_node"
        )
    devices = [str(index) for index in range(node.used, node.used + count)]
    node.roles[role] = devices
    if devices:
        node.kind = platform.name
        command = f"{platform.visible_variable}={','.join(devices)} {command}"
    node.commands.append(command)
    node.used += count

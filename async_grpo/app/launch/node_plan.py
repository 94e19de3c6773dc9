"""The placement of a run: which role starts on which machine, with which cores and devices, and the commands to type.

    node 0 .. trainer.nodes - 1   the trainer's ranks, trainer.processes / trainer.nodes on the first devices of each
    what these leave, then more   rollout servers, one after the other; none is spread over two nodes

A node has `launch.devices_per_node` devices, by default as many as the usual machine of its kind. With
launch.share_devices the servers are on the devices of the trainer.
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
"""Devices of the usual machine: 8 modules of two dies (Atlas 800 A3), 8 GPUs (DGX, HGX)."""


@dataclass(slots=True)
class PlannedNode:
    """One machine: its roles and their devices, which are empty on the CPU."""

    roles: dict[str, list[str]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    kind: str = ""
    """Name of the platform of its devices; "" before a role needs one."""
    used: int = 0
    """Devices that belong to a role, or will not be given to another."""

    @property
    def servers(self) -> int:
        """Number of rollout servers on it."""
        return len(self.roles.keys() - {"trainer"})


def count_node_devices(config: RunConfig, platform: Platform) -> int:
    """Devices of one machine of the run."""
    return config.launch.devices_per_node or USUAL_DEVICES[platform.name]


def explain_excess_devices(config: RunConfig) -> str:
    """Why the devices of a run on one machine are too many for it, in words; "" if they are not."""
    wanted = devices_by_role(config)
    platform = next((platform for platform, count in wanted.values() if count), None)
    if platform is None or config.trainer.nodes > 1 or config.launch.share_devices != "off":
        return ""
    total, there = sum(count for _, count in wanted.values()), count_node_devices(config, platform)
    if total <= there:
        return ""
    source = "launch.devices_per_node" if config.launch.devices_per_node else "usual; launch.devices_per_node if not"
    return (
        f"{total} devices are planned, but a node has {there} ({source}): `async-grpo run` cannot start this on "
        f"one. Lower trainer.processes, rollout.servers or {config.rollout.limits.devices_key}, set "
        "launch.share_devices, or start the roles on several machines as below"
    )


def plan_nodes(config: RunConfig) -> list[PlannedNode]:
    """The machines of a run whose roles are started one by one. Raises ConfigError for a role that fits on none."""
    trainer, shares = config.trainer, config.launch.share_devices != "off"
    (platform, _), *servers = devices_by_role(config).values()
    ranks = trainer.processes_per_node if platform.visible_variable else 0
    nodes = [PlannedNode() for _ in range(trainer.nodes)]
    for number, node in enumerate(nodes):
        suffix = f" --node-rank {number}" if trainer.nodes > 1 else ""
        _place(node, config, platform, ranks, "trainer", f"async-grpo trainer CONFIG{suffix}")
        if shares:
            node.used = 0

    for index, (generates, count) in enumerate(servers[: config.rollout.servers]):
        target = next((node for node in nodes if _has_room(node, config, generates, count)), None)
        if target is None:
            target = PlannedNode()
            nodes.append(target)
        name = f"rollout-{index}"
        _place(target, config, generates, count, name, f"async-grpo rollout CONFIG --name {name}")
    return nodes


def placement_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Rows with the cores and devices of each role, and for several machines the commands for each.

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
        shares = assign_devices(config, {})
        devices = {role: ",".join(shown.values()) for role, shown in shares.items() if any(shown.values())}
        if devices:
            rows.append(("devices", "; ".join(f"{role}: {numbers}" for role, numbers in devices.items())))
    return rows


def _node_rows(config: RunConfig) -> list[tuple[str, str]]:
    try:
        nodes = plan_nodes(config)
    except ConfigError as error:
        return [("too many devices", str(error))]
    rows = []
    for number, node in enumerate(nodes):
        dealt = [f"{role}: {','.join(devices)}" for role, devices in node.roles.items() if devices]
        if dealt:
            rows.append((f"devices, node {number}", "; ".join(dealt)))
    for number, node in enumerate(nodes):
        rows.append((f"type on node {number}", "\n".join(node.commands)))
    return rows


def check_reachable(config: RunConfig, *, one_machine: bool = False) -> None:
    """Raise ConfigError for addresses at which roles on other machines do not find this run."""
    if config.redis.url is None:
        raise ConfigError(
            "redis.url is not set: the roles meet on a server that every node reaches, and that outlives their jobs. "
            "Start one (docs/operations.md), and set redis.url to redis://HOST:6379"
        )
    for key, url in (("redis.url", config.redis.url), ("weights.bind", config.weights.bind)):
        if not one_machine and is_loopback(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"{key} is {url}, which other nodes do not reach. Set it to an address of the cluster's network"
                + (", or to tcp://0.0.0.0:5600, and weights.encrypt to control" if key == "weights.bind" else "")
            )


def _has_room(node: PlannedNode, config: RunConfig, platform: Platform, count: int) -> bool:
    if not count:
        return True
    return node.kind in ("", platform.name) and node.used + count <= count_node_devices(config, platform)


def _place(node: PlannedNode, config: RunConfig, platform: Platform, count: int, role: str, command: str) -> None:
    """Give a role the next devices of a node."""
    if count and count > count_node_devices(config, platform):
        raise ConfigError(
            f"{role} needs {count} devices of one node, but a node has {count_node_devices(config, platform)} "
            "(launch.devices_per_node). Spread the trainer over more trainer.nodes, lower "
            f"{config.rollout.limits.devices_key}, or correct launch.devices_per_node"
        )
    devices = [str(index) for index in range(node.used, node.used + count)]
    node.roles[role] = devices
    if devices:
        node.kind = platform.name
        command = f"{platform.visible_variable}={','.join(devices)} {command}"
    node.commands.append(command)
    node.used += count

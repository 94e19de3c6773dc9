"""Divides the devices of the other system between trainer and rollout servers, which mostly take turns there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from async_grpo.config.trainer import VLLM_PLATFORMS
from async_grpo.lab.importers.translation import Translation

SHARED_CACHE_BYTES = 4 << 30
"""KV cache of an engine that shares its devices with the trainer. Other systems have no such setting."""


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """The devices of the other system and their assignment."""

    platform: str
    nodes: int
    per_node: int
    engine: int
    """Devices of one engine."""
    rollout_devices: int = 0
    """Devices that only generate; 0 means that trainer and engines take turns on the same devices."""


def parallel_size(t: Translation, kind: str) -> int:
    """Return the trainer's size of tensor, pipeline, context or expert parallelism, 1 if not set."""
    setting = t.settings.get(f"trainer.{kind}_parallel")
    return 1 if setting is None else int(setting.value)


def _smallest_rank_count(t: Translation) -> int:
    """Return the smallest number of ranks for one copy of the model with its experts distributed evenly."""
    pipeline = parallel_size(t, "pipeline")
    replica = parallel_size(t, "tensor") * pipeline * parallel_size(t, "context")
    return math.lcm(replica, pipeline * parallel_size(t, "expert"))


def set_devices(t: Translation, count: DeviceCount) -> None:
    """Set platform, ranks and servers. If both sides took turns, half of the devices train and half generate.

    On one machine with too few devices for that, both sides share them (`launch.share_devices`): the run must not need
    more devices than the file has. Call it after the parallel sizes are set.
    """
    block = _smallest_rank_count(t)
    t.set("trainer.platform", count.platform)
    t.set("rollout.vllm.platform", VLLM_PLATFORMS[count.platform])
    if count.engine > 1:
        t.set("rollout.vllm.tensor_parallel", count.engine)
    total = count.nodes * count.per_node
    if count.rollout_devices:
        nodes = count.nodes if total % count.nodes == 0 else 1
        t.set("trainer.processes", total)
        _set_machines(t, nodes, max(1, count.rollout_devices // count.engine), on_other_machines=nodes > 1)
    elif count.nodes > 1:
        _split_machines(t, count, block)
    elif count.platform != "cpu" and block + count.engine > total:
        _share_devices(t, count, total, block)
    else:
        _split_devices(t, count, total, block)


def _split_devices(t: Translation, count: DeviceCount, total: int, block: int) -> None:
    """Assign half of the devices of one machine to the trainer, but leave enough for one engine."""
    most_ranks = max((total - count.engine) // block, 1) * block
    ranks = min(max(total // 2 // block, 1) * block, most_ranks)
    servers = max(1, (total - ranks) // count.engine)
    generating = servers * count.engine
    t.set(
        "trainer.processes",
        ranks,
        f"all {total} devices took turns there; here {ranks} train and {generating} generate",
    )
    t.set("rollout.servers", servers)


def _share_devices(t: Translation, count: DeviceCount, total: int, block: int) -> None:
    """Assign all devices of one machine to both sides, which take turns."""
    note = ""
    if max(block, count.engine) > total:
        note = f"CHANGE ME: the file's parallel sizes need {max(block, count.engine)} devices, and it has {total}"
    t.set("trainer.processes", max(total // block, 1) * block, note)
    t.set("rollout.servers", max(1, total // count.engine))
    apart = f"{block} for a trainer and {count.engine} for an engine are more than the {total} devices of the file"
    t.set("launch.share_devices", "sleep", f"both sides take turns, as there: {apart}")
    t.set(
        "rollout.vllm.kv_cache_bytes",
        SHARED_CACHE_BYTES,
        "CHANGE ME: 4 GiB a device; --dry-run shows what a sample takes",
    )


def _split_machines(t: Translation, count: DeviceCount, block: int) -> None:
    """Assign half of the machines to the trainer, but at least enough for one copy of the model."""
    nodes = max(1, count.nodes // 2)
    ranks = max(nodes * count.per_node // block, 1) * block
    nodes = max(nodes, math.ceil(ranks / count.per_node))
    if ranks % nodes:
        nodes = 1
    total = count.nodes * count.per_node
    generating = total - ranks
    note = f"all {total} devices took turns there; here {ranks} train and {generating} generate"
    if generating < count.engine:
        note = f"CHANGE ME: a trainer needs {ranks} of the file's {total} devices, which leaves none to generate"
    t.set("trainer.processes", ranks, note)
    _set_machines(t, nodes, max(1, generating // count.engine), on_other_machines=True)


def _set_machines(t: Translation, nodes: int, servers: int, *, on_other_machines: bool) -> None:
    """Set the machines of the trainer, and the servers. `async-grpo run` starts only servers on its own machine."""
    if nodes > 1:
        t.set("trainer.nodes", nodes, "async-grpo trainer --node-rank R on each of them")
        t.set("trainer.rendezvous.address", "node0", "CHANGE ME: how the others reach the first node")
    if on_other_machines:
        how = "async-grpo rollout on the machines that generate, with redis.url"
        t.set("rollout.servers", 1, f"{servers} in all: {how}")
    else:
        t.set("rollout.servers", servers)


def set_engine_memory(t: Translation, share: float) -> None:
    """Set the engine's share of a device's memory. Call it after `set_devices`."""
    comment = "the engine has its devices to itself here: 0.8 or more is usual"
    if "launch.share_devices" in t.settings:
        comment = "of a device that it shares with the trainer, as there"
    t.set("rollout.vllm.gpu_memory_utilization", share, comment)

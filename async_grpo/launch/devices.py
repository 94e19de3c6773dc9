"""Which accelerators each role of `async-grpo run` gets: no device belongs to two roles.

    trainer     the first trainer.processes devices
    rollout-i   the next rollout.vllm.tensor_parallel ones, server after server

The devices are those of CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES, if set; else they are numbered from 0. A
role that computes on the CPU sees none. A server that dies and is started again gets the same devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from async_grpo.config import RunConfig
from async_grpo.devices import VISIBLE, visible
from async_grpo.errors import ConfigError

KINDS = {"cpu": "cpu", "cuda": "cuda", "npu": "npu", "ascend": "npu"}
"""By platform, as trainer and rollout servers call it."""


Environments = dict[str, dict[str, str]]
"""By role."""


def deal_devices(config: RunConfig, environment: Mapping[str, str], there: int | None = None) -> Environments:
    """By role: the environment that shows it its devices and no others.

    `there`: how many devices this machine has, if that is known. Raises ConfigError if they are too few.
    """
    wanted = _wanted(config)
    kinds = {kind for kind, count in wanted.values() if count}
    if len(kinds) > 1:
        raise ConfigError(
            f"trainer.platform is {config.trainer.platform} and rollout.vllm.platform {config.rollout.vllm.platform}: "
            "one machine has accelerators of one kind. Start the roles on different ones (async-grpo trainer, rollout)"
        )
    if not kinds:
        return {role: {} for role in wanted}
    (kind,) = kinds
    pool = _pool(kind, sum(count for _, count in wanted.values()), environment, there)
    dealt: Environments = {}
    for role, (_, count) in wanted.items():
        own, pool = pool[:count], pool[count:]
        dealt[role] = {VISIBLE[kind]: ",".join(own)}
    return dealt


def _wanted(config: RunConfig) -> dict[str, tuple[str, int]]:
    """By role: which kind of device, and how many."""
    trainer, vllm = KINDS[config.trainer.platform], config.rollout.vllm
    server = KINDS[vllm.platform]
    roles = {"trainer": (trainer, config.trainer.processes if trainer != "cpu" else 0)}
    for index in range(config.rollout.servers):
        roles[f"rollout-{index}"] = (server, vllm.tensor_parallel if server != "cpu" else 0)
    return roles


def _pool(kind: str, needed: int, environment: Mapping[str, str], there: int | None) -> list[str]:
    named = visible(kind, environment)
    pool = named if named is not None else [str(index) for index in range(needed if there is None else there)]
    if len(pool) < needed:
        source = f"{VISIBLE[kind]} names" if named is not None else "this machine has"
        raise ConfigError(
            f"trainer.processes and rollout.servers * rollout.vllm.tensor_parallel make {needed} devices, but {source} "
            f"{len(pool)}. Lower them, give more, or start the roles on several machines (async-grpo trainer, rollout)"
        )
    return pool

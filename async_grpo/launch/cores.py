"""Which cores of this machine each role of `async-grpo run` may use, with everything that it starts.

    trainer     launch.cores.trainer: ranks, publisher
    rollout-i   launch.cores.rollout: server, engine, receiver, verifiers; all servers of the machine share them

The server of the buffer and the supervisor run wherever there is room. A role without a list does, too.
"""

from __future__ import annotations

import os

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError


def cores_here() -> list[int]:
    """The cores that this process may use, ascending; [] on a system that cannot tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def role_cores(config: RunConfig, here: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the trainer and of every rollout server; () for all. Raises ConfigError for a core that is not `here`."""
    wanted = config.launch.cores
    for key, cores in (("trainer", wanted.trainer), ("rollout", wanted.rollout)):
        if absent := sorted(set(cores) - set(here)):
            available = ", ".join(map(str, here)) or "none: this system pins no process to a core"
            raise ConfigError(
                f"launch.cores.{key} names {', '.join(map(str, absent))}, but the cores that this process may use are "
                f"{available}. Name some of these, or leave launch.cores.{key} out"
            )
    return tuple(wanted.trainer), tuple(wanted.rollout)


def pin(cores: tuple[int, ...]) -> None:
    """This process, and whatever it starts, runs on these cores only; () changes nothing."""
    if cores:
        os.sched_setaffinity(0, cores)

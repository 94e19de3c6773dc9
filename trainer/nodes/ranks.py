"""The ranks of this machine: what torchrun would start, with what it would tell them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import TrainingError
from async_grpo.process import child_argv

GRACE_S = 10.0
"""Ranks that must end have so long before they are killed: to say what they have to say."""

_INTERFACES = {"cpu": (), "cuda": ("NCCL_SOCKET_IFNAME",), "npu": ("HCCL_SOCKET_IFNAME",)}
"""Beside GLOO_SOCKET_IFNAME; `=` before the name asks for this very one, where `eth1` would also mean eth10."""


class Terminated(TrainingError):
    """SIGTERM has ended a rank. From the moment that it has joined the run on, none lets that happen."""


def rank_environments(config: TrainerConfig, node_rank: int) -> list[dict[str, str]]:
    """One a rank of this node. The ranks find each other in a store that node 0 keeps."""
    count = config.processes_per_node
    shared = {
        "MASTER_ADDR": str(config.rendezvous.address),
        "MASTER_PORT": str(config.rendezvous.port + 1),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # nobody among the ranks opens it
        "WORLD_SIZE": str(config.processes),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(config.nodes),
    }
    return [
        shared | {"RANK": str(node_rank * count + local), "LOCAL_RANK": str(local)}
        for local in range(config.processes_per_node)
    ]


def network_environment(platform: str, own_address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The network card on which this node reaches the others, for those that would guess it from the host's name.

    What the user has set stands; nothing is said of an address that no card has.
    """
    card = _card_of(own_address)
    if card is None:
        return {}
    names = {"GLOO_SOCKET_IFNAME": card} | {name: f"={card}" for name in _INTERFACES[platform]}
    return {name: value for name, value in names.items() if name not in environment}


def _card_of(address: str) -> str | None:
    wanted = "127.0.0.1" if address.startswith("127.") else address
    cards = psutil.net_if_addrs().items()
    return next((card for card, found in cards if any(entry.address == wanted for entry in found)), None)


@dataclass(slots=True)
class LocalRanks:
    """Processes of this node, by their rank in the whole trainer. They die with this process."""

    processes: dict[int, asyncio.subprocess.Process]

    @classmethod
    async def start(cls, argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> LocalRanks:
        """In a session of their own: Ctrl-C is for the node, which tells them."""
        started = cls({})
        for environment in environments:
            started.processes[int(environment["RANK"])] = await asyncio.create_subprocess_exec(
                *child_argv(argv), env={**os.environ, **environment}, start_new_session=True
            )
        return started

    async def wait(self) -> None:
        """Until all have ended with 0. Raises TrainingError, or Terminated, for the first that has not."""
        waiting = [asyncio.create_task(_good_end(rank, process)) for rank, process in self.processes.items()]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def stop(self) -> None:
        """SIGTERM to rank 0, on its node: it brings the trainer to an end, the others wait for its word, and one that
        has not joined the run yet would not survive the signal."""
        _terminate(self.processes[0])

    async def end(self) -> None:
        """Whatever is left of them: SIGTERM, patience, SIGKILL."""
        for process in self.processes.values():
            _terminate(process)
        left = [asyncio.create_task(process.wait()) for process in self.processes.values()]
        await asyncio.wait(left, timeout=GRACE_S)
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*left)


def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)


async def _good_end(rank: int, process: asyncio.subprocess.Process) -> None:
    code = await process.wait()
    if code == -signal.SIGTERM:
        raise Terminated(f"rank {rank} was killed by SIGTERM")
    if code < 0:
        raise TrainingError(f"rank {rank} was killed by {signal.Signals(-code).name}")
    if code > 0:
        raise TrainingError(f"rank {rank} ended with exit code {code}")

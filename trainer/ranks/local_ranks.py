"""The ranks of this machine: their environment, their errors, their end.

    node --environment--> rank 0 .. N-1 --standard error--> node --the same lines--> log

The node waits for its ranks.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import CONFIG_FAULTS, TrainingError
from async_grpo.telemetry.logging import fatal_events, redact_secrets
from async_grpo.telemetry.role_history import VARIABLE
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.utils.child_process import child_argv, signal_name
from async_grpo.utils.network import card_environment
from trainer.platform import select_platform
from trainer.ranks.store import OPENED

log = structlog.get_logger()

GRACE_S = 10.0
"""Seconds that ranks have to end, and to write their last output, before they are killed."""

KILLED_S = 30.0
"""Seconds in which a process ends after SIGKILL. One that hangs in a driver or on a dead NFS never does."""

_STANDARD_ERROR = 2
_TAIL_BYTES = 16 << 10

_LAST_OUTPUT_S = 1.0
"""What a rank wrote before its end has been read by then, though a child of it may still hold its standard error."""

_SHOWN_CHARACTERS = 500
_RANK = r"(?:\[rank\d+\]: ?)?"  # torch puts it before every line of a traceback
_FAULTS = "|".join(fault.__name__ for fault in CONFIG_FAULTS)

_ERROR = re.compile(
    rf"(?:^{_RANK}[ \t]+\S.*\n{_RANK}(?=[A-Za-z_])|^(?=(?:{_FAULTS}): ))([\w.]+(?:: .*)?)$", re.MULTILINE
)
"""The line that ends a traceback: not indented, below one that is. Faults of the configuration have none."""


class RankFailed(TrainingError):
    """A rank has ended with an exit code above 0, which is `code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Terminated(TrainingError):
    """SIGTERM has ended a rank, which is possible only before it has joined the run."""


def rank_environments(config: TrainerConfig, node_rank: int, store: tuple[str, int] | None) -> list[dict[str, str]]:
    """The environment of each rank of this node. `store`: its address; None for a single rank."""
    count = config.processes_per_node
    shared = {
        "WORLD_SIZE": str(config.processes),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(config.nodes),
    }
    if store is not None:
        address, port = store
        shared |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        shared |= {OPENED: "True"}
    return [shared | {"RANK": str(node_rank * count + local), "LOCAL_RANK": str(local)} for local in range(count)]


def network_environment(platform: str, own_address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that name the network card on which this node reaches the others, for libraries that would guess it.

    Variables that the user has set stay; an address that no card has gives none.
    """
    found = card_environment(own_address, select_platform(platform).network_variables)
    return {name: value for name, value in found.items() if name not in environment}


class ErrorOutput:
    """What a rank writes to standard error: passed on line by line, so that ranks do not mix, with its end kept.

    A thread reads it, since a rank must not wait for a node that is busy.
    """

    def __init__(self) -> None:
        reading, self.write_end = os.pipe()
        self._tail = b""
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), name="rank-errors", daemon=True)
        self._thread.start()

    def last_error(self) -> str:
        """The last error that a traceback names, else the last line; "" if nothing was written."""
        tail = self._tail.decode("utf-8", "replace")
        found = (
            fatal_events(tail) or _ERROR.findall(tail) or [line.strip() for line in tail.splitlines() if line.strip()]
        )
        return redact_secrets(found[-1])[:_SHOWN_CHARACTERS] if found else ""

    async def read_to_the_end(self) -> None:
        """Wait until everything is passed on."""
        await asyncio.to_thread(self._thread.join, _LAST_OUTPUT_S)

    def _pass_on(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as stream:
            for line in stream:
                self._tail = (self._tail + line)[-_TAIL_BYTES:]
                try:
                    os.write(_STANDARD_ERROR, line)
                except OSError:  # the disk of the log is full: the rank goes on
                    continue


@dataclass(slots=True)
class Rank:
    """One rank as a process, which dies with this one."""

    number: int
    """Number of the rank among those of all nodes."""
    process: asyncio.subprocess.Process
    errors: ErrorOutput

    @classmethod
    async def start(cls, argv: Sequence[str], environment: Mapping[str, str]) -> Rank:
        """Start the process in a session of its own: Ctrl-C reaches the node, which tells it. It leaves the history of
        the role to the node."""
        errors = ErrorOutput()
        try:
            process = await asyncio.create_subprocess_exec(
                *child_argv(argv),
                env={**os.environ, **environment, VARIABLE: ""},
                stderr=errors.write_end,
                start_new_session=True,
            )
        finally:
            os.close(errors.write_end)
        return cls(int(environment["RANK"]), process, errors)

    async def wait(self) -> None:
        """Wait until the rank has ended with 0. Raises RankFailed, Terminated, TrainingError for another signal."""
        code = await self.process.wait()
        if code == -signal.SIGTERM:
            raise Terminated(f"rank {self.number} was killed by SIGTERM")
        if code < 0:
            raise TrainingError(f"rank {self.number} was killed by {signal_name(-code)}")
        if code > 0:
            await self.errors.read_to_the_end()
            cause = self.errors.last_error()
            raise RankFailed(f"rank {self.number} ended with exit code {code}{': ' + cause if cause else ''}", code)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still there."""
        if self.process.returncode is None:
            self.process.send_signal(number)


@dataclass(slots=True)
class LocalRanks:
    """The ranks of this node."""

    ranks: list[Rank]

    @classmethod
    async def start(cls, argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> LocalRanks:
        """Start a rank for each environment."""
        return cls([await Rank.start(argv, environment) for environment in environments])

    async def wait(self) -> None:
        """Wait until all have ended with 0. Raises TrainingError, as `Rank.wait`, for the first that has not."""
        waiting = [asyncio.create_task(rank.wait()) for rank in self.ranks]
        try:
            await asyncio.gather(*waiting)
        finally:
            await cancel_and_wait(*waiting)

    def stop(self) -> None:
        """Send SIGTERM to rank 0, on its node: it brings the trainer to an end, the others wait for its word, and one
        that has not joined the run yet would not survive the signal."""
        self.ranks[0].send(signal.SIGTERM)

    async def end(self) -> None:
        """End the ranks that are left: SIGTERM, then SIGKILL after GRACE_S.

        A rank that not even SIGKILL ends within KILLED_S is left: if the node waited for it, nobody would restart it.
        """
        for rank in self.ranks:
            rank.send(signal.SIGTERM)
        left = [asyncio.create_task(rank.process.wait()) for rank in self.ranks]
        await asyncio.wait(left, timeout=GRACE_S)
        for rank in self.ranks:
            rank.send(signal.SIGKILL)
        await asyncio.wait(left, timeout=KILLED_S)
        await cancel_and_wait(*left)
        stuck = [rank.number for rank in self.ranks if rank.process.returncode is None]
        if stuck:
            log.error("ranks did not end within KILLED_S of SIGKILL and are left", ranks=stuck, killed_s=KILLED_S)
        await asyncio.gather(*(rank.errors.read_to_the_end() for rank in self.ranks))
